"""Several samples of a prompt: each equals a request with its seed, and shares its prefix."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.devices import DEVICES
from tests.test_edited_requests import MODES, OPTIONS
from tests.test_equals_transformers import make_prompts

pytestmark = pytest.mark.usefixtures("one_thread")
PARAMS = SamplingParams(
    temperature=0.9, max_tokens=9, seed=11, ignore_eos=True, n=8, logprobs=2, presence_penalty=0.5
)
NO_CACHE = {"no-cache": {"enable_prefix_caching": False}, "small": {"num_kvcache_blocks": 20}}


def alone(llm: LLM, prompt: list[int], params: SamplingParams) -> list[Any]:
    """Return the outputs of separate requests, each with its own seed."""
    assert params.seed is not None
    ones = [replace(params, n=1, seed=params.seed + i) for i in range(params.n)]
    return llm.generate([prompt] * params.n, ones, use_tqdm=False)


# These are marked slow, because "preempted" covers their options.
SLOW = ("plain", "ahead", "small")


@DEVICES
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.slow if mode in SLOW else ())
        for mode in (*MODES, *NO_CACHE)
    ],
)
def test_samples_equal_requests_with_their_seeds(tiny: Any, device: str, mode: str) -> None:
    """Prompts run side by side with different numbers of samples; some are longer than a block."""
    prompts = [*make_prompts()[:4], [7], [*range(16)], [*range(17)], [*range(70)]]
    params = [replace(PARAMS, n=n) for n in (8, 1, 3, 2, 4, 5, 2, 8)]
    options = {**OPTIONS, "max_num_seqs": 8, **(MODES | NO_CACHE)[mode]}
    with LLM(tiny("qwen3").path, device=device, **options) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, param, output in zip(prompts, params, together, strict=True):
            want = alone(llm, prompt, param)
            assert [each.index for each in output.outputs] == list(range(param.n))
            got = [each.token_ids for each in output.outputs]
            assert got == [each.token_ids for each in want]
            assert output.token_ids == got[0]
            assert output["token_ids"] == got[0]
            for each, other in zip(output.outputs, want, strict=True):
                assert each.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
                assert each.finish_reason == "length"
        scheduler = llm.engine.core.scheduler
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 50])
def test_samples_share_full_blocks(tiny: Any, length: int) -> None:
    """Each further sample computes only the tokens after the last full block that it can reuse."""
    options = {**OPTIONS, "num_kvcache_blocks": 40}
    with LLM(tiny("qwen3").path, device="cpu", **options) as llm:
        params = replace(PARAMS, max_tokens=20)
        num_prefill, most_held = run_one(llm, [*range(length)], params)
    num_shared = (length - 1) // 16
    assert num_prefill == length + (params.n - 1) * (length - 16 * num_shared)
    assert most_held <= num_shared + params.n * (-(-(length + 20) // 16) - num_shared)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_long_prompt_runs_once(tiny: Any, tmp_path: Path, name: str, is_cached: bool) -> None:
    """Samples of a hybrid model wait for the first one's snapshot; nothing is shared uncached."""
    config, rng = json.loads((tiny(name).path / "config.json").read_text()), random.Random(0)
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    options = {**OPTIONS, "max_num_batched_tokens": 512, "num_kvcache_blocks": 800}
    options |= {"max_model_len": 1600, "enable_prefix_caching": is_cached, "load_format": "dummy"}
    prompt, params = rng.choices(range(64), k=1500), replace(PARAMS, max_tokens=2)
    with LLM(tmp_path, device="cpu", **options) as llm:
        num_prefill, _ = run_one(llm, prompt, params)
    assert num_prefill <= 1700 if is_cached else num_prefill == params.n * len(prompt)


def run_one(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[int, int]:
    """Return how many prompt tokens ran, and the largest number of blocks that were held."""
    llm.add_request(prompt, params)
    num_prefill, most_held = 0, 0
    blocks = llm.engine.core.scheduler.blocks
    while not llm.is_finished():
        num_prefill += llm.step().num_prefill_tokens
        most_held = max(most_held, blocks.num_blocks - blocks.num_free)
    return num_prefill, most_held


def test_streams_and_aborts_of_samples(tiny: Any) -> None:
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        [want] = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        tokens: list[list[int]] = [[] for _ in range(PARAMS.n)]
        outputs = []
        for piece in llm.stream([[1, 2, 3]], PARAMS):
            tokens[piece.sample] += piece.token_ids
            outputs += [piece.output] if piece.output is not None else []
        assert tokens == [each.token_ids for each in want.outputs]
        assert [output.outputs for output in outputs] == [want.outputs]
        seq_id = llm.add_request([4, 5, 6], replace(PARAMS, max_tokens=90))
        for _ in range(5):
            llm.step()
        aborted = llm.abort(seq_id)
        assert aborted is not None
        assert {each.finish_reason for each in aborted.outputs} == {"abort"}
        assert len(aborted.outputs) == PARAMS.n
        assert llm.abort(seq_id) is None
        llm.add_request([4, 5, 6], PARAMS)  # before any of it runs
        assert len(llm.abort_all()) == 1
        assert llm.is_finished()
        llm.engine.core.scheduler.check()
        assert not llm.engine.client.owners


def test_a_sample_may_stop_before_the_others(tiny: Any) -> None:
    """A stop token ends the first sample at once; others continue until they generate it."""
    params = replace(PARAMS, max_tokens=12, logprobs=None)
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        [free] = llm.generate([[9, 8, 7]], params, use_tqdm=False)
        stop = free.outputs[0].token_ids[0]
        stopped = replace(params, stop_token_ids=[stop])
        [output] = llm.generate([[9, 8, 7]], stopped, use_tqdm=False)
    for each, other in zip(output.outputs, free.outputs, strict=True):
        has_it = stop in other.token_ids
        end = other.token_ids.index(stop) + 1 if has_it else len(other.token_ids)
        assert each.token_ids == other.token_ids[:end]
        assert each.finish_reason == ("stop" if has_it else "length")
        assert each.stop_reason == (stop if has_it else None)
