"""Check every source file of the package for forbidden imports and forbidden state."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import TinyCheckpoint

ROOT = Path(__file__).parent.parent
PACKAGE = "nanovllm"

# These run in processes that do not import torch; torch and transformers may not be installed.
TORCH_FREE = (
    *("config/", "sampling_params.py", "outputs.py", "assembly.py", "llm.py"),
    *("async_llm.py", "engine/"),
    *("features/grammar/", "features/latency/", "features/states/"),
    *(f"features/speculation/{name}.py" for name in ("drafter", "ngram_proposer", "proposer")),
    *("serve/replica.py", "serve/core_messages.py", "serve/output_queue.py"),
    *("serve/live/", "serve/routing.py"),
    *("serve/parsing/", "serve/openai/", "serve/anthropic/"),
)
# Dotted names and the only files that may use them.
ONLY_IN = {
    "torch.cuda": ("devices/cuda/",),
    "torch.distributed": ("parallel/rendezvous.py",),
    # The environment that child processes inherit.
    "os.environ": (
        "cli/options.py",
        "cli/serve.py",
        "cli/start.py",
        "parallel/supervisor.py",
        "devices/cuda/memory.py",  # sets CC, which Triton reads too
        "devices/replica_share.py",
    ),
    "os.getenv": (),
}
ALLOWED_CHANGES = {
    # The only way to find out what Triton would launch; restored afterwards.
    "devices/cuda/compile_ahead.py": "knobs.runtime.jit_cache_hook",
    # The --threads option sets it for engines in child processes.
    "cli/start.py": "os.environ['OMP_NUM_THREADS']",
    # The only way to hide GPUs from all threads and children of a process.
    "devices/replica_share.py": "os.environ[VISIBLE]",
}
MUTATORS = re.compile(
    "append|add|update|setdefault|pop|popitem|clear|extend|insert|remove|discard"
    "|appendleft|popleft|extendleft|move_to_end|__setitem__"
)


def sources() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).as_posix()


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sources()}


def test_host_files_do_not_import_torch(trees: dict[Path, ast.Module]) -> None:
    """Only functions that build an engine may import torch."""
    for path, tree in trees.items():
        if relative(path).startswith(TORCH_FREE):
            assert not roots(tree.body) & {"torch", "transformers"}, path
            assert relative(path) == "llm.py" or "torch" not in roots(run_time_nodes(tree)), path


def test_device_and_environment_stay_in_their_files(trees: dict[Path, ast.Module]) -> None:
    assert [name for path in trees for name in misplaced_names(relative(path), trees[path])] == []


def test_no_module_state_changes_at_run_time(trees: dict[Path, ast.Module]) -> None:
    for path, tree in trees.items():
        allowed = ALLOWED_CHANGES.get(relative(path), "nothing")
        found = [change for change in state_changes(tree) if allowed not in change]
        assert found == [], relative(path)


def run_script(script: str, *arguments: str) -> str:
    """Run a script in a fresh process, so that nothing is imported yet."""
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_scheduling_runs_without_torch() -> None:
    """A process that can import neither torch nor transformers schedules a step."""
    script = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from array import array
from nanovllm.engine import block_manager, detokenizer, request, scheduler, sequence, step
from nanovllm.sampling_params import SamplingParams
planner = scheduler.Scheduler(block_manager.BlockManager(4, 16, True), 2, 8)
prompt = request.Request(0, array("i", [1, 2, 3]), SamplingParams())
planner.add(sequence.Sequence(prompt))
print(planner.schedule().counts)
"""
    assert run_script(script) == "[3]\n"


def test_a_server_is_made_without_torch() -> None:
    script = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from nanovllm.serve import http_server as run
print(run.make_server.__name__)
"""
    assert run_script(script) == "make_server\n"


def test_a_program_with_an_engine(tiny: Callable[[str], TinyCheckpoint]) -> None:
    """Imports have no side effects and need no server packages; the first steps import nothing
    large: torch's compiler and its dependencies would delay the second token by seconds."""
    script = """
import logging, os, signal, sys, torch
sys.modules.update(dict.fromkeys(["fastapi", "uvicorn", "prometheus_client", "pydantic", "yaml"]))
def state():
    return dict(os.environ), torch.get_num_threads(), signal.getsignal(signal.SIGINT)
torch.set_num_threads(1)
before = state()
from nanovllm import LLM, AsyncLLM, SamplingParams
print(state() == before, logging.getLogger("nanovllm").handlers, logging.getLogger().handlers)
from nanovllm.cli import parse
print(parse(["serve"]).port)
with LLM(sys.argv[1], skip_tokenizer_init=True) as llm:
    executor = llm.engine.core.executor
    assert list(executor.runner.forward._steps) == [1], "the second token would wait"
    before = set(sys.modules)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.5, max_tokens=4), use_tqdm=False)
names = ("torch._dynamo", "torch._inductor", "sympy")
print([name for name in names if name in sys.modules], len(set(sys.modules) - before))
"""
    *lines, last = run_script(script, str(tiny("qwen3").path)).splitlines()
    assert lines == ["True [] []", "8000"]
    names, num_modules = last.rsplit(maxsplit=1)
    assert names == "[]"
    assert int(num_modules) < 50


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    global x\n    x = 1",
        "table = {}\ndef f():\n    table[1] = 2",
        "table = {}\ndef f():\n    table.setdefault(1, []).append(2)",
        "names = []\nclass A:\n    def f(self):\n        names.append(1)",
        "class A:\n    count = 0\n    def f(self):\n        A.count += 1",
        "class A:\n    @classmethod\n    def f(cls):\n        cls.count = 1",
        "import other\ndef f():\n    other.option = True",
        "from functools import cache\n@cache\ndef f(): ...",
        "table = {}\ndef f():\n    del table[1]",
    ],
)
def test_the_state_check_sees_violations(source: str) -> None:
    assert state_changes(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "x = {}\ndef f():\n    x = {}\n    x[1] = 2",
        "x = {}\ndef f(x):\n    x.update({1: 2})",
        "x = {1: 2}\ndef f():\n    return x[1]",
        "class A:\n    def f(self):\n        self.x = 1",
        "import numpy as np\ndef f(a):\n    np.add(a, 1)\n    b = np.zeros(3)\n    b[0] = 1",
    ],
)
def test_the_state_check_allows_locals(source: str) -> None:
    assert state_changes(ast.parse(source)) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("worker/worker.py", "import torch\ntorch.cuda.synchronize()"),
        ("worker/worker.py", "from torch import cuda"),
        ("worker/worker.py", "import torch.distributed as dist"),
        ("assembly.py", "from os import environ"),
        ("llm.py", "import os\nos.getenv('X')"),
    ],
)
def test_the_name_check_sees_violations(file: str, source: str) -> None:
    assert misplaced_names(file, ast.parse(source))


def roots(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the packages that statements import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        pending += ast.iter_child_nodes(node)


def misplaced_names(file: str, tree: ast.Module) -> list[str]:
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
            used.add(str(node.module))
    return [
        f"{file} uses {name}"
        for name, places in ONLY_IN.items()
        if any(f"{word}.".startswith(f"{name}.") for word in used) and not file.startswith(places)
    ]


def state_changes(tree: ast.Module) -> list[str]:
    """Return the statements inside functions that change the state of a module or a class."""
    module_names = bound_names(tree.body)
    found = [
        f"line {node.lineno}: cached function {node.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if "cache" in ast.unparse(decorator).split("(")[0]
    ]
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        arguments = {
            argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)
        }
        shared = (module_names - arguments - bound_names(function.body)) | {"cls"}
        for node in ast.walk(function):
            if isinstance(node, ast.Global) or any(r in shared for r in changed_roots(node)):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def bound_names(body: list[ast.stmt]) -> set[str]:
    """Return the names that a module or function binds, but not those in nested scopes."""
    names: set[str] = set()
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        pending += ast.iter_child_nodes(node)
    return names


def changed_roots(node: ast.AST) -> Iterator[str]:
    """Yield the names of objects that a statement or call changes."""
    is_place = isinstance(node, ast.Attribute | ast.Subscript)
    if is_place and isinstance(node.ctx, ast.Store | ast.Del):
        yield root_name(node)
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if is_method and MUTATORS.fullmatch(node.func.attr) and not is_module_alias(node.func.value):
        yield root_name(node.func.value)


def is_module_alias(name: ast.expr) -> bool:
    """Whether a name is a module: `np.add(...)` changes nothing, but `names.add(...)` does."""
    return isinstance(name, ast.Name) and name.id in ("np", "torch", "F")


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
