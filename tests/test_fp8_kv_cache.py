"""FP8 KV cache: outputs equal those of transformers with a cache that rounds the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.models.registry import read_config
from nanovllm.ops.fp8 import dequantize, hadamard_exponents, hadamard_transform, quantize
from nanovllm.ops.tp_group import ALONE
from nanovllm.worker.kv_cache import kv_cache_spec
from tests.checkpoints import MIN_GAP
from tests.test_equals_transformers import make_prompts
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "kv_cache_dtype": "fp8",
    "dtype": "float32",
    "kvcache_block_size": 16,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "skip_tokenizer_init": True,
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-by-one": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 7, "depth": 1},
    "preempted": {"num_kvcache_blocks": 7, "max_num_batched_tokens": 9},
    "eager": {"enforce_eager": True, "depth": 1, "kvcache_block_size": 48},
    "reference": {"attention_backend": "sdpa", "max_num_batched_tokens": 20},
    "many-rows": {"max_num_seqs": 20},
}


class RoundedCache(DynamicCache):
    """A transformers cache that rounds keys and values to FP8."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> Any:
        of_q, of_k = hadamard_exponents(keys.shape[-1])
        transformed_keys = dequantize(quantize(hadamard_transform(keys, of_k)), torch.float32)
        keys = hadamard_transform(transformed_keys, of_q)  # its own inverse, except for the scale
        values = dequantize(quantize(values), values.dtype)
        return super().update(keys, values, *args, **options)


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    num_clear: int  # tokens before the first that rounding could change


@torch.inference_mode()
def answer(model: Any, prompt: list[int]) -> Answer:
    """Generate token by token with the rounded cache."""
    cache, token_ids, gaps = RoundedCache(config=model.config), list(prompt), []
    read = prompt
    for _ in range(MAX_TOKENS):
        logits = model(torch.tensor([read]), past_key_values=cache, use_cache=True).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        gaps.append(best - second)
        read = [int(logits.argmax())]
        token_ids += read
    close = [i for i, gap in enumerate(gaps) if gap < MIN_GAP]
    return Answer(token_ids[len(prompt) :], close[0] if close else MAX_TOKENS)


@pytest.fixture(scope="module")
def answers(tiny: Any) -> list[Answer]:
    found = [answer(tiny("qwen3").model, prompt) for prompt in make_prompts()]
    assert sum(each.num_clear for each in found) > 0.9 * MAX_TOKENS * len(found)
    return found


def check(llm: LLM, answers: list[Answer]) -> None:
    outputs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
    for output, want in zip(outputs, answers, strict=True):
        count = want.num_clear
        assert output.token_ids[:count] == want.token_ids[:count]


def test_rounding_shows(tiny: Any, answers: list[Answer]) -> None:
    """Otherwise the other tests would prove nothing."""
    exact = tiny("qwen3").answers(make_prompts(), MAX_TOKENS)
    assert any(want.token_ids != each for want, each in zip(answers, exact, strict=True))


@pytest.mark.parametrize("mode", list(MODES))
def test_answers(tiny: Any, answers: list[Answer], mode: str) -> None:
    """A chunk reads even its own keys rounded, so chunk sizes do not matter."""
    with LLM(tiny("qwen3").path, **{**OPTIONS, **MODES[mode]}) as llm:
        check(llm, answers)
        if mode == "preempted":
            assert llm.engine.core.scheduler.num_preemptions > 0


# Windows, experts, recurrent states, scaled logits, and RoPE that depends on the position.
CUT = ("llama-dynamic", "ministral3", "mixtral", "qwen3.5", "gemma2", "gemma3-six", "olmo3", "glm")


@pytest.mark.slow
@pytest.mark.parametrize("family", CUT)
def test_how_prompts_are_cut_changes_nothing(tiny: Any, family: str) -> None:
    """Compares whole prompts, chunks and cached prefixes."""
    answers = []
    for mode in ("plain", "chunked", "preempted"):
        with LLM(tiny(family).path, **{**OPTIONS, **MODES[mode]}) as llm:
            outputs = llm.generate(make_prompts()[3:9], GREEDY, use_tqdm=False)
        answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1] == answers[2]


def test_plain_torch(tiny: Any) -> None:
    """Plain torch also runs float16, whose outputs differ where two tokens are nearly tied."""
    with LLM(tiny("qwen3").path, **{**OPTIONS, "dtype": "float16"}) as llm:
        outputs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [MAX_TOKENS] * len(outputs)


def test_two_ranks(tiny: Any, answers: list[Answer]) -> None:
    with engines_of(2), LLM(tiny("qwen3").path, **OPTIONS, tensor_parallel_size=2) as llm:
        check(llm, answers)


def test_samples_share_blocks(tiny: Any) -> None:
    """Samples of one prompt equal a single request."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(tiny("qwen3").path, **OPTIONS) as llm:
        (alone,) = llm.generate([list(range(40))], params, use_tqdm=False)
        many = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, n=3)
        (shared,) = llm.generate([list(range(40))], many, use_tqdm=False)
    assert [each.token_ids for each in shared.outputs] == [alone.token_ids] * 3


@pytest.mark.parametrize(
    ("head_dim", "dtype", "least"), [(128, "bfloat16", 1.9), (64, "bfloat16", 1.85)]
)
def test_the_same_memory_holds_more_tokens(
    tiny: Any, head_dim: int, dtype: str, least: float
) -> None:
    model = read_config({**tiny("qwen3").model.config.to_dict(), "head_dim": head_dim})
    sizes = []
    for name in ("auto", "fp8", "fp8_e4m3"):
        config = EngineConfig("m", kv_cache_dtype=name)
        spec = kv_cache_spec(config, model, getattr(torch, dtype), ALONE)
        num_blocks = 3
        caches = spec.views(torch.zeros(num_blocks * spec.block_bytes, dtype=torch.uint8), 3)
        used = sum(part.nbytes for cache in caches for part in cache.parts)
        assert used == num_blocks * spec.block_bytes  # includes the exponents
        sizes.append(spec.block_bytes)
    assert sizes[0] / sizes[1] >= least
    assert sizes[1] == sizes[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype must be one of"),
        (
            {"kv_cache_dtype": "fp8", "attention_backend": "flash_attn"},
            "flash_attn' does not support kv_cache_dtype='fp8'",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig("m", **options)
