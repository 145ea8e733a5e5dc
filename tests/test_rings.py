"""Rings: every import names a file in the same folder or in a lower ring."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.checkpoints import TinyCheckpoint, make_checkpoint
from tests.models.transformers_families import make_config

PACKAGE = Path(__file__).parent.parent / "nanovllm"
RINGS = [
    "errors validation structured_outputs logits_options sampling_params outputs config",
    *("engine", "ops", "checkpoint", "attention", "layers", "models", "worker"),  # the core
    *("devices", "features", "parallel", "assembly", "llm"),
    *("serve", "async_llm", "batch", "cli", "ray"),
]
OUTER = ("devices", "features", "parallel", "serve", "batch", "cli", "ray")
OPEN = {f"nanovllm.devices.{name}" for name in ("choose", "cuda.energy", "ranks", "replica_share")}
LEVELS = {name: level for level, names in enumerate(RINGS) for name in names.split()}


def imported_modules(path: Path) -> Iterator[str]:
    """Yield all modules that a file imports, including those inside functions and for types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield (
                f"{node.module}.{node.names[0].name}"
                if node.module == "nanovllm"
                else node.module or ""
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def sources() -> Iterator[tuple[Path, str]]:
    """Yield each file and its ring; the top `__init__` and `__main__` are unrestricted."""
    for path in sorted(PACKAGE.rglob("*.py")):
        ring = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if not ring.startswith("__"):
            yield path, ring


def test_imports_point_downwards() -> None:
    for path, ring in sources():
        for module in imported_modules(path):
            target = module.split(".")[1] if module.startswith("nanovllm.") else "errors"
            target = target if target in LEVELS else "errors"  # nanovllm.__version__
            assert LEVELS[target] <= LEVELS[ring], f"{path} imports {module}"


@pytest.mark.parametrize("folder", ["engine", "worker", "features", "checkpoint", "layers"])
def test_files_form_no_circles(folder: str) -> None:
    """No file needs itself through the files that it imports; annotations may name any type."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in (PACKAGE / folder).rglob("*.py")
    }
    assert len(files) > 1
    graph = {name: needed_modules(path) & files.keys() for name, path in files.items()}
    TopologicalSorter(graph).prepare()  # raises an error that names the files of a circle


def needed_modules(path: Path) -> set[str]:
    """Return all modules that a file imports, also inside functions, but not only for types."""
    tree, modules = ast.parse(path.read_text()), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # what is imported may itself be a module
            modules |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def test_only_devices_name_their_kernels() -> None:
    for path, ring in sources():
        inner = {each for each in imported_modules(path) if each.startswith("nanovllm.devices.")}
        assert ring == "devices" or inner <= OPEN, path


def test_the_core_runs_alone(tiny: Callable[[str], TinyCheckpoint], tmp_path: Path) -> None:
    """Without the outer folders, an engine generates the same tokens on plain torch."""
    model, params = str(tiny("qwen3").path), SamplingParams(temperature=0, max_tokens=8)
    prompts = [[5, 6, 7], list(range(3, 40))]
    with LLM(model, device="cpu", dtype="float32", skip_tokenizer_init=True) as llm:
        want = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    ignored = shutil.ignore_patterns("__pycache__", *OUTER)
    shutil.copytree(PACKAGE, tmp_path / "nanovllm", ignore=ignored)
    # An editable install would find the folders that are missing in this copy.
    script = f"""
import sys
sys.meta_path = [each for each in sys.meta_path if "Editable" not in repr(each)]
from nanovllm import LLM, SamplingParams
with LLM({model!r}, dtype="float32", skip_tokenizer_init=True) as llm:
    print(type(llm.engine.core.executor.device).__name__)
    outputs = llm.generate({prompts}, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    print([output.token_ids for output in outputs])
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"TorchDevice\n{want}\n"


# Folder -> the checkpoint, the options of the engine and those of the request that ask for it, and
# the error without it.
ASKING: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "features.speculation": (
        "qwen3",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {},
        "speculative_config needs nanovllm/features/speculation, which is missing",
    ),
    "features.grammar": (
        "qwen3",
        {},
        {"structured_outputs": {"regex": "a+"}},
        "structured_outputs: structured output needs nanovllm/features/grammar, which is missing",
    ),
    "features.states": (
        "qwen3.5",
        {},
        {},
        "Qwen3_5ForCausalLM needs nanovllm/features/states, which is missing",
    ),
    "features.latency": (
        "qwen3",
        {"target_inter_token_ms": 25.0},
        {},
        "target_inter_token_ms needs nanovllm/features/latency, which is missing",
    ),
    "models.fallback": (
        "stablelm",  # only transformers has model code for it
        {},
        {},
        "transformers' model code cannot run: nanovllm/models/fallback is missing",
    ),
}


def test_each_feature_has_a_folder() -> None:
    folders = {path.parent.name for path in (PACKAGE / "features").glob("*/__init__.py")}
    assert {f"features.{folder}" for folder in folders} == ASKING.keys() - {"models.fallback"}


@pytest.mark.parametrize("folder", ASKING)
def test_a_capability_can_be_deleted(
    tiny: Callable[[str], TinyCheckpoint], tmp_path: Path, folder: str
) -> None:
    """Without its folder, plain requests give the same tokens, and what needs it is refused."""
    checkpoint, prompts = tiny("qwen3"), [[5, 6, 7], list(range(3, 40))]
    name, options, asked, error = ASKING[folder]
    needy = make_checkpoint(tmp_path, make_config(name)) if name == "stablelm" else tiny(name)
    common = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    script = f"""
import sys
sys.modules["nanovllm.{folder}"] = None
from nanovllm import LLM, SamplingParams
def generate(model, options, asked):
    params = SamplingParams(temperature=0, max_tokens=4, **asked)
    with LLM(model, **{common}, **options) as llm:
        return [each.token_ids for each in llm.generate({prompts}, params, use_tqdm=False)]
print(generate({str(checkpoint.path)!r}, {{}}, {{}}))
try:
    generate({str(needy.path)!r}, {options}, {asked})
except Exception as error:
    print(error)
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    tokens, refusal = result.stdout.splitlines()
    checkpoint.assert_greedy(prompts, json.loads(tokens))
    assert error in refusal


def test_servers_run_without_the_latency_target(tiny: Callable[[str], TinyCheckpoint]) -> None:
    """They set it by default, so without its folder they do without it."""
    script = f"""
import sys
sys.modules["nanovllm.features.latency"] = None
from nanovllm import AsyncLLM
from nanovllm.cli import parse
llm = AsyncLLM({str(tiny("qwen3").path)!r}, in_process=True, skip_tokenizer_init=True)
llm.close()
print(llm.config.target_inter_token_ms, parse(["serve"]).target_inter_token_ms)
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "None None\n", result.stderr


def test_only_the_assembly_and_servers_import_features() -> None:
    """The core and `parallel/` do not, not even for annotations."""
    for path, ring in sources():
        if ring not in ("features", "assembly", "serve"):
            assert not any("nanovllm.features" in name for name in imported_modules(path)), path


def test_only_the_registry_imports_the_fallback() -> None:
    importing = [path for path, _ in sources() if "nanovllm.models.fallback" in imports_of(path)]
    outside = [path for path in importing if path.parent.name != "fallback"]
    assert outside == [PACKAGE / "models" / "registry.py"]


def imports_of(path: Path) -> str:
    """Return the names of all modules that a file imports, and of what it imports from them."""
    found = re.findall(r"from (nanovllm\S*) import (\w+)", path.read_text())
    return " ".join([*imported_modules(path), *(".".join(names) for names in found)])
