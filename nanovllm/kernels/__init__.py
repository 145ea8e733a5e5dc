"""Choose the operations for a platform and dtype, once."""

from __future__ import annotations

import logging

import torch

from nanovllm.kernels.base import Ops
from nanovllm.kernels.reference import TorchOps
from nanovllm.platforms.base import Platform

logger = logging.getLogger(__name__)


def create_ops(platform: Platform, dtype: torch.dtype) -> Ops:
    if platform.name == "cuda":
        from nanovllm.kernels.triton_ops import TritonOps

        return TritonOps()
    if dtype not in (torch.float32, torch.bfloat16):
        return TorchOps()
    try:
        from nanovllm.kernels.numba_launch import Launcher
        from nanovllm.kernels.numba_ops import NumbaOps
    except ImportError as error:
        logger.info("no compiled CPU kernels (%s): decoding will be slower", error)
        return TorchOps()
    return NumbaOps(Launcher(dtype))
