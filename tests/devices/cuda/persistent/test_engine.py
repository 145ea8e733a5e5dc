"""Decode steps of up to eight rows in an engine: the persistent kernel equals eager steps."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.replayed_drafts import Replay, set_drafter
from nanovllm import LLM, SamplingParams
from nanovllm.engine.step import StepPlan
from nanovllm.worker.forward import StepLogits
from tests.checkpoints import make_checkpoint
from tests.devices import NEEDS_GPU, runner_of
from tests.devices.shared_gpu import versions
from tests.test_gpu import OPTIONS, BothWays
from tests.test_logits import WIDE
from tests.test_speculation import EagerDrafter

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
WHOLE = {
    **OPTIONS,
    "kvcache_block_size": 32,
    "dtype": "bfloat16",
    "max_model_len": 256,
    "num_kvcache_blocks": 64,  # fixed: other processes may use any share of the GPU memory
}


@pytest.fixture(scope="module")
def path(checkpoint_root: Path) -> Path:
    """A checkpoint whose norm weights are bfloat16 too, as in real models."""
    model = make_checkpoint(checkpoint_root / "whole-float32", WIDE).model.bfloat16()
    model.save_pretrained(checkpoint_root / "whole")
    return checkpoint_root / "whole"


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [rng.choices(range(1000), k=length) for length in (1, 31, 32, 33, 100)]


def generate(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for prompt in prompts():  # batches of a single row
        llm.generate([prompt], params, use_tqdm=False)
    for num_rows in (2, 3, 5):
        llm.generate(prompts()[:num_rows], params, use_tqdm=False)


def test_the_step_is_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A release of Triton that the kernel does not support must not go unnoticed."""
    with LLM(path, **WHOLE) as llm:
        assert runner_of(llm).forward.decode.persistent_tokens, versions()
    assert "persistent kernel" not in caplog.text


@pytest.mark.parametrize("options", [{}, {"target_inter_token_ms": 25.0}], ids=["first", "all"])
def test_the_step_is_captured_at_startup(path: Path, options: dict[str, Any]) -> None:
    """It overwrites the logits of the same batch size, from which the samplers' graphs sample."""
    with LLM(path, **WHOLE, **options) as llm:
        decode = runner_of(llm).forward.decode
        buckets = [bucket for way, bucket in decode.graphs if way == "persistent"]
        assert sorted(size for size, _ in buckets) == sorted(decode.persistent_tokens)
        for bucket in buckets:
            logits = decode.graphs["layers", bucket].output
            assert decode.graphs["persistent", bucket].output.data_ptr() == logits.data_ptr()
        generate(llm)
        assert buckets == [bucket for way, bucket in decode.graphs if way == "persistent"]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("limit", [1 << 20, 64], ids=["all", "short-contexts"])
def test_equals_eager_steps(path: Path, limit: int, kv_cache_dtype: str) -> None:
    with LLM(path, **WHOLE, kv_cache_dtype=kv_cache_dtype) as llm:
        runner = runner_of(llm)
        steps: Any = runner.forward.decode
        assert steps.persistent_tokens
        steps.persistent_tokens = dict.fromkeys(steps.persistent_tokens, limit)
        runner.forward = both = BothWays(runner.forward)
        generate(llm)
    whole, eager = (torch.cat(side).double() for side in zip(*both.pairs, strict=True))
    difference = (whole - eager).square().mean().sqrt() / eager.square().mean().sqrt()
    assert 0 < difference < (0.03 if kv_cache_dtype == "auto" else 0.05)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_drafts_change_no_output_in_bfloat16(path: Path, num_rows: int) -> None:
    """A row's logits do not depend on other rows, and neither do they on drafts."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(path, **WHOLE, speculative_config=config) as llm:
        scheduler = llm.engine.core.scheduler
        set_drafter(scheduler, None)
        some = prompts()[1 : 1 + num_rows]
        want = [output.token_ids for output in llm.generate(some, params, use_tqdm=False)]
        recorded = [[*prompt, *ids] for prompt, ids in zip(some, want, strict=True)]
        set_drafter(scheduler, EagerDrafter(Replay(recorded, 1000), 3))
        found = [output.token_ids for output in llm.generate(some, params, use_tqdm=False)]
    assert found == want
    counts = scheduler.draft_counts
    assert counts.num_draft_tokens > counts.num_accepted_tokens > 30


def test_what_a_lost_step_leaves_is_recomputed(path: Path) -> None:
    """The kernel times out in the middle of a completion, and is not used again."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(path, **WHOLE) as llm:
        steps: Any = runner_of(llm).forward
        steps.decode.persistent_tokens.clear()
        want = llm.generate([prompts()[3]], params, use_tqdm=False)
    with LLM(path, **WHOLE) as llm:
        runner, num_steps = runner_of(llm), count()
        steps = runner.forward

        def forward(plan: StepPlan) -> StepLogits:
            if next(num_steps) == 10:
                attended = steps.decode.persistent._exchanges[1][3]
                attended[..., -1] = -1  # EMPTY: a value that no CTA will store
            logits: StepLogits = steps(plan)
            return logits

        runner.forward = forward
        outputs = llm.generate([prompts()[3]], params, use_tqdm=False)
        assert not steps.decode.persistent_tokens
        assert llm.engine.core.scheduler.num_preemptions == 1
    assert len(outputs[0].token_ids) == 40
    assert outputs[0].token_ids[:5] == want[0].token_ids[:5]


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"kvcache_block_size": 16}], ids=str)
def test_others_run_layer_by_layer(path: Path, change: dict[str, Any]) -> None:
    with LLM(path, **{**WHOLE, **change}) as llm:
        steps: Any = runner_of(llm).forward.decode
        assert not steps.persistent_tokens
        generate(llm)
