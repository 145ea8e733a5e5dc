"""The Triton kernels, in Triton's interpreter, equal plain torch; this needs no CUDA device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.devices import run_interpreted

FOLDER = "tests.devices.cuda.kernels.interpreted"
# With a CUDA device, other tests run these cases compiled.
ALSO_COMPILED = (
    *("paged_attention_cases", "fused_cases", "experts_cases", "quantized_cases"),
    "delta_net_cases",
)


# Interpreted kernels are a thousand times slower, so `make test` runs only some of the cases.
MARKS = [pytest.mark.slow, pytest.mark.endurance, pytest.mark.exhaustive]


@pytest.mark.parametrize("which", ["some", pytest.param("rest", marks=MARKS)])
def test_kernels_equal_the_reference(which: str) -> None:
    """Run all modules in one process, whose start takes as long as the cases of one module.

    `make endurance` runs the rest of the cases; with a GPU, they run compiled.
    """
    names = ("sampling_cases", *(() if torch.cuda.is_available() else ALSO_COMPILED))
    run_interpreted(",".join(f"{FOLDER}.{name}" for name in names), which)
