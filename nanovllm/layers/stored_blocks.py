"""What a rank takes of a tensor that is stored as rows of blocks: whole ones alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.kernels.cpu.block_types import TYPES
from nanovllm.kernels.cpu.blocks import BlockKernels
from nanovllm.kernels.ops import Ops
from nanovllm.layers.shards import ExpectedTensor, Share, expect_shares


def has_whole_blocks(kind: str, inputs: Share) -> bool:
    """Whether neither the tensor nor a rank's share of its columns cuts a block."""
    sizes = inputs.size, inputs.first, inputs.count
    return not any(size % TYPES[kind].size for size in sizes)


def byte_columns(kind: str, inputs: Share) -> Share:
    """The share in bytes of a row."""
    size, num_bytes = TYPES[kind].size, TYPES[kind].num_bytes
    return Share(
        *(count // size * num_bytes for count in (inputs.size, inputs.first, inputs.count))
    )


def expect_blocks(kind: str, target: Tensor, shares: list[Share], inputs: Share) -> ExpectedTensor:
    """Expect the blocks of a tensor, whose rows are some shares; those of padding become zeros."""
    assert target.dtype == torch.uint8
    if len(target) > sum(share.stored.stop - share.stored.start for share in shares):
        target.zero_()
    expected = expect_shares(target, shares, byte_columns(kind, inputs))
    return replace(expected, shape=(expected.shape[0], inputs.size), is_blocks=True)


def block_kernels(ops: Ops) -> BlockKernels:
    assert ops.blocks is not None, "only where there are kernels weights are kept as blocks"
    return ops.blocks
