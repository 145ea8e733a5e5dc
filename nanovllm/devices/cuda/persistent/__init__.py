"""The persistent kernel: runs a decode step of up to eight rows as one kernel on Hopper GPUs.

`build` is the only entry point; docs/persistent-step.md explains the kernel.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import triton

from nanovllm.models.decoder import DecoderModel
from nanovllm.worker.kv_cache import KVCacheSpec

if TYPE_CHECKING:
    from nanovllm.devices.cuda.persistent.persistent_step import PersistentStep

logger = logging.getLogger(__name__)

COST = (
    "Without it, steps of up to eight sequences take longer (Qwen3-0.6B on an H200: 0.66 instead "
    "of 0.45 ms for one sequence, 0.88 instead of 0.68 ms for eight)"
)

TRITON = ("3.6.", "3.7.")  # the supported releases: gluon's API changes with every release


def build(model: DecoderModel, cache: KVCacheSpec) -> PersistentStep | None:
    """Return the persistent step of a loaded model, or None if the model is not supported.

    The weights of each projection (qkv, o, ...) are moved into one tensor for all layers.
    """
    if not triton.__version__.startswith(TRITON):
        releases = " and ".join(f"{release}x" for release in TRITON)
        is_served = is_hopper(model) and model.dtype == torch.bfloat16
        warn_or_inform(f"it supports Triton {releases}, not {triton.__version__}", is_served)
        return None
    # These modules import gluon, which fails with other releases.
    from nanovllm.devices.cuda.persistent.packed_weights import (
        find_cache_problem,
        find_problem,
        step_constants,
        step_layers,
        step_shape,
        step_tensors,
    )
    from nanovllm.devices.cuda.persistent.persistent_step import PersistentStep

    layers = step_layers(model)
    if problem := find_problem(model, layers, cache):
        warn_or_inform(problem, is_served=False)
        return None
    if problem := find_cache_problem(cache):
        warn_or_inform(problem, is_served=True)
        return None
    shape, constants = step_shape(model, layers, cache), step_constants(model, layers)
    try:
        return PersistentStep(shape, step_tensors(model, layers), constants)
    except torch.OutOfMemoryError:
        # Weights that were already moved stay valid: they are views of the new tensors.
        warn_or_inform("there is not enough memory to stack the weights", is_served=True)
        return None


def is_hopper(model: DecoderModel) -> bool:
    device = model.model.norm.weight.device
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def warn_or_inform(problem: str, is_served: bool) -> None:
    """Log why the step is not used; warn if the kernel serves this model and this device."""
    if is_served:
        logger.warning("The persistent kernel is off: %s. %s", problem, COST)
    else:
        logger.info("The persistent kernel does not serve this model or this GPU: %s", problem)
