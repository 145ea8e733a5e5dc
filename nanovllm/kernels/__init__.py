"""Choose the operations of a CPU for a dtype, once."""

from __future__ import annotations

import logging

import torch

from nanovllm.kernels.ops import Ops
from nanovllm.kernels.torch_ops import TorchOps
from nanovllm.platforms.cpu_features import CpuFeatures

logger = logging.getLogger(__name__)


def create_cpu_ops(dtype: torch.dtype, features: CpuFeatures) -> Ops:
    product_dtype = features.product_dtype(dtype)
    if not features.runs_kernels(dtype):
        if not features.has_compiler:
            logger.info("no compiled CPU kernels (numba is missing): decoding will be slower")
        return TorchOps(product_dtype)
    from nanovllm.kernels.cpu.ops import NumbaOps
    from nanovllm.kernels.cpu.program import Launcher

    return NumbaOps(Launcher(dtype), features)
