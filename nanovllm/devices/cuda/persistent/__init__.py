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

TRITON = "3.6."  # the supported release: gluon's API changes with every release


def build(model: DecoderModel, cache: KVCacheSpec) -> PersistentStep | None:
    """Return the persistent step of a loaded model, or None if the model is not supported.

    The weights of each projection (qkv, o, ...) are moved into one tensor for all layers.
    """
    problem = f"triton is {triton.__version__}, not {TRITON}x"
    if triton.__version__.startswith(TRITON):
        # These modules import gluon, which fails with other releases.
        from nanovllm.devices.cuda.persistent.packed_weights import (
            find_problem,
            step_constants,
            step_layers,
            step_shape,
            step_tensors,
        )
        from nanovllm.devices.cuda.persistent.persistent_step import PersistentStep

        layers = step_layers(model)
        problem = find_problem(model, layers, cache) or ""
        if not problem:
            shape, constants = step_shape(model, layers), step_constants(model, layers)
            try:
                return PersistentStep(shape, step_tensors(model, layers), constants)
            except torch.OutOfMemoryError:
                # Weights that were already moved stay valid: they are views of the new tensors.
                problem = "there is not enough memory to stack its weights"
    logger.info("Small batches of this model do not use the persistent kernel: %s", problem)
    return None
