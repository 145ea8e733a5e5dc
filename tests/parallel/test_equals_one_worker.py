"""Worker processes generate the same tokens as one worker in this process.

`tests/test_tensor_parallel.py` tests every model family with threads; processes differ only in the
transport of plans and results, not in what a rank computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_tensor_parallel import CROWDED, checkpoint, generate, one_worker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_ranks_equal_one_worker(checkpoint_root: Path) -> None:
    """tests/parallel/test_lifetimes.py runs engines with depth 1."""
    path = checkpoint(checkpoint_root, "odd-vocabulary").path
    answers = generate(path, device="cpu", tensor_parallel_size=2, depth=0, **CROWDED)
    assert answers == one_worker(checkpoint_root, "odd-vocabulary")
