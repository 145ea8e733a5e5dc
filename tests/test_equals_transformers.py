"""Token-for-token equality with transformers: greedy, float32, CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from nanovllm import LLM, SamplingParams
from tests.checkpoints import FAMILIES, VARIANTS, VOCAB_SIZE, TinyCheckpoint

# Lengths around the boundaries of 16-token blocks.
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49)
pytestmark = pytest.mark.usefixtures("one_thread")  # tests/worker covers several threads
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in BORDERS]
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts += [shared[:32], shared[:33], shared, [*shared, 5], [*shared, 5, 6, 7]]
    return [*prompts, prompts[3], prompts[5], shared]  # duplicates in one batch


class Case(NamedTuple):
    path: str
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tiny: Any) -> Case:
    return make_case(tiny(request.param))


def make_case(checkpoint: TinyCheckpoint) -> Case:
    prompts = make_prompts()
    answers = checkpoint.answers(prompts, MAX_TOKENS)
    num_different = [len(set(answer)) for answer in answers]
    assert sum(num_different) > 5 * len(answers), "answers repeat themselves: they prove little"
    return Case(str(checkpoint.path), prompts, answers)


MODES = {
    "plain": {},
    "no-cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 7},
    "chunked-no-cache": {"max_num_batched_tokens": 13, "enable_prefix_caching": False},
    "preempted": {"num_kvcache_blocks": 6},
    "preempted-chunked": {"num_kvcache_blocks": 7, "max_num_batched_tokens": 9},
    "few-slots": {"max_num_seqs": 3},
    "block-32": {"kvcache_block_size": 32},
    "block-48": {"kvcache_block_size": 48, "max_num_batched_tokens": 10},
    "block-256": {"kvcache_block_size": 256},
    "eager": {"enforce_eager": True},
    "many-rows": {"max_num_seqs": 20},  # more rows than a captured step supports
}


# The depth for each mode.
FAMILY_MODES = {"plain": 0, "preempted-chunked": 1, "eager": 0, "many-rows": 1}


def variant_cases() -> Iterator[tuple[str, str, int]]:
    """Distribute all pairs of a mode and a depth over the variants."""
    variants = list(VARIANTS)
    for number, (depth, mode) in enumerate(itertools.product((0, 1), MODES)):
        yield variants[number % len(variants)], mode, depth


def family_cases() -> Iterator[tuple[str, str, int]]:
    modes = list(FAMILY_MODES.items())
    for number, family in enumerate(FAMILIES):
        for index in range(2):
            yield family, *modes[(number + index) % len(modes)]


# Sorted, so that the cases of one model share its reference outputs.
CASES = sorted([*variant_cases(), *family_cases()])


@pytest.mark.parametrize(("case", "mode", "depth"), CASES, indirect=["case"])
def test_equals_transformers(case: Case, mode: str, depth: int) -> None:
    check(case, mode, depth)


def check(case: Case, mode: str, depth: int) -> None:
    options = {"kvcache_block_size": 16, "max_num_seqs": 8, "max_model_len": 128, **MODES[mode]}
    with LLM(case.path, skip_tokenizer_init=True, depth=depth, **options) as llm:
        for max_tokens in (MAX_TOKENS, 5):  # the second time, everything is cached
            params = replace(GREEDY, max_tokens=max_tokens)
            outputs = llm.generate(case.prompts, params, use_tqdm=False)
            want = [answer[:max_tokens] for answer in case.answers]
            assert [output.token_ids for output in outputs] == want
        scheduler = llm.engine.core.scheduler
        scheduler.check()
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
        if mode.startswith("preempted"):
            assert scheduler.num_preemptions > 0
        if mode == "plain":
            assert sum(output.num_cached_tokens for output in outputs) > 300
        if "no-cache" in mode:
            assert not any(output.num_cached_tokens for output in outputs)
