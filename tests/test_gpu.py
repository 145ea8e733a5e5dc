"""The engine on CUDA: tokens in float32 equal transformers', and graphs equal eager steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.engine.step import StepPlan
from nanovllm.worker.forward import Forward, StepLogits, is_decode
from tests.checkpoints import VARIANTS, TinyCheckpoint
from tests.devices import NEEDS_GPU, runner_of
from tests.test_equals_transformers import GREEDY, MAX_TOKENS, make_prompts
from tests.test_logits import checkpoint as logits_checkpoint
from tests.test_sampled_requests import mixed_params

pytestmark = NEEDS_GPU

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "depth-0": {"depth": 0},
    "chunked-no-cache": {"max_num_batched_tokens": 13, "enable_prefix_caching": False},
    "preempted-chunked": {"num_kvcache_blocks": 7, "max_num_batched_tokens": 9},
    "few-slots": {"max_num_seqs": 3},
    "one-slot": {"max_num_seqs": 1},
}
OPTIONS = {
    "kvcache_block_size": 16,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "gpu_memory_utilization": 0.2,
    "device": "cuda",
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tiny: Any) -> tuple[str, list[list[int]], list[list[int]]]:
    checkpoint = tiny(request.param)
    return str(checkpoint.path), make_prompts(), expected(checkpoint)


@cache
def expected(checkpoint: TinyCheckpoint) -> list[list[int]]:
    """Return the completions of `make_prompts()` by transformers."""
    return [checkpoint.generate(prompt, MAX_TOKENS) for prompt in make_prompts()]


@pytest.mark.parametrize("mode", list(MODES))
def test_equals_transformers(case: Any, mode: str) -> None:
    path, prompts, want = case
    with LLM(path, **{**OPTIONS, **MODES[mode]}) as llm:
        for _ in range(2):  # the second time, everything is cached
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.token_ids for output in outputs] == want
        scheduler = llm.engine.core.scheduler
        scheduler.check()
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
        if mode == "plain":
            assert sum(output.num_cached_tokens for output in outputs) > 300
        if mode.startswith("preempted"):
            assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])
def test_block_sizes(tiny: Any, block_size: int) -> None:
    checkpoint = tiny("qwen3")
    prompts, want = make_prompts()[5:12], expected(checkpoint)[5:12]
    with LLM(str(checkpoint.path), **{**OPTIONS, "kvcache_block_size": block_size}) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == want


@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
def test_batches_of_1_to_300(tiny: Any, caching: bool) -> None:
    """Sequences arrive and finish, so that graphs of every size run, padded and full."""
    checkpoint = tiny("qwen3")
    prompts, want = make_prompts(), expected(checkpoint)
    rng = random.Random(0)
    picks = [(rng.randrange(len(prompts)), rng.randint(1, MAX_TOKENS)) for _ in range(300)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in picks]
    options = {**OPTIONS, "max_num_seqs": 300, "enable_prefix_caching": caching}
    with LLM(str(checkpoint.path), **options) as llm:
        outputs = llm.generate([prompts[i] for i, _ in picks], params, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [want[i][:n] for i, n in picks]


class BothWays:
    """Runs decode steps both eagerly and from their graph, and keeps both logits."""

    def __init__(self, graphed: Forward) -> None:
        self.graphed = graphed
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, plan: StepPlan) -> StepLogits:
        if not is_decode(plan):
            return self.graphed(plan)
        steps = getattr(self.graphed, "__self__", self.graphed)  # may be a bound method
        eager = steps.eager(plan).values.clone()
        step = self.graphed(plan)
        self.pairs.append((step.values.clone(), eager))
        return step


@pytest.mark.parametrize(
    ("max_rows", "max_len", "tolerances"),
    [
        (8, 64, (0.0, 0.0)),  # no padding and no split KV: identical kernels
        (40, 160, (0.03, 0.004)),  # padded matmuls and split KV round differently
    ],
    ids=["exact", "padded"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_equal_eager_steps(
    checkpoint_root: Path, dtype: str, max_rows: int, max_len: int, tolerances: tuple[float, float]
) -> None:
    rng = random.Random(max_rows)
    lens = [rng.randint(1, max_len // 2) for _ in range(2 * max_rows)]
    prompts = [rng.choices(range(1000), k=length) for length in lens]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randint(2, 30), ignore_eos=True) for _ in lens
    ]
    options = {**OPTIONS, "max_num_seqs": max_rows, "max_model_len": max_len, "dtype": dtype}
    with LLM(logits_checkpoint(checkpoint_root, "wide").path, **options) as llm:
        runner = runner_of(llm)
        runner.forward = both = BothWays(runner.forward)
        llm.generate(prompts, params, use_tqdm=False)
    assert {len(graphed) for graphed, _ in both.pairs} >= {1, max_rows}
    graphed, eager = (torch.cat(side).double() for side in zip(*both.pairs, strict=True))
    difference = (graphed - eager).square().mean().sqrt() / eager.square().mean().sqrt()
    assert difference <= tolerances[dtype == "float16"]


def test_two_engines_take_turns(tiny: Any) -> None:
    """Engines do not share tables, graphs or caches."""
    checkpoints = [tiny("qwen3"), tiny("llama")]
    prompts = make_prompts()
    llms = [LLM(checkpoint.path, **OPTIONS) for checkpoint in checkpoints]
    finished: list[dict[int, list[int]]] = [{}, {}]
    for llm in llms:
        for prompt in prompts:
            llm.add_request(prompt, GREEDY)
    while not all(llm.is_finished() for llm in llms):
        for llm, outputs in zip(llms, finished, strict=True):
            outputs.update({o.seq_id: o.token_ids for o in llm.step().finished})
    for llm, checkpoint, outputs in zip(llms, checkpoints, finished, strict=True):
        llm.close()
        assert [outputs[i] for i in range(len(prompts))] == expected(checkpoint)


@pytest.mark.parametrize("mode", ["plain", "eager", "preempted-chunked", "few-slots"])
def test_a_device_that_lags_behind(tiny: Any, mode: str) -> None:
    """The host prepares the next step's copies while those of the previous one are pending."""
    checkpoint = tiny("qwen3")
    with LLM(checkpoint.path, **{**OPTIONS, **MODES[mode]}) as llm:
        slow_down(llm)
        outputs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == expected(checkpoint)


@pytest.mark.parametrize("mode", ["plain", "preempted-chunked"])
def test_aborts_leave_the_others_alone(tiny: Any, mode: str) -> None:
    """Aborted requests write blocks that the others share, and sometimes do not complete them."""
    checkpoint, rng = tiny("qwen3"), random.Random(5)
    doomed, ids, outputs = [], [], {}
    with LLM(checkpoint.path, **{**OPTIONS, **MODES[mode]}) as llm:
        slow_down(llm)
        for prompt in make_prompts():
            doomed.append(llm.add_request(prompt, GREEDY))
            ids.append(llm.add_request(prompt, GREEDY))
        while not llm.is_finished():
            if doomed and rng.random() < 0.4:
                llm.abort(doomed.pop(rng.randrange(min(4, len(doomed)))))
            outputs.update({o.seq_id: o.token_ids for o in llm.step().finished})
        llm.engine.core.scheduler.check()
    assert [outputs[seq_id] for seq_id in ids] == expected(checkpoint)


def slow_down(llm: LLM) -> None:
    """Make the device begin every step late."""
    buffers = runner_of(llm).eager.input_batch
    update = buffers.update

    def update_late(plan: StepPlan) -> None:
        torch.cuda._sleep(3_000_000)  # cycles: more than a millisecond
        update(plan)

    buffers.update = update_late


@pytest.mark.parametrize("mode", ["plain", "eager", "chunked-no-cache"])
def test_no_step_waits_for_the_device(tiny: Any, mode: str) -> None:
    prompts = make_prompts()
    params = mixed_params(len(prompts))
    with LLM(tiny("qwen3").path, **{**OPTIONS, **MODES[mode]}) as llm:
        llm.generate(prompts, params, use_tqdm=False)  # compiles and allocates
        with no_waiting():
            llm.generate(prompts, params, use_tqdm=False, cache_salt="again")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise if it would wait for the device; waiting for the tokens' event is fine."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
