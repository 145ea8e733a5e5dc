"""Transformers' model code on CUDA: its steps are captured in graphs like those of our families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.devices import NEEDS_GPU, runner_of
from tests.models.test_transformers_model import GREEDY, MAX_TOKENS, make_prompts, make_tiny
from tests.test_gpu import OPTIONS

pytestmark = NEEDS_GPU
FAMILIES = ("cohere2", "gemma4_text", "gpt2", "gpt_neox", "gpt_oss", "olmoe", "opt", "vaultgemma")
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "captured-ahead": {"target_inter_token_ms": 25.0},
    "preempted-chunked": {"num_kvcache_blocks": 6, "max_num_batched_tokens": 9, "max_num_seqs": 4},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_equals_generate(tmp_path: Path, model_type: str) -> None:
    checkpoint, prompts = make_tiny(tmp_path, model_type), make_prompts()
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]
    for mode, options in MODES.items():
        with LLM(str(tmp_path), **{**OPTIONS, **options}) as llm:
            for _ in range(2):  # the second time, everything is cached
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                assert [output.token_ids for output in outputs] == want, mode
            if mode != "eager":
                decode = runner_of(llm).forward.decode
                assert decode.graphs
                assert decode.persistent is None


@pytest.mark.parametrize("model_type", ["gemma4_text", "gpt_oss", "olmoe"])
def test_graphs_equal_eager_steps_in_half_precision(tmp_path: Path, model_type: str) -> None:
    """In half precision, experts run as one grouped GEMM, which a graph can capture."""
    make_tiny(tmp_path, model_type)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    found = []
    for is_eager in (False, True):
        options = {**OPTIONS, "dtype": "bfloat16", "enforce_eager": is_eager}
        with LLM(str(tmp_path), **options) as llm:
            outputs = llm.generate(make_prompts(), params, use_tqdm=False)
        found.append([output.outputs[0].logprobs[0] for output in outputs])
    for graphed, eager in zip(*found, strict=True):
        assert graphed.keys() == eager.keys()
        for token, each in graphed.items():
            assert each.logprob == pytest.approx(eager[token].logprob, abs=0.1)
