"""Choose the operations of a CPU for a dtype, once."""

from __future__ import annotations

import logging

import torch

from nanovllm.kernels.ops import Ops
from nanovllm.kernels.torch_ops import TorchOps

logger = logging.getLogger(__name__)


def create_cpu_ops(dtype: torch.dtype) -> Ops:
    if dtype not in (torch.float32, torch.bfloat16):
        return TorchOps()
    try:
        from nanovllm.kernels.cpu.ops import NumbaOps
        from nanovllm.kernels.cpu.program import Launcher
    except ImportError as error:
        logger.info("no compiled CPU kernels (%s): decoding will be slower", error)
        return TorchOps()
    return NumbaOps(Launcher(dtype))
