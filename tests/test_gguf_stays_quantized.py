"""GGUF weights that stay quantized give the same results as dequantized ones, in less memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("gguf")
from numba.core import event

from nanovllm import LLM
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.kernels import interpreter
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import read_config
from nanovllm.ops.tp_group import ALONE
from nanovllm.worker import check_model, load_model
from nanovllm.worker.memory_needs import estimate_memory
from nanovllm.worker.quantized_layouts import choose_layouts
from tests.checkpoint import tiny_gguf
from tests.checkpoint.tiny_gguf import hf_tensors, write_gguf
from tests.checkpoints import make_checkpoint
from tests.devices import cpu_device
from tests.quantized_twins import (
    EXPERTS,
    GREEDY,
    MODELS,
    PROMPTS,
    SIZE_OPTIONS,
    Kept,
    assert_close,
    note_kept,
    run,
)
from tests.threaded_ranks import engines_of
from tests.worker.test_loader import write_gguf as write_checkpoint_gguf

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run_dequantized(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    def dequantized(path: Path, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            for module in (load_model, check_model):
                patch.setattr(module, "choose_layouts", lambda *_: None)
            return run(path, **options)

    return dequantized


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return note_kept(monkeypatch)


def num_bytes(kept: Kept) -> int:
    return sum(size for _, size in kept)


def write(folder: Path, arch: str, tied: bool, quant: str, **others: str) -> Path:
    tensors = hf_tensors(arch, tied=tied)
    for array in tensors.values():
        if array.ndim > 1:
            array *= 0.3  # so that attention is not one-hot
    return write_gguf(folder / "m.gguf", arch, tensors, quant, other_quants=others)


def test_what_is_stored_is_kept(tmp_path: Path, run_dequantized: Any, kept: Kept) -> None:
    """The rows of heads are reordered, and a tied head is used as stored."""
    path = write(tmp_path, "llama", True, "Q4_1")
    assert_close(run(path), run_dequantized(path))
    assert len(kept) == 1 + 7 * 2  # none in the dequantizing engine
    num_weights = 48 * 64 + 2 * (64 * (2 * 128 + 2 * 64) + 3 * 64 * 96)
    assert num_bytes(kept) == num_weights // 32 * 20  # 20 bytes per quant block


@pytest.mark.slow
def test_types_may_be_mixed(tmp_path: Path, run_dequantized: Any, kept: Kept) -> None:
    """Here q and k have another type than v."""
    path = write(tmp_path, "llama", True, "Q4_1", v_proj="Q8_0", down_proj="Q8_0")
    assert_close(run(path), run_dequantized(path))
    assert len(kept) == 1 + 7 * 2
    # 32 weights take 20 bytes in Q4_1 and 34 in Q8_0.
    q4, q8 = 48 * 64 + 2 * (64 * (128 + 64 + 2 * 96) + 64 * 128), 2 * (64 * 64 + 64 * 96)
    assert num_bytes(kept) == q4 // 32 * 20 + q8 // 32 * 34


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "tied", "quant"),
    [
        ("llama", False, "Q4_0"),
        ("qwen2", True, "Q8_0"),
        ("qwen3", False, "Q5_1"),
        ("qwen3moe", True, "Q8_0"),
        ("gemma3", True, "Q5_0"),
        ("phi3", False, "Q4_1"),
        ("smollm3", True, "Q8_0"),
        ("olmo2", False, "Q5_0"),
        ("granite", True, "Q4_0"),
        ("glm4", False, "Q8_0"),
        ("gemma2", True, "Q8_0"),
        ("mistral3", False, "Q4_1"),
    ],
)
def test_every_family_answers_alike(
    tmp_path: Path, run_dequantized: Any, kept: Kept, arch: str, tied: bool, quant: str
) -> None:
    """Checked on one rank and on two."""
    path = write(tmp_path, arch, tied, quant)
    want = run_dequantized(path)
    assert_close(run(path), want)
    assert len(kept) == sum(array.ndim > 1 for array in hf_tensors(arch, tied=tied).values())
    with engines_of(2):
        assert_close(run(path), want)


@pytest.mark.parametrize("model", ["qwen3.5", "qwen3.5-moe"])
def test_delta_nets(tmp_path: Path, run_dequantized: Any, kept: Kept, model: str) -> None:
    """The rows of gates are moved, and value heads stay in the order of the file."""
    checkpoint = make_checkpoint(tmp_path / model, MODELS[model])
    path = write_checkpoint_gguf(tmp_path / "m.gguf", checkpoint, "Q8_0")
    assert_close(run(path), run_dequantized(path))
    num_mlp = 3 if model == "qwen3.5" else 3 * EXPERTS["num_experts"] + 1 + 3
    assert len(kept) == 2 + 5 + 4 + 2 * num_mlp  # without the shared experts' gates


@pytest.mark.slow
def test_ranks_share_experts(
    tmp_path: Path, run_dequantized: Any, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are two quant blocks wide, one for each rank."""
    monkeypatch.setattr(tiny_gguf, "EXPERT_INTERMEDIATE", 64)
    path = write(tmp_path, "qwen3moe", False, "Q8_0")
    want = run_dequantized(path)
    with engines_of(2):
        assert_close(run(path), want)
    assert len(kept) == 2 * (2 + 2 * (5 + 3 * 3))  # the router is quantized too


@pytest.mark.slow
def test_ranks_cut_no_block(
    tmp_path: Path, run_dequantized: Any, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of 96 inputs is 1.5 quant blocks, so a projection of that width is dequantized."""
    path = write(tmp_path, "llama", False, "Q8_0")
    want = run_dequantized(path)
    with engines_of(2), caplog.at_level(logging.INFO, "nanovllm"):
        assert_close(run(path), want)
    assert len(kept) == 2 * (2 + 6 * 2)  # all but two down projections
    assert "2 of 16 quantized weights, such as model.layers.0.mlp.down_proj.weight," in caplog.text


def test_without_a_kernel_all_is_dequantized(
    tmp_path: Path, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "llama", True, "Q4_1")
    with caplog.at_level(logging.INFO, "nanovllm"):
        run(path, dtype="float16")
    assert not kept
    assert caplog.text.count("are dequantized to float16: this device has no kernel for them") == 1


def test_a_half_quantized_projection_is_dequantized(
    tmp_path: Path, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "llama", True, "F32", k_proj="Q4_1")
    with caplog.at_level(logging.INFO, "nanovllm"):
        run(path)
    assert not kept
    assert caplog.text.count("2 of 2 quantized weights are dequantized") == 1


def test_needs_count_quant_blocks(tmp_path: Path, kept: Kept) -> None:
    """A model that would not fit dequantized is accepted."""
    path = write(tmp_path, "llama", False, "Q4_1")
    checkpoint, config = find_checkpoint(str(path)), EngineConfig(str(path), max_model_len=64)
    model, device = read_config(checkpoint.config), cpu_device()
    layouts = choose_layouts(config, checkpoint.config, device, torch.float32)
    build = BuildContext(device.torch_device, torch.float32, None, None, ALONE, layouts)  # type: ignore[arg-type]
    run(path)
    norms = (2 * 2 + 1) * 64 * 4
    assert estimate_memory(config, model, build).weights == num_bytes(kept) + norms


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_nothing_is_compiled_once_an_engine_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    """This includes the kernels of an FP8 cache and of a type that only embeddings have."""
    quants = {"embed_tokens": "Q8_0"}
    path = write_gguf(tmp_path / "model.gguf", quant="Q4_0", other_quants=quants)
    options = {"kv_cache_dtype": "fp8", "enforce_eager": enforce_eager}
    compiled: list[str] = []

    def note(compiler: Any, function: Any, *args: Any) -> Any:
        compiled.append(function.__name__)
        return compile_function(compiler, function, *args)

    compile_function = interpreter.Compiler.compile
    monkeypatch.setattr(interpreter.Compiler, "compile", note)
    with LLM(path, skip_tokenizer_init=True, dtype="float32", **SIZE_OPTIONS, **options) as llm:
        assert {"linear", "dequantize"} <= set(compiled)
        compiled.clear()
        with event.install_listener("numba:compile", CompilerFailure()):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert compiled == []


class CompilerFailure(event.Listener):
    """Fails the test if numba compiles anything."""

    def on_start(self, event: Any) -> None:
        raise AssertionError(f"compiled {event.data}")

    def on_end(self, event: Any) -> None: ...
