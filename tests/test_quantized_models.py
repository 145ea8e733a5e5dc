"""A quantized checkpoint gives the same tokens as its dequantized twin: all families and ranks."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.ops.fp8 import quantize_rows
from tests.checkpoint.tiny_quantized import (
    PROJECTION,
    Kind,
    Twins,
    awq_kind,
    fp8_block_kind,
    packed_kind,
    write_twins,
)
from tests.devices import NEEDS_GPU
from tests.quantized_twins import DEQUANTIZED, KINDS, MODELS, run, source
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")

# Every family and every dequantized format at least once.
PAIRS = [
    ("llama", "gptq-shuffled"),
    ("glm4", "packed-16"),
    ("qwen2", "awq-16"),
    ("phi3", "packed-16"),
    ("qwen3-moe", "fp8-block-16"),
    ("qwen3-tied", "fp8-channel"),
    ("mixtral", "fp8-tensor"),
    ("gemma3", "packed-shuffled"),
    ("mistral", "gptq-16"),
    ("qwen3-tied", "gptq-8-bits"),
    ("mixtral", "awq-16"),
    ("qwen3.5", "packed-16"),
    ("qwen3.5-moe", "fp8-block-16"),
    ("qwen3-next", "gptq-16"),
]
FORMATS = sorted({kind for _, kind in PAIRS})
# How each method's config lists unquantized modules; the patterns also decide what is written.
IGNORED = {
    "compressed-tensors": {"ignore": [r"re:model\.layers\.1\..*down_proj$", "lm_head"]},
    "fp8": {"modules_to_not_convert": ["model.layers.1.self_attn.o_proj", "lm_head"]},
    "awq": {"modules_to_not_convert": ["model.layers.0"]},
    "gptq": {},
}


@cache
def partly(root: Path, model: str, kind: str) -> Twins:
    """Twins of which some projections are not quantized."""
    ignored = IGNORED[KINDS[kind].config["quant_method"]]
    return write_twins(root / f"partly-{model}-{kind}", source(root, model), KINDS[kind], ignored)


@pytest.mark.parametrize(("model", "kind"), PAIRS)
def test_a_checkpoint_equals_its_twin_on_one_rank_and_two(
    checkpoint_root: Path, model: str, kind: str
) -> None:
    both = partly(checkpoint_root, model, kind)
    assert run(both.quantized) == run(both.plain)
    with engines_of(2):
        assert run(both.quantized) == run(both.plain)


def test_every_family_and_format_has_a_pair() -> None:
    assert {model for model, _ in PAIRS} == MODELS.keys()
    assert {kind for _, kind in PAIRS} >= DEQUANTIZED.keys()


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=NEEDS_GPU) for kind in FORMATS])
def test_on_a_gpu(checkpoint_root: Path, kind: str) -> None:
    for model in ("qwen3-tied", "qwen3-moe"):
        both = partly(checkpoint_root, model, kind)
        for dtype in ("float32", "bfloat16"):
            options = {"device": "cuda", "dtype": dtype}
            if dtype == "bfloat16" and kind in ("fp8-channel", "fp8-tensor"):
                continue  # these stay quantized: test_weights_stay_quantized.py
            assert run(both.quantized, **options) == run(both.plain, **options)


@pytest.fixture
def llama(checkpoint_root: Path) -> Path:
    return source(checkpoint_root, "llama")


@pytest.mark.parametrize(
    "kind", [awq_kind(32), fp8_block_kind(64, 64), packed_kind(4, 64, True, False)]
)
def test_ranks_may_cut_groups(llama: Path, tmp_path: Path, kind: Kind) -> None:
    both = write_twins(tmp_path, llama, kind, {})
    with engines_of(2):
        assert run(both.quantized) == run(both.plain)


def test_the_log_says_what_is_dequantized(
    checkpoint_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nanovllm"):
        run(partly(checkpoint_root, "qwen2", "awq-16").quantized)
    [line] = [r.getMessage() for r in caplog.records if "dequantized" in r.getMessage()]
    assert "quantized weights are dequantized to float32" in line


def rounded(path: Path, folder: Path) -> Path:
    """Write the dequantized twin of a checkpoint that is quantized to FP8 while loading."""
    shutil.copytree(path, folder)
    tensors = load_file(path / "model.safetensors")
    num_layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    kept = "lm_head.weight", f"model.layers.{num_layers - 1}.mlp.down_proj.weight"
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name not in kept and PROJECTION.fullmatch(name):
            quantized = quantize_rows(tensor.float())
            tensors[name] = quantized.values.float() * quantized.scales
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("model", ["phi3", "qwen3-tied", "mixtral"])
def test_rounding_while_loading(checkpoint_root: Path, tmp_path: Path, model: str) -> None:
    path = source(checkpoint_root, model)
    twin = rounded(path, tmp_path / "twin")
    want = run(twin)
    assert want != run(path)
    assert run(path, quantization="fp8") == want
    with engines_of(2):
        assert run(path, quantization="fp8") == run(twin)


def test_the_option_must_match(checkpoint_root: Path, llama: Path, tmp_path: Path) -> None:
    both = partly(checkpoint_root, "qwen2", "awq-16")
    assert run(both.quantized, quantization="awq")
    with pytest.raises(ConfigError, match="'gptq': this checkpoint is quantized by awq"):
        run(both.quantized, quantization="gptq")
    with pytest.raises(ConfigError, match="'awq': this checkpoint has no quantized weights"):
        run(llama, quantization="awq")
    with pytest.raises(ConfigError, match="quantization='fp8' is not for GGUF files"):
        run(Path("smollm2"), quantization="fp8")
    with pytest.raises(ConfigError, match="quantization must be"):
        run(llama, quantization="int3")
    with pytest.raises(ConfigError, match="'awq': this checkpoint has no quantized weights"):
        run(llama, quantization="awq", load_format="dummy")


def test_random_weights_for_a_quantized_config(checkpoint_root: Path, llama: Path) -> None:
    assert run(partly(checkpoint_root, "qwen2", "awq-16").quantized, load_format="dummy")
    assert run(llama, quantization="fp8", load_format="dummy")


def test_a_part_that_is_missing_or_too_much(llama: Path, tmp_path: Path) -> None:
    path = write_twins(tmp_path, llama, KINDS["fp8-block-16"], {}).quantized
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    scale = tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"1.mlp.up_proj is quantized and has no tensor"):
        run(path)
    save_file({**tensors, name: scale, "model.layers.1.mlp.up_proj.input_scale": scale + 1}, file)
    with pytest.raises(CheckpointError, match="input_scale' is not part of the model"):
        run(path)


def test_peak_memory_is_that_of_pieces(checkpoint_root: Path) -> None:
    """No weight is dequantized at once: each is read some rows at a time."""
    from nanovllm.checkpoint import stored_tensors as weights
    from nanovllm.checkpoint.find import find_checkpoint
    from nanovllm.checkpoint.list_tensors import list_weights

    checkpoint = find_checkpoint(str(partly(checkpoint_root, "llama", "gptq-shuffled").quantized))
    tensors = list_weights(checkpoint)
    limit = 16 * 64 * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "PIECE_BYTES", limit)
        for tensor in tensors:
            pieces = list(sizes(tensor.read()))
            assert max(pieces) <= max(limit, 8 * 4 * tensor.shape[-1])


def sizes(pieces: Iterator[torch.Tensor]) -> Iterator[int]:
    return (piece.nbytes for piece in pieces)
