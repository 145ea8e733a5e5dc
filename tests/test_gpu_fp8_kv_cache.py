"""Engines with an FP8 KV cache on a GPU give the completions of a reference that also quantizes."""

from __future__ import annotations

from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError
from tests.devices import NEEDS_GPU, runner_of
from tests.test_fp8_kv_cache import MODES, OPTIONS, Answer, check
from tests.test_fp8_kv_cache import answers as answers

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("mode", ["plain", "chunked", "preempted", "eager", "reference"])
def test_answers_on_a_gpu(tiny: Any, answers: list[Answer], mode: str) -> None:
    """The CUDA kernels and graphs give the same tokens."""
    with LLM(tiny("qwen3").path, **{**OPTIONS, **MODES[mode]}, device="cuda") as llm:
        check(llm, answers)


def test_rows_that_share_their_first_keys_on_a_gpu(tiny: Any) -> None:
    """Many completions share a long prefix, whose keys are read once; the tokens do not change."""
    prompt, params = list(range(90)), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {**OPTIONS, "max_num_seqs": 90, "max_model_len": 512, "device": "cuda"}
    prompts = [prompt * 5 + [i] for i in range(90)]
    with LLM(tiny("qwen3").path, **options, max_num_batched_tokens=2048) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        assert "shared" in {way for way, _ in runner_of(llm).forward.decode.graphs}
        alone = [llm.generate([each], params, use_tqdm=False)[0] for each in prompts[:5]]
    for one, many in zip(alone, together, strict=False):
        assert one.token_ids == many.token_ids


def test_heads_that_tensor_cores_do_not_take_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="head_dim > 16 on GPUs, got 16"):
        LLM(tiny("qwen3-tied").path, **OPTIONS, device="cuda")
