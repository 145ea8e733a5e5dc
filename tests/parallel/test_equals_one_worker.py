"""Worker processes generate the same tokens as one worker in this process.

`tests/test_tensor_parallel.py` tests every model family with threads; processes differ only in the
transport of plans and results, not in what a rank computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_tensor_parallel import CROWDED, checkpoint, generate, one_worker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    ("name", "size", "depth"),
    [
        ("qwen3-tied", 2, 1),
        ("odd-vocabulary", 4, 0),
    ],
)
def test_ranks_equal_one_worker(checkpoint_root: Path, name: str, size: int, depth: int) -> None:
    path = checkpoint(checkpoint_root, name).path
    answers = generate(path, device="cpu", tensor_parallel_size=size, depth=depth, **CROWDED)
    assert answers == one_worker(checkpoint_root, name)
