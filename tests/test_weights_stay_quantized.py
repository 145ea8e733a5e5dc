"""Weights that stay quantized give the same results as dequantized ones, on any number of ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import read_config
from nanovllm.ops.interface import NormWeights, ResidualStream
from nanovllm.ops.quantized_weight import QuantizedWeight
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.ops.tp_group import ALONE
from nanovllm.worker.memory_needs import estimate_memory
from nanovllm.worker.quantized_layouts import choose_layouts
from tests.checkpoint.tiny_quantized import fp8_block_kind, write_twins
from tests.checkpoints import make_checkpoint
from tests.devices import NEEDS_GPU, cpu_device
from tests.ops.quantized_products import quantized_product
from tests.quantized_twins import (
    EVEN,
    EXPERTS,
    KEPT,
    SIZE_OPTIONS,
    Kept,
    assert_close,
    note_kept,
    run,
    source,
    twins,
)
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Keep weights quantized on a CPU, in plain torch; return those loaded so."""
    monkeypatch.setattr(CpuDevice, "reads_quantized", lambda *_: True)
    return note_kept(monkeypatch)


@pytest.mark.parametrize("kind", KEPT)
def test_a_checkpoint_equals_its_twin(checkpoint_root: Path, kept: Kept, kind: str) -> None:
    both = twins(checkpoint_root, "qwen3-tied", kind)
    assert_close(run(both.quantized), run(both.plain))
    assert len(kept) == 2 * 7, "every projection of two layers, and no embedding"


@pytest.mark.parametrize("kind", ["packed-zeros", "fp8-channel"])
def test_heads_and_merged_projections(checkpoint_root: Path, kept: Kept, kind: str) -> None:
    both = twins(checkpoint_root, "phi3", kind)
    assert_close(run(both.quantized), run(both.plain))
    assert len(kept) == 2 * 4 + 1


@pytest.mark.parametrize("kind", ["packed-zeros", "fp8-channel"])
def test_reordered_rows(checkpoint_root: Path, kept: Kept, kind: str) -> None:
    """GLM-4's q and k are reordered for the rotation."""
    both = twins(checkpoint_root, "glm4", kind)
    assert_close(run(both.quantized), run(both.plain))
    assert sum("q_proj" in name for name, _ in kept) == 2


@pytest.mark.parametrize("model", ["qwen3.5", "qwen3.5-moe", "qwen3-next"])
def test_delta_nets_as_published(checkpoint_root: Path, kept: Kept, model: str) -> None:
    """The small projections are not quantized; those beside them stay quantized."""
    small = [r"re:.*\.in_proj_(a|b|ba)$", r"re:.*shared_expert_gate$", "lm_head"]
    kind, plain = KEPT["fp8-channel"], source(checkpoint_root, model)
    both = write_twins(checkpoint_root / f"kept-{model}-fp8", plain, kind, {"ignore": small})
    assert_close(run(both.quantized), run(both.plain))
    names = {name.split(".", 3)[3] for name, _ in kept if "experts" not in name}
    projections = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    delta_net = ("qkvz",) if model == "qwen3-next" else ("qkv", "z")
    projections |= {f"linear_attn.in_proj_{name}.weight" for name in delta_net}
    mlp = "mlp" if model == "qwen3.5" else "mlp.shared_expert"
    projections |= {f"{mlp}.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert names == {*projections, "linear_attn.out_proj.weight"}


@pytest.mark.parametrize("kind", ["packed-zeros", "packed-channel", "awq", "gptq", "fp8-channel"])
def test_ranks_take_their_share(checkpoint_root: Path, kept: Kept, kind: str) -> None:
    config = LlamaConfig(**{**EVEN, "intermediate_size": 128})  # each rank gets whole groups
    plain = make_checkpoint(checkpoint_root / "kept-even", config).path
    both = write_twins(checkpoint_root / f"kept-even-{kind}", plain, KEPT[kind], {})
    with engines_of(2):
        assert_close(run(both.quantized), run(both.plain))
    assert kept


@pytest.mark.parametrize("kind", ["packed-zeros", "awq", "gptq"])
def test_a_shard_that_cuts_groups_is_dequantized(
    checkpoint_root: Path, kept: Kept, kind: str
) -> None:
    both = twins(checkpoint_root, "llama", kind)  # down_proj has 96 inputs, in groups of 32
    with engines_of(2):
        assert_close(run(both.quantized), run(both.plain))
    assert kept
    assert not any("down_proj" in name for name, _ in kept)


@pytest.mark.parametrize(
    ("model", "kind"),
    [*(("qwen3-moe", kind) for kind in KEPT), ("mixtral", "awq"), ("mixtral", "fp8-channel")],
)
def test_experts(checkpoint_root: Path, kept: Kept, model: str, kind: str) -> None:
    both = twins(checkpoint_root, model, kind)
    assert_close(run(both.quantized), run(both.plain))
    assert sum("experts" in name for name, _ in kept) == 2 * 3 * 3, "all three of every expert"


@pytest.mark.parametrize("kind", ["packed-zeros", "packed-channel", "awq", "gptq", "fp8-channel"])
def test_ranks_take_their_share_of_experts(checkpoint_root: Path, kept: Kept, kind: str) -> None:
    experts = {**EXPERTS, "moe_intermediate_size": 64}  # each rank gets whole groups
    config = Qwen3MoeConfig(**EVEN, **experts, head_dim=16)
    plain = make_checkpoint(checkpoint_root / "kept-experts", config).path
    both = write_twins(checkpoint_root / f"kept-experts-{kind}", plain, KEPT[kind], {})
    with engines_of(2):
        assert_close(run(both.quantized), run(both.plain))
    assert any("experts" in name for name, _ in kept)


def test_experts_that_no_kernel_reads_are_dequantized(
    checkpoint_root: Path, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    """If one projection of one expert is not quantized, the layer's experts are dequantized."""
    plain = source(checkpoint_root, "qwen3-moe")
    ignored = {"modules_to_not_convert": ["model.layers.0.mlp.experts.1.up_proj"]}
    both = write_twins(checkpoint_root / "kept-some-experts", plain, KEPT["awq"], ignored)
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert_close(run(both.quantized), run(both.plain))
    kept_experts = [name for name, _ in kept if "experts" in name]
    assert kept_experts
    assert not any("layers.0" in name for name in kept_experts)
    [line] = [r.getMessage() for r in caplog.records if "dequantized" in r.getMessage()]
    assert "such as model.layers.0.mlp.experts" in line


@pytest.mark.parametrize("kind", ["awq-16", "fp8-block-16", "gptq-shuffled", "gptq-8-bits"])
def test_unsupported_formats_are_dequantized(
    checkpoint_root: Path, kept: Kept, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    both = twins(checkpoint_root, "qwen3-tied", kind)
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert_close(run(both.quantized), run(both.plain))
    assert not kept
    assert "dequantized" in caplog.text


def test_weights_quantized_while_loading_stay_quantized(checkpoint_root: Path, kept: Kept) -> None:
    path = source(checkpoint_root, "llama")
    got = run(path, quantization="fp8")
    assert len(kept) == 2 * 7 - 1
    last = "model.layers.1.mlp.down_proj.weight"
    assert last not in dict(kept), "the last projection is not quantized"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "reads_quantized", lambda *_: False)
        assert_close(got, run(path, quantization="fp8"))


def test_random_weights_are_quantized(checkpoint_root: Path, kept: Kept) -> None:
    for kind in ("awq", "fp8-channel", "packed"):
        assert run(twins(checkpoint_root, "qwen3-tied", kind).quantized, load_format="dummy")
        assert len(kept) == 2 * 7
        kept.clear()
    assert run(source(checkpoint_root, "llama"), load_format="dummy", quantization="fp8")
    assert len(kept) == 2 * 7 - 1


def test_needs_count_quantized_weights(checkpoint_root: Path, kept: Kept) -> None:
    """A model that would not fit dequantized is accepted."""
    path = twins(checkpoint_root, "llama", "packed").quantized
    checkpoint, config = find_checkpoint(str(path)), EngineConfig(str(path), max_model_len=64)
    model, device, dtype = read_config(checkpoint.config), cpu_device(), torch.bfloat16
    needs = []
    for stored in (checkpoint.config, checkpoint):
        chosen = choose_layouts(config, stored, device, dtype)
        build = BuildContext(device.torch_device, dtype, None, None, ALONE, chosen)  # type: ignore[arg-type]
        needs.append(estimate_memory(config, model, build).weights)
    words = 2 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 128)  # inputs are padded to blocks of 128
    assert needs[1] < words * 2 + 2 * 99 * 64 * 2 + 20_000
    assert needs[0] >= needs[1], "the head is not known to be quantized before it is seen"


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param(model, kind, marks=NEEDS_GPU)
        for kind in KEPT
        for model in ("qwen3-tied", "phi3", "gemma3", "glm4", "qwen3-moe")
    ],
)
def test_on_a_gpu(
    checkpoint_root: Path, model: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Quantized weights lose no more precision than bfloat16: one row, a few, and in graphs."""
    both = twins(checkpoint_root, model, kind)
    # With FP8 scales per channel, or one block for all inputs, steps beyond 16 tokens quantize
    # the activations too, which this test avoids.
    few = {"lengths": (2, 16, 9, 16, 15, 16), "most_tokens": 16}
    sizes = few if kind.startswith("fp8") else {}
    exact = score(both.plain, dtype="float32", enforce_eager=True, **sizes)
    plain = score(both.plain, dtype="bfloat16", enforce_eager=True, **sizes)
    for eager in (True, False):
        with caplog.at_level(logging.INFO, "nanovllm"):
            kept = score(both.quantized, dtype="bfloat16", enforce_eager=eager, **sizes)
        assert "dequantized" not in caplog.text
        assert error(kept, exact) < 1.5 * error(plain, exact) + 0.02


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=NEEDS_GPU) for kind in ("fp8-channel", "fp8-tensor")]
)
def test_many_rows_on_a_gpu(
    checkpoint_root: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations of a long prompt are quantized to FP8, exactly as in plain torch.

    Every product is compared with torch's for the same inputs, because a value that is rounded
    differently changes all later ones.
    """
    path = twins(checkpoint_root, "llama", kind).quantized
    cuda_ops = pytest.importorskip("nanovllm.devices.cuda.ops")
    add_to, many_after_norm = cuda_ops.fp8_add_to, cuda_ops.fp8_after_norm
    errors: list[float] = []

    def compare(got: torch.Tensor, want: torch.Tensor) -> None:
        errors.append(distance(got, want))

    def add(residual: torch.Tensor, x: torch.Tensor, weight: Any, bias: Any) -> ResidualStream:
        assert len(x) > cuda_ops.MAX_W8A16_ROWS
        hidden: ResidualStream = add_to(residual, x, weight, bias)
        assert hidden.update is not None
        assert hidden.scales is not None
        compare(hidden.scales.apply(hidden.update), quantized_product(x, weight.stored, bias))
        return hidden

    def after_norm(
        hidden: ResidualStream, norm: NormWeights, weight: Any, bias: Any, activation: Any
    ) -> torch.Tensor:
        copied = hidden._replace(residual=hidden.residual.clone())
        normed, residual = TorchOps().norm(copied, norm)
        got: torch.Tensor = many_after_norm(hidden, norm, weight, bias, activation)
        want = quantized_product(normed, weight.stored, bias)
        compare(got, want if activation is None else TorchOps().act_and_mul(want, activation))
        torch.testing.assert_close(hidden.residual, residual)
        return got

    score_long_prompts(path)  # compiles, without results
    monkeypatch.setattr(cuda_ops, "fp8_add_to", add)
    monkeypatch.setattr(cuda_ops, "fp8_after_norm", after_norm)
    score_long_prompts(path)
    assert_small(errors)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=NEEDS_GPU) for kind in ("fp8-channel", "fp8-tensor")]
)
def test_graphs_of_rounded_rows_on_a_gpu(checkpoint_root: Path, kind: str) -> None:
    """20 rows with quantized activations give the same results with graphs and without."""
    path = twins(checkpoint_root, "llama", kind).quantized
    prompts = [[(7 * i + row) % 90 + 3 for i in range(5 + row)] for row in range(20)]
    forced = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, allowed_token_ids=[5]
    )
    found = []
    for eager in (True, False):
        sizes: dict[str, Any] = {**SIZE_OPTIONS, "max_model_len": 64, "max_num_seqs": 20}
        options = {"dtype": "bfloat16", "device": "cuda", "enforce_eager": eager, **sizes}
        with LLM(path, skip_tokenizer_init=True, **options) as llm:
            outputs = llm.generate(prompts, forced, use_tqdm=False)
        steps = [step for output in outputs for step in output.logprobs or []]
        found.append([logprob.logprob for step in steps for logprob in step.values()])
    assert error(found[1], found[0]) < 0.01


@pytest.mark.parametrize("size", [pytest.param(128, marks=NEEDS_GPU)])
def test_many_rows_of_blocks_on_a_gpu(
    checkpoint_root: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for block scales: the library reads the scales of four input blocks at a time."""
    sizes = {"hidden_size": 512, "intermediate_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    plain = make_checkpoint(checkpoint_root / "blocks", LlamaConfig(**{**EVEN, **sizes, **heads}))
    kind = fp8_block_kind(size, size)
    path = write_twins(checkpoint_root / "kept-blocks", plain.path, kind, {}).quantized
    cuda_ops = pytest.importorskip("nanovllm.devices.cuda.ops")
    add_to, many_rows = cuda_ops.fp8_add_to, cuda_ops.fp8_many_rows
    errors: list[float] = []

    def compare(got: torch.Tensor, x: torch.Tensor, weight: Any, activation: Any) -> None:
        assert len(x) > cuda_ops.MAX_FP8_ROWS
        stored = weight.stored
        scales = stored.scales.repeat_interleave(size, 0)
        repeated = QuantizedWeight(8, stored.qweight, scales, None, x.shape[1])
        want = quantized_product(x, repeated, None)
        want = want if activation is None else TorchOps().act_and_mul(want, activation)
        errors.append(distance(got, want))

    def add(residual: torch.Tensor, x: torch.Tensor, weight: Any, bias: Any) -> ResidualStream:
        hidden: ResidualStream = add_to(residual, x, weight, bias)
        assert hidden.update is not None
        compare(hidden.update, x, weight, None)
        return hidden

    def many(x: torch.Tensor, weight: Any, bias: Any, activation: Any) -> torch.Tensor:
        got: torch.Tensor = many_rows(x, weight, bias, activation)
        compare(got, x, weight, activation)
        return got

    score_long_prompts(path)  # compiles, without results
    monkeypatch.setattr(cuda_ops, "fp8_add_to", add)
    monkeypatch.setattr(cuda_ops, "fp8_many_rows", many)
    score_long_prompts(path)
    assert_small(errors)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def assert_small(errors: list[float]) -> None:
    assert len(errors) >= 4 * 2, "every projection of two layers"
    assert max(errors) < 0.01


def score_long_prompts(path: Path) -> None:
    score(path, dtype="bfloat16", enforce_eager=True, lengths=(90, 120), most_tokens=128)


def score(
    path: Path, lengths: tuple[int, ...] = (2, 17, 60), most_tokens: int = 64, **options: Any
) -> list[float]:
    """Return the logprobs of prompt tokens, and of tokens that are decoded after them."""
    prompts = [[(7 * i) % 90 + 3 for i in range(n)] for n in lengths]
    sizes: dict[str, Any] = {**SIZE_OPTIONS, "max_model_len": 128}
    sizes["max_num_batched_tokens"] = most_tokens
    asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    forced = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, allowed_token_ids=[5]
    )
    with LLM(path, skip_tokenizer_init=True, device="cuda", **sizes, **options) as llm:
        scored = llm.generate(prompts, asked, use_tqdm=False)
        alone = [llm.generate([prompt], forced, use_tqdm=False)[0] for prompt in prompts]
    steps = [step for output in scored for step in output.prompt_logprobs or [] if step]
    steps += [step for output in alone for step in output.logprobs or []]
    return [logprob.logprob for step in steps for logprob in step.values()]


def error(values: list[float], exact: list[float]) -> float:
    assert len(values) == len(exact) > 80
    return sum(abs(a - b) for a, b in zip(values, exact, strict=True)) / len(exact)
