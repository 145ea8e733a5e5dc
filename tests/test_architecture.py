"""Import directions and forbidden state, read from the source of every file of the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import TinyCheckpoint

ROOT = Path(__file__).parent.parent
PACKAGE = "nanovllm"

# Left never imports right; parts between commas do not import each other.
ORDER = """
    errors, pending, fp8 < validation < quantisation, grammar.json_schema, grammar.limits
    < grammar.forms < grammar.matching, sampling_params, outputs
    < prompts, chat_template, engine_options < config
    < devices.base, devices.cpu.features, distributed < kernels < attention < layers < models
    < worker.tables < worker.forward < logits < worker
    < devices < executor
    < engine.core < engine.start < engine.engine_thread, serving.core_process, serving.replica
    < scoring, conversations, client
    < llm, async_llm < server < jobs < ray < cli < ray.serve < __main__
"""
LEAVES = (
    "errors",
    "pending",
    "validation",
    "quantisation",
    "grammar.json_schema",
    "grammar.limits",
    "grammar.forms",
    "grammar.matching",
    "sampling_params",
    "outputs",
    "prompts",
    "config",
)
# The scheduling files know counts and token ids only: the leaves and each other.
HOST = (
    "engine.request",
    "engine.sequence",
    "engine.block_manager",
    "engine.prompt_budget",
    "engine.scheduler",
    "engine.step",
    "engine.detokenizer",
    "engine.front",
    "engine.logprobs",
)
# What executors and workers know of the engine.
WIRE = ("engine.step",)
# What a front may know of a core in another process; imports no torch either.
CLIENT = (
    "serving.core_records",
    "serving.viewers",
    "serving.routing",
)
# Parts beside the order: what they may import, and the first part that may import them.
BESIDE = {
    "checkpoint": (("errors", "quantisation", "fp8"), "worker.tables"),
    **dict.fromkeys(CLIENT, ((*LEAVES, *HOST, *CLIENT, "checkpoint", "executor"), "engine.core")),
    **dict.fromkeys(WIRE, ((*LEAVES, *WIRE), "worker.tables")),
    **{part: ((*LEAVES, *HOST), "engine.core") for part in HOST if part not in WIRE},
    # Their __init__.py are empty: a part must not bring the rest along.
    "engine": ((), "worker.tables"),
    "grammar": ((), "sampling_params"),
    "serving": ((), "engine.core"),
    "server.parsing": (("errors", "validation", "engine.detokenizer"), "server"),
    # Whose __version__ is told.
    "__init__": (("llm", "outputs", "sampling_params", "errors"), "server"),
}
# What runs where neither of these is installed.
PARSING = tuple(
    f"server.parsing.{name}"
    for name in ("events", "formats", "grammar", "parser", "reader", "tools")
)
TORCH_FREE = (
    *(*LEAVES, *HOST, *CLIENT, *PARSING),
    *("engine.core", "engine.start", "serving.replica"),
    *("scoring", "async_llm"),
)
# Dotted names, and the only files that may use them.
ONLY_IN = {
    "torch.cuda": ("devices/cuda/", "kernels/cuda/"),
    "torch.distributed": ("distributed/",),
    # What a child inherits.
    "os.environ": (
        "config.py",
        "cli/options.py",
        "cli/serve.py",
        "cli/start.py",
        "parallel/supervisor.py",
        "devices/cuda/memory.py",  # CC, which Triton reads too
        "devices/choose.py",
    ),
    "os.getenv": ("config.py",),
}
ALLOWED_CHANGES = {
    # The one way to learn what Triton would launch, put back when that is known.
    "devices/cuda/compile_ahead.py": "knobs.runtime.jit_cache_hook",
    # What --threads sets for the engines that are child processes.
    "cli/start.py": "os.environ['OMP_NUM_THREADS']",
    # The one way to hide GPUs from all threads and children of a process.
    "devices/choose.py": "os.environ[VISIBLE]",
}
MUTATORS = re.compile(
    "append|add|update|setdefault|pop|popitem|clear|extend|insert|remove|discard"
    "|appendleft|popleft|extendleft|move_to_end|__setitem__"
)


def may_import() -> dict[str, set[str]]:
    """Spell the order out: each part, and every other part that it may import."""
    allowed: dict[str, set[str]] = {part: set(below) for part, (below, _) in BESIDE.items()}
    known: set[str] = set()
    for level in ORDER.split("<"):
        parts = {part.strip() for part in level.split(",")}
        known |= {part for part, (_, first_user) in BESIDE.items() if first_user in parts}
        allowed |= {part: set(known) for part in parts}
        known |= parts
    return allowed


MAY_IMPORT = may_import()


def sources() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).as_posix()


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sources()}


def test_imports_point_downwards(trees: dict[Path, ast.Module]) -> None:
    assert [edge for path in trees for edge in upward_edges(module_name(path), trees[path])] == []


def test_host_files_do_not_import_torch(trees: dict[Path, ast.Module]) -> None:
    for part in TORCH_FREE:
        tree = trees[ROOT.joinpath(PACKAGE, *part.split(".")).with_suffix(".py")]
        roots = {module.split(".")[0] for module in imported_modules(tree, f"{PACKAGE}.{part}")}
        assert roots.isdisjoint({"torch", "transformers"}), part


def test_device_and_environment_stay_in_their_files(trees: dict[Path, ast.Module]) -> None:
    assert [name for path in trees for name in misplaced_names(relative(path), trees[path])] == []


def test_no_module_state_changes_at_run_time(trees: dict[Path, ast.Module]) -> None:
    for path, tree in trees.items():
        allowed = ALLOWED_CHANGES.get(relative(path), "nothing")
        found = [change for change in state_changes(tree) if allowed not in change]
        assert found == [], relative(path)


def run_script(script: str, *arguments: str) -> str:
    """Run in a fresh process, so that nothing is imported yet."""
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_scheduling_runs_without_torch() -> None:
    """A process in which neither torch nor transformers can be imported schedules a step."""
    script = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from array import array
from nanovllm.engine import block_manager, detokenizer, request, scheduler, sequence, step
from nanovllm.sampling_params import SamplingParams
planner = scheduler.Scheduler(block_manager.BlockManager(4, 16, True), 2, 8)
prompt = request.Request(0, array("i", [1, 2, 3]), SamplingParams())
planner.add(sequence.Sequence(prompt))
print(planner.schedule().counts.tolist())
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
    """Nothing happens at import, no server is needed, and the first steps import nothing large:
    neither torch's compiler nor what it needs, which would take seconds in the second token."""
    script = """
import logging, os, signal, sys, torch
sys.modules.update(dict.fromkeys(["fastapi", "uvicorn", "prometheus_client", "pydantic", "yaml"]))
def state():
    return dict(os.environ), torch.get_num_threads(), signal.getsignal(signal.SIGINT)
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
    ("name", "source"),
    [
        ("nanovllm.worker.worker", "from nanovllm.engine.core import EngineCore"),
        ("nanovllm.worker.worker", "from nanovllm.engine import scheduler"),
        ("nanovllm.engine.scheduler", "def f():\n    import nanovllm.worker.worker"),
        ("nanovllm.layers.linear", "from ..models import llama"),
        ("nanovllm.checkpoint.find", "from nanovllm.config import EngineConfig"),
        ("nanovllm.config", "import nanovllm"),
        ("nanovllm.engine.core", "from .engine_thread import EngineThread"),
        ("nanovllm.unheard_of", "import nanovllm.errors"),
    ],
)
def test_the_import_check_sees_violations(name: str, source: str) -> None:
    assert upward_edges(name, ast.parse(source))


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
        ("llm.py", "from os import environ"),
        ("llm.py", "import os\nos.getenv('X')"),
    ],
)
def test_the_name_check_sees_violations(file: str, source: str) -> None:
    assert misplaced_names(file, ast.parse(source))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts)


def part_of(module: str) -> str:
    """Name the line of the table that a module belongs to: its longest match."""
    names = module.split(".")[1:] or ["__init__"]
    if names[-1] == "__init__" and len(names) > 1:
        names.pop()
    for length in range(len(names), 0, -1):
        if ".".join(names[:length]) in MAY_IMPORT:
            return ".".join(names[:length])
    return f"{module}, which has no line in MAY_IMPORT"


def upward_edges(name: str, tree: ast.Module) -> list[str]:
    part = part_of(name)
    allowed = MAY_IMPORT.get(part)
    if allowed is None:
        return [f"unknown part {part}"]
    ours = [module for module in imported_modules(tree, name) if module.split(".")[0] == PACKAGE]
    return [
        f"{name} imports {module}"
        for module in ours
        if part_of(module) != part and part_of(module) not in allowed
    ]


def imported_modules(tree: ast.Module, name: str) -> Iterator[str]:
    """Every module imported, also inside functions; not those that only type checkers see."""
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if is_module(full) else base


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


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
    """Statements inside functions that change something a module or a class holds."""
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
    """Names that a module or function binds itself, not counting nested functions and classes."""
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
    """Names whose attribute, item or content a statement or call changes."""
    is_place = isinstance(node, ast.Attribute | ast.Subscript)
    if is_place and isinstance(node.ctx, ast.Store | ast.Del):
        yield root_name(node)
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if is_method and MUTATORS.fullmatch(node.func.attr) and not is_module_alias(node.func.value):
        yield root_name(node.func.value)


def is_module_alias(name: ast.expr) -> bool:
    """`np.add(...)` calls a function of a module; `names.add(...)` changes a set."""
    return isinstance(name, ast.Name) and name.id in ("np", "torch", "F")


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
