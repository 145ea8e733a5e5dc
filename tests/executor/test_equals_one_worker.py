"""Worker processes give, token for token, what one worker in this process gives: every family."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from tests.checkpoints import FAMILIES, VARIANTS, VOCAB_SIZE, TinyCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "kvcache_block_size": 16,
    "max_num_seqs": 6,
    "max_model_len": 96,
    "skip_tokenizer_init": True,
    # Prompts come in chunks, and sequences are preempted and resumed.
    "max_num_batched_tokens": 40,
    "num_kvcache_blocks": 8,
}
RNG = random.Random(0)
SHARED = [RNG.randrange(VOCAB_SIZE) for _ in range(40)]
PROMPTS = [[RNG.randrange(VOCAB_SIZE) for _ in range(length)] for length in (15, 1, 30, 16)]
PROMPTS += [SHARED[:33], SHARED, [*SHARED, 5]]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), top_p=0.9, seed=i, max_tokens=10 + i)
    for i in range(len(PROMPTS))
]


def generate(path: Path, size: int, depth: int) -> list[list[int]]:
    """Answer twice: the second time the prompts are cached."""
    with LLM(path, tensor_parallel_size=size, depth=depth, **OPTIONS) as llm:
        outputs = [llm.generate(PROMPTS, PARAMS, use_tqdm=False) for _ in range(2)]
        llm.engine.core.scheduler.check()
        assert llm.engine.core.scheduler.num_preemptions
    return [output.token_ids for each in outputs for output in each]


@pytest.mark.parametrize("variant", [*VARIANTS, *FAMILIES])
def test_ranks_equal_one_worker(tiny: Callable[[str], TinyCheckpoint], variant: str) -> None:
    path = tiny(variant).path
    answers = generate(path, size=1, depth=0)
    assert generate(path, size=2, depth=1) == answers
    assert generate(path, size=4, depth=0) == answers
