"""A replayed decode step equals the same step run eagerly, bit for bit."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from nanovllm import LLM, SamplingParams
from nanovllm.devices.cpu.captured_forward import CapturedForward
from nanovllm.engine.step import StepPlan
from nanovllm.worker.forward import EagerForward, StepLogits, is_decode
from nanovllm.worker.model_runner import ModelRunner
from tests.checkpoints import VARIANTS, VOCAB_SIZE, TinyCheckpoint

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parent.parent.parent
NUM_PROMPTS = 20  # more rows than our kernels take
Tiny = Callable[[str], TinyCheckpoint]


def make_prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40)) for _ in range(NUM_PROMPTS)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


# Every prompt has a different max_tokens, so that the rows of a step decrease to one.
GREEDY = [greedy(2 + i) for i in range(NUM_PROMPTS)]
MIXED = [
    SamplingParams(
        temperature=i % 2, top_p=0.9, max_tokens=8 + i, min_tokens=8, stop_token_ids=[*range(i)]
    )
    for i in range(NUM_PROMPTS)
]


def make_llm(path: Path, **options: Any) -> LLM:
    defaults = {"kvcache_block_size": 16, "max_num_seqs": NUM_PROMPTS, "max_model_len": 96}
    return LLM(path, skip_tokenizer_init=True, **{**defaults, **options})


def generate(llm: LLM, params: list[SamplingParams] = GREEDY) -> list[list[int]]:
    outputs = llm.generate(make_prompts(), params, use_tqdm=False)
    return [output.token_ids for output in outputs]


def runner_of(llm: LLM) -> ModelRunner:
    executor: Any = llm.engine.core.executor
    runner: ModelRunner = executor.runner
    return runner


class BothWays:
    """Runs every step twice, which writes the same values to the cache, and compares the logits."""

    def __init__(self, captured: CapturedForward) -> None:
        self.captured = captured
        self.num_rows: list[int] = []  # rows of each replayed step

    def __call__(self, plan: StepPlan) -> StepLogits:
        cache = self.captured.eager.state_cache  # unlike the KV cache, recurrent states are updated
        states = None if cache is None else cache.states.clone()
        want = self.captured.eager(plan)
        if cache is not None and states is not None:
            cache.states.copy_(states)
        got = self.captured(plan)
        assert torch.equal(got.values, want.values)
        assert torch.equal(got.slots, want.slots)
        if is_decode(plan) and len(plan.slots) <= self.captured.max_rows:
            self.num_rows.append(len(got.values))
        return got


def assert_steps_are_the_same(llm: LLM) -> list[int]:
    """Compare replayed with eager steps; return the number of rows of every replayed step."""
    runner = runner_of(llm)
    assert isinstance(runner.forward, CapturedForward)
    both = BothWays(runner.forward)
    runner.forward = both
    for params in (GREEDY, MIXED):
        generate(llm, params)
    assert len(both.num_rows) > len(set(both.num_rows))  # replays, not only captures
    return both.num_rows


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 24},
    "preempted": {"num_kvcache_blocks": 9},
    "preempted-chunked": {"num_kvcache_blocks": 9, "max_num_batched_tokens": 9},
    "block-48": {"kvcache_block_size": 48, "max_num_seqs": 5},
}


DTYPES = ("float32", "bfloat16")


def with_dtypes(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return every name with a dtype, in turn."""
    return [(name, DTYPES[i % 2]) for i, name in enumerate(names)]


@pytest.mark.parametrize(("mode", "dtype"), with_dtypes(MODES))
def test_every_step_has_the_same_logits(tiny: Tiny, mode: str, dtype: str) -> None:
    with make_llm(tiny("qwen3").path, dtype=dtype, **MODES[mode]) as llm:
        num_rows = assert_steps_are_the_same(llm)
        if mode.startswith("preempted"):
            assert llm.engine.core.scheduler.num_preemptions > 0
        if mode == "plain":
            assert set(num_rows) == set(range(1, runner_of(llm).forward.captured.max_rows + 1))


FAMILIES = ["gemma2", "glm4", "granite", "ministral3", "olmo3", "qwen3.5-moe", "smollm3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_a_family_is_captured(tiny: Tiny, family: str) -> None:
    with make_llm(tiny(family).path, dtype="bfloat16") as llm:
        assert_steps_are_the_same(llm)


@pytest.mark.parametrize(("variant", "dtype"), with_dtypes(VARIANTS))
def test_tokens_equal_those_of_the_eager_engine(tiny: Tiny, variant: str, dtype: str) -> None:
    tokens = []
    for enforce_eager, kind in ((False, CapturedForward), (True, EagerForward)):
        options = {"dtype": dtype, "depth": DTYPES.index(dtype), "enforce_eager": enforce_eager}
        with make_llm(tiny(variant).path, **options) as llm:
            assert isinstance(runner_of(llm).forward, kind)
            tokens.append([generate(llm), generate(llm, MIXED), generate(llm)])
    assert tokens[0] == tokens[1]


def test_engines_do_not_disturb_each_other(tiny: Tiny) -> None:
    """Two engines whose steps alternate give the same outputs as each alone."""
    prompts, variants = make_prompts()[:6], ("qwen3", "llama-mha-bias")
    want = [tiny(variant).answers(prompts, 12) for variant in variants]
    llms = [make_llm(tiny(variant).path) for variant in variants]
    for llm in llms:
        for prompt in prompts:
            llm.add_request(prompt, greedy(12))
    finished: list[dict[int, list[int]]] = [{}, {}]
    while not all(llm.is_finished() for llm in llms):
        for llm, tokens in zip(llms, finished, strict=True):
            tokens.update((output.seq_id, output.token_ids) for output in llm.step().finished)
    for llm in llms:
        llm.close()
    assert [[tokens[seq_id] for seq_id in sorted(tokens)] for tokens in finished] == want


@cache
def wanted(tiny: Tiny, variant: str) -> list[list[int]]:
    """Return the tokens of transformers, which neither threads nor kernels may change."""
    longest = max(params.max_tokens for params in GREEDY)
    answers = tiny(variant).answers(make_prompts(), longest)
    return [answer[: params.max_tokens] for answer, params in zip(answers, GREEDY, strict=True)]


# A model with QK norms, and one with biases.
@pytest.mark.parametrize("variant", ["qwen3", "llama-mha-bias"])
@pytest.mark.usefixtures("num_threads")
def test_any_number_of_threads_gives_the_same_tokens(tiny: Tiny, variant: str) -> None:
    with make_llm(tiny(variant).path) as llm:
        assert generate(llm) == wanted(tiny, variant)


@pytest.mark.slow
def test_without_numba_tokens_are_the_same(tiny: Tiny) -> None:
    """In a process that cannot import numba, the engine runs on plain torch."""
    script = """
import json, sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
from nanovllm import LLM, SamplingParams
from nanovllm.engine.step import StepPlan
paths, prompts, lengths = json.load(sys.stdin)
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
answers = []
for path in paths:
    with LLM(path, skip_tokenizer_init=True, max_model_len=96) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    answers.append([output.token_ids for output in outputs])
print(json.dumps(answers))
"""
    paths = [str(tiny(variant).path) for variant in VARIANTS]
    work = json.dumps([paths, make_prompts(), [params.max_tokens for params in GREEDY]])
    command = [sys.executable, "-c", script]
    result = subprocess.run(
        command, input=work, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [wanted(tiny, variant) for variant in VARIANTS]
