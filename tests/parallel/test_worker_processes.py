"""Worker processes give the same results as one worker in this process.

`tests/test_tensor_parallel.py` tests every model family with threads; processes differ only in the
transport of plans and results, not in what a rank computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm import LLM
from nanovllm.errors import RequestError
from tests import test_embeddings as embeddings
from tests import test_logits_processors as processors
from tests.checkpoints import TinyCheckpoint
from tests.parallel.workers import forbid_what_was_said
from tests.test_tensor_parallel import (
    CROWDED,
    OPTIONS,
    PROMPTS,
    checkpoint,
    complete,
    one_worker,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
NAME = "odd-vocabulary"


@pytest.fixture(scope="module")
def tiny_checkpoint(checkpoint_root: Path) -> TinyCheckpoint:
    return checkpoint(checkpoint_root, NAME)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: TinyCheckpoint) -> Iterator[LLM]:
    """Depth 0; tests/parallel/test_lifetimes.py runs engines with depth 1."""
    options = {**OPTIONS, **CROWDED, "tensor_parallel_size": 2, "depth": 0}
    with LLM(tiny_checkpoint.path, device="cpu", **options) as llm:
        yield llm


def test_tokens(llm: LLM, checkpoint_root: Path) -> None:
    assert complete(llm, **CROWDED) == one_worker(checkpoint_root, NAME)


def test_embeddings(llm: LLM, tiny_checkpoint: TinyCheckpoint) -> None:
    for pooling in embeddings.POOLINGS:
        outputs = llm.embed(PROMPTS, pooling, normalize=False, use_tqdm=False)
        embeddings.assert_right(tiny_checkpoint, PROMPTS, outputs, pooling)


def test_logits_processors_are_imported(llm: LLM, tiny_checkpoint: TinyCheckpoint) -> None:
    prompt = PROMPTS[1]
    with pytest.raises(RequestError, match="logits_processors must be names"):
        llm.generate([prompt], processors.greedy([forbid_what_was_said]), use_tqdm=False)
    named = processors.greedy(["tests.parallel.workers:forbid_what_was_said"])
    broken = processors.greedy(["tests.no_such_module:f"])
    good, bad = llm.generate([prompt, prompt], [named, broken], use_tqdm=False)
    assert good.token_ids == processors.reference(tiny_checkpoint, prompt, [forbid_what_was_said])
    assert "No module named 'tests.no_such_module'" in str(bad.error)
