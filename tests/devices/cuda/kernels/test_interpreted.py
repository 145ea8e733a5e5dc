"""The Triton kernels equal plain torch in Triton's interpreter, which needs no CUDA device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.devices import run_interpreted

FOLDER = "tests.devices.cuda.kernels.interpreted"
# The tests of these run the same cases compiled where there is a device.
ALSO_COMPILED = ("paged_attention_cases", "fused_cases", "experts_cases", "quantized_cases")


# Interpreted, a kernel is a thousand times slower: every change runs some of the cases.
MARKS = [pytest.mark.slow, pytest.mark.endurance, pytest.mark.exhaustive]


@pytest.mark.parametrize("which", ["some", pytest.param("rest", marks=MARKS)])
def test_kernels_equal_the_reference(which: str) -> None:
    """All in one process, as its start takes as long as the cases of one module.

    `make endurance` runs the rest of the cases, and a GPU runs them compiled.
    """
    names = ("sampling_cases", *(() if torch.cuda.is_available() else ALSO_COMPILED))
    run_interpreted(",".join(f"{FOLDER}.{name}" for name in names), which)
