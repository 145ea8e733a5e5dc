"""Models whose layers have different windows equal transformers, in every mode of the engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, TinyCheckpoint
from tests.test_equals_transformers import GREEDY, HYBRID, MAX_TOKENS, MODES, check
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")
Tiny = Callable[[str], TinyCheckpoint]
# Number of groups with full attention, and with a window.
GROUPS = {
    "mistral": (0, 1),
    "qwen2-window": (1, 1),
    "gemma2": (1, 1),
    "gemma3-six": (1, 5),
    "olmo3": (1, 3),
    "ministral": (1, 3),
    "qwen3.5": (1, 0),
    "qwen3-next": (1, 0),
}
WINDOWED = [name for name, (_, num_windows) in GROUPS.items() if num_windows]
OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "skip_tokenizer_init": True,
}
LONG = (5, 100, 130, 257, 400, 480)  # many times the window
SMALL = {"num_kvcache_blocks": 34, "max_num_batched_tokens": 100}


@pytest.mark.parametrize(("name", "counts"), GROUPS.items())
def test_groups_of_a_model(tiny: Tiny, name: str, counts: tuple[int, int]) -> None:
    num_full, num_windows = counts
    with LLM(tiny(name).path, **OPTIONS) as llm:
        held = llm.engine.core.scheduler.blocks.num_held
        assert len(held) == num_full + num_windows


def mode_cases() -> Iterator[Any]:
    """Run each family in every mode; the fast tests take one of seven."""
    for number, (name, mode) in enumerate(itertools.product(GROUPS, MODES)):
        marks = () if number % 7 == 0 else pytest.mark.slow
        yield pytest.param(name, mode, number % 2, marks=marks)


@pytest.mark.parametrize(("name", "mode", "depth"), [*mode_cases()])
def test_every_mode_equals_transformers(tiny: Tiny, name: str, mode: str, depth: int) -> None:
    check(tiny(name), mode, depth)


def random_prompts(lengths: tuple[int, ...] | range) -> list[list[int]]:
    rng = random.Random(3)
    return [rng.choices(range(VOCAB_SIZE), k=length) for length in lengths]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"max_num_batched_tokens": 48}, marks=pytest.mark.slow),
        {**SMALL, "depth": 1},
        pytest.param({**SMALL, "enforce_eager": True}, marks=pytest.mark.slow),
    ],
    ids=["plain", "chunks", "small", "eager"],
)
@pytest.mark.parametrize("name", WINDOWED)
def test_long_prompts_equal_transformers(tiny: Tiny, name: str, options: dict[str, Any]) -> None:
    """They run twice: the second time, their prefixes are cached."""
    checkpoint, prompts = tiny(name), random_prompts(LONG)
    with LLM(checkpoint.path, **{**OPTIONS, **options}) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            checkpoint.assert_greedy(prompts, [output.token_ids for output in outputs])
        assert options or [output.num_cached_tokens for output in outputs] == [
            (length - 1) // 16 * 16 for length in LONG
        ]
        scheduler = llm.engine.core.scheduler
        scheduler.check()
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


@pytest.mark.parametrize("name", ["gemma3-six", pytest.param("ministral", marks=pytest.mark.slow)])
def test_windows_free_blocks_on_two_ranks(tiny: Tiny, name: str) -> None:
    """If windows kept all blocks, the longest prompt would need twice as many as there are."""
    checkpoint, prompts = tiny(name), random_prompts(LONG)
    options = {**OPTIONS, **SMALL, "num_kvcache_blocks": 14, "depth": 1}
    with engines_of(2), LLM(checkpoint.path, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.engine.core.scheduler.check()
    checkpoint.assert_greedy(prompts, [output.token_ids for output in outputs])


@pytest.mark.parametrize(
    "name",
    [
        *("mistral", "gemma3-six", "olmo3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "ministral", *HYBRID)),
    ],
)
def test_prefix_hits_of_every_length(tiny: Tiny, name: str) -> None:
    checkpoint, [whole, *tails] = tiny(name), random_prompts((300, *[3] * 100))
    prompts = [whole[: 1 + 3 * i] + tail for i, tail in enumerate(tails)]
    with LLM(checkpoint.path, **OPTIONS) as llm:
        llm.generate([whole], GREEDY, use_tqdm=False)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    checkpoint.assert_greedy(prompts, [output.token_ids for output in outputs])
    hits = [output.num_cached_tokens for output in outputs]
    shared = [(1 + 3 * i) // 16 * 16 for i in range(100)]
    if name in HYBRID:  # a hit ends at a snapshot: the first prompt with a new branch takes one
        assert set(hits) == set(shared)
    else:
        assert hits == shared


@pytest.mark.parametrize("name", WINDOWED)
def test_samples_share_their_prompt(tiny: Tiny, name: str) -> None:
    prompts = random_prompts((60, 200))
    params = SamplingParams(temperature=0.9, max_tokens=40, seed=5, ignore_eos=True, n=3)
    ones = [replace(params, n=1, seed=5 + i) for i in range(3)]
    with LLM(tiny(name).path, **OPTIONS) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            alone = llm.generate([prompt] * 3, ones, use_tqdm=False)
            assert [each.token_ids for each in output.outputs] == [one.token_ids for one in alone]


DRAFT_MODELS = [
    ("gemma3-six", "gemma3-six"),  # the same groups
    ("gemma3-six", "mistral"),  # fewer
    ("gemma3-six", "qwen3"),
    ("mistral", "gemma2"),  # a full group is added for the draft model
    ("qwen3", "olmo3"),  # all layers of the draft model have full attention
]


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), SMALL], ids=["plain", "small"]
)
@pytest.mark.parametrize(("name", "draft"), [*DRAFT_MODELS, *((name, None) for name in WINDOWED)])
def test_drafts_change_no_token(
    tiny: Tiny, name: str, draft: str | None, options: dict[str, Any]
) -> None:
    """Drafts come from a model, or from n-grams; repetition makes these frequent."""
    checkpoint, prompts = tiny(name), [prompt * 2 for prompt in random_prompts((30, 60, 200))]
    speculative: dict[str, Any] = {"num_speculative_tokens": 4, "method": "ngram"}
    if draft is not None:
        speculative |= {"method": "draft_model", "model": str(tiny(draft).path)}
    options = {**OPTIONS, **options, "speculative_config": speculative}
    with LLM(checkpoint.path, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.engine.core.scheduler.check()
        assert llm.engine.core.scheduler.draft_counts.num_draft_tokens > 0 or draft is None
    checkpoint.assert_greedy(prompts, [output.token_ids for output in outputs])
    assert all(len(output.token_ids) == MAX_TOKENS for output in outputs)
