"""A decode step of one sequence as one kernel: which models it serves, and what it is given.

docs/persistent-step.md explains the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.errors import EngineError
from nanovllm.kernels.cuda.persistent_exchange import NUM_BUFFERS, NUM_PROGRAMS
from nanovllm.kernels.cuda.persistent_kernel import persistent_step
from nanovllm.kernels.cuda.persistent_products import FACTORS
from nanovllm.kernels.cuda.persistent_shape import StepShape
from nanovllm.kernels.cuda.persistent_sizes import (
    expert_segments,
    gated_parts,
    gated_room,
    num_chunks,
    num_halves,
    num_partials,
    num_stored,
    num_tiles,
    piece_segments,
    segment_groups,
)
from nanovllm.kernels.cuda.persistent_stream import RING
from nanovllm.kernels.cuda.step_tensors import StackedCodes, StepConstants, StepTensors

LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 30
MAX_WORDS = 1 << 31  # places in a layer's cache are counted in 32 bits


def device_problem(device: torch.device) -> str | None:
    """Why this device cannot run the kernel."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0):
        return f"compute capability {properties.major}.{properties.minor}, not 9.0"
    if properties.multi_processor_count < NUM_PROGRAMS.value:
        return f"{properties.multi_processor_count} multiprocessors: its programs must all run"
    return None


class PersistentStep:
    """See Ops.pack_step."""

    def __init__(self, shape: StepShape, tensors: StepTensors, constants: StepConstants) -> None:
        self.shape, self.constants = shape, constants
        self.num_layers = len(tensors.norms)
        # Beyond it two tiles of keys on their way are too few: benchmarks/RESULTS.md.
        self.max_context = 16384 if shape.hidden >= 4096 else 8192
        device = tensors.head.device
        weights = tensors.qkv, tensors.o, tensors.gate_up
        router = tensors.head if tensors.router is None else tensors.router
        self._weights = (
            *[part for weight in weights for part in describe_both(weight)],
            *describe_both(tensors.down, is_of_experts=shape.experts.num_experts > 0),
            describe_both(router)[0],
            describe_both(tensors.head)[0],
        )
        norms, bias = tensors.qk_norms, tensors.qkv_bias
        self._vectors = (
            tensors.embedding,
            four_in_one(tensors.norms, shape.bits),
            four_in_one(tensors.final_norm, shape.bits),
            None if norms is None else norms.contiguous().view(torch.int32),
            None if bias is None else bias.contiguous(),
            tensors.rope,
        )
        widths = num_stored(shape.hidden), shape.q, num_stored(shape.hidden)
        x, attended, y = (empty_exchange(width, device, shape.bits) for width in widths)
        parts, room = gated_parts(shape), gated_room(shape)
        gated = empty_exchange(shape.mlp, device, shape.bits, parts, room)
        qkv = empty_exchange(shape.qkv, device)
        partials = empty_partials(shape, device)
        routed = empty_exchange(shape.experts.num_experts, device)
        self._exchanges = x, qkv, partials, attended, y, gated, routed
        self._turns = torch.zeros(2, dtype=torch.int32, device=device)
        # The kernel writes it if a program waits in vain, and the host can look without waiting.
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._gave_up = self._flag.numpy()

    def suits(self, k_caches: list[Tensor], v_caches: list[Tensor]) -> bool:
        strides = {
            (b.data_ptr() - a.data_ptr(), d.data_ptr() - c.data_ptr())
            for a, b, c, d in zip(k_caches, k_caches[1:], v_caches, v_caches[1:], strict=False)
        }
        is_regular = len(strides) <= 1 and all(k == v for k, v in strides)
        is_small = k_caches[0].nbytes < 4 * MAX_WORDS
        is_whole = k_caches[0].shape[1] % 32 == 0  # a tile of keys lies in one block
        return is_regular and is_small and is_whole and k_caches[0].is_contiguous()

    def run(
        self,
        slot: Tensor,
        lengths: Tensor,
        tokens: Tensor,
        block_table: Tensor,
        k_caches: list[Tensor],
        v_caches: list[Tensor],
        logits: Tensor,
        context_len: Tensor,
    ) -> None:
        shape, constants = self.shape, self.constants
        k, v = k_caches[0].view(torch.int32), v_caches[0].view(torch.int32)
        window = NO_WINDOW if constants.window is None else constants.window
        stride = 0 if self.num_layers == 1 else k_caches[1].data_ptr() - k_caches[0].data_ptr()
        persistent_step[(NUM_PROGRAMS.value,)](
            *self._weights,
            self._vectors,
            (k, v),
            (slot, lengths, tokens, tokens.stride(0), block_table, block_table.stride(0)),
            (self._turns, self._flag),
            self._exchanges,
            (logits, context_len),
            (stride // 4, self.num_layers, window, constants.eps, constants.scale * LOG2_E),
            NUMBERS=shape.numbers,
            BLOCK_SIZE=k.shape[1],
            ACTIVATION=constants.activation,
            num_warps=8,
            launch_cooperative_grid=True,  # all programs run at once, or none
        )

    def check(self) -> None:
        """Raise if a step that has ended went wrong."""
        if self._gave_up[0]:
            raise EngineError(
                "a decode step gave up: its programs waited for each other for too long, as they "
                "would if other work took part of the device; the engine must be started again"
            )


def describe_both(
    weight: Tensor | StackedCodes, is_of_experts: bool = False
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Tell the copy engine of weights and their factors; what is no code has only the first.

    Tiles come whole, or in pieces if lines of experts are put together.
    """
    bits = 16 if isinstance(weight, Tensor) else weight.bits
    plain = weight if isinstance(weight, Tensor) else weight.words.view(torch.bfloat16)
    width = plain.shape[-1] * 16 // bits
    piece = piece_segments(width, bits) if is_of_experts else 8 * num_halves(width, bits)
    described = describe(plain, piece)
    if isinstance(weight, Tensor):
        return described, described
    factors = by_tile(weight.factors, bits, is_of_experts)
    size = 8 * segment_groups(bits) * piece
    return described, TensorDescriptor(factors, [factors.numel()], [1], [size], FACTORS.value)


def describe(weight: Tensor, piece: int) -> TensorDescriptor:
    """Tell the copy engine of lines [..., width], of which it copies 8 times `piece` segments."""
    width = weight.shape[-1]
    shape = [width // 64, weight.numel() // width, 64]
    return TensorDescriptor(weight, shape, [64, width, 1], [piece, 8, 64], RING.value)


def by_tile(factors: Tensor, bits: int, is_of_experts: bool = False) -> Tensor:
    """Lay factors [..., out, groups] out for 8 lines at a time, group by group.

    Lines are padded to whole tiles, or as those that are put together are.
    """
    groups = factors.shape[-1]
    width = groups * 128
    count = 8 * num_tiles(width, bits) * num_halves(width, bits)
    count = expert_segments(width, bits) if is_of_experts else count
    padded = count * segment_groups(bits)
    whole = torch.nn.functional.pad(factors, (0, padded - groups))
    return whole.view(-1, 8, padded).transpose(1, 2).contiguous().flatten()


def four_in_one(norms: Tensor, bits: int = 16) -> Tensor:
    """Pad norm weights [..., hidden] to whole chunks, and view four of them as one element."""
    padding = num_chunks(norms.shape[-1], bits) * 1024 - norms.shape[-1]
    padded: Tensor = torch.nn.functional.pad(norms, (0, padding))
    return padded.contiguous().view(torch.int64)


def empty_exchange(
    width: int, device: torch.device, bits: int = 16, parts: int = 1, room: int | None = None
) -> Tensor:
    """Buffers for values, of which each part has room for some more."""
    room = width if room is None else room
    size = num_chunks(parts * room, bits) * 1024
    memory = torch.zeros(NUM_BUFFERS.value, 2, size, dtype=torch.int16, device=device)
    memory[..., : parts * room].unflatten(-1, (parts, room))[..., : width // parts] = -1
    return memory


def empty_partials(shape: StepShape, device: torch.device) -> Tensor:
    """Buffers for the splits of attention: [buffers, columns / 8, splits, 8, 4 words]."""
    count = num_partials(shape.q, shape.num_kv_heads)
    return torch.full((NUM_BUFFERS.value, count, 4), -1, dtype=torch.int32, device=device)
