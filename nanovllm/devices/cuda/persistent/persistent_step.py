"""The host side of the persistent kernel: its weights, its buffers and the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.devices.cuda.persistent.exchange import NUM_BUFFERS, NUM_CTAS
from nanovllm.devices.cuda.persistent.kernel import persistent_step
from nanovllm.devices.cuda.persistent.sizes import (
    MAX_ROWS,
    PARTIAL_WORDS,
    StepShape,
    expert_segments,
    gated_capacity,
    gated_parts,
    num_chunks,
    num_halves,
    num_output_groups,
    num_splits,
    num_stored,
    num_tiles,
    piece_segments,
    segment_groups,
)
from nanovllm.devices.cuda.persistent.stream import RING
from nanovllm.devices.cuda.persistent.tile_mma import SCALES
from nanovllm.ops.interface import LayerCache, Routing

LOG2_E = 1.4426950408889634
MAX_CACHE_BYTES = 4 << 31  # limit for a layer's keys: the kernel has 32-bit word offsets


@dataclass(frozen=True, slots=True)
class StackedQuantized:
    """Quantized weights of all layers; ops/quantized_weight.py describes their format."""

    bits: int  # 8 or 4
    words: Tensor  # int32 [layers, out, in * bits / 32]
    scales: Tensor  # int32 [layers, out, in / 128]: scales, packed by `pack_scales`

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class StepTensors:
    """All weights of a model; weights of the same kind are stacked by layer."""

    embedding: Tensor  # [vocab, hidden]
    norms: Tensor  # [layers, 2, hidden]
    qkv: Tensor | StackedQuantized  # [layers, q + k + v, hidden]
    qkv_bias: Tensor | None  # [layers, q + k + v]
    qk_norms: Tensor | None  # [layers, 2, head_dim]
    o: Tensor | StackedQuantized  # [layers, hidden, q]
    gate_up: Tensor | StackedQuantized  # [layers, 2 * mlp, hidden], or [layers, experts, ...]
    down: Tensor | StackedQuantized  # [layers, hidden, mlp], or [layers, experts, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]
    rope: Tensor  # [positions, 2, head_dim / 2], float32
    router: Tensor | None = None  # [layers, experts, hidden]


@dataclass(frozen=True, slots=True)
class StepConstants:
    eps: float
    scale: float  # softmax scale
    window: int | None
    routing: Routing | None = None


def device_problem(device: torch.device) -> str | None:
    """Return the reason why this device cannot run the kernel, or None."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0):
        return f"compute capability {properties.major}.{properties.minor}, not 9.0"
    if properties.multi_processor_count < NUM_CTAS.value:
        return f"{properties.multi_processor_count} SMs are too few for the CTAs of the kernel"
    return None


class PersistentStep:
    """Runs decode steps as one kernel each, for the batch sizes in `rows`."""

    def __init__(self, shape: StepShape, tensors: StepTensors, constants: StepConstants) -> None:
        self.shape, self.constants, self.rows = shape, constants, shape.rows
        self.num_layers = len(tensors.norms)
        device = tensors.head.device
        weights = tensors.qkv, tensors.o, tensors.gate_up
        router = tensors.head if tensors.router is None else tensors.router
        self._weights = (
            *[part for weight in weights for part in make_descriptors(weight)],
            *make_descriptors(tensors.down, is_of_experts=shape.experts.num_experts > 0),
            make_descriptors(router)[0],
            make_descriptors(tensors.head)[0],
        )
        norms, bias = tensors.qk_norms, tensors.qkv_bias
        self._vectors = (
            tensors.embedding,
            pack_norms(tensors.norms, shape.bits),
            pack_norms(tensors.final_norm, shape.bits),
            None if norms is None else norms.contiguous().view(torch.int32),
            None if bias is None else bias.contiguous(),
            tensors.rope,
        )
        # Keyed by batch size: the kernel for each size has its own buffers and buffer indices.
        self._exchanges = {rows: allocate_exchanges(shape, rows, device) for rows in self.rows}
        self._buffer_indices = {
            rows: torch.zeros(2, dtype=torch.int32, device=device) for rows in self.rows
        }
        # The flag is pinned: the kernel sets it on a timeout, and the host reads it without a sync.
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._gave_up = self._flag.numpy()

    def max_tokens(self, rows: int) -> int:
        """Return the total context length above which running layer by layer is faster.

        For longer contexts, the kernel has too few keys in flight: see benchmarks/RESULTS.md.
        """
        return (6144 if rows == MAX_ROWS else 8192) * (2 if self.shape.hidden >= 4096 else 1)

    def suits(self, caches: list[LayerCache]) -> bool:
        """Return whether the kernel's 32-bit offsets can address the caches."""
        return caches[0].k.nbytes < MAX_CACHE_BYTES

    def run(
        self,
        slots: Tensor,
        lengths: Tensor,
        tokens: Tensor,
        block_table: Tensor,
        caches: list[LayerCache],
        logits: Tensor,
        context_lens: Tensor,
        verifies: bool = False,
    ) -> None:
        """Run a decode step for the sequences in `slots` [rows].

        `lengths`, `tokens` and `block_table` are indexed by slot, and are int32, like `slots`. Rows
        whose slot has length 0 are padding. By default, each of the other rows has its own slot.
        With `verifies`, n adjacent rows with the same slot are the last n tokens of its sequence.
        Either way, a row's logits depend only on its own sequence, and are bitwise the same in any
        batch. The kernel writes `logits` [rows, vocab], in float32, and `context_lens` [rows].
        """
        assert logits.dtype == torch.float32
        rows = len(slots)
        shape, constants = self.shape, self.constants
        # The stride between layers is uniform, and the same for keys and values. An exponent
        # belongs to a row, so the strides of FP8 rows and of exponents differ by the head's size.
        first, second = caches[0].parts, caches[min(1, len(caches) - 1)].parts
        strides = [b.data_ptr() - a.data_ptr() for a, b in zip(first, second, strict=True)]
        assert all(stride * shape.head_dim == strides[0] for stride in strides[2:])
        k, v = (rows.view(torch.int32) for rows in first[:2])
        persistent_step[(NUM_CTAS.value,)](
            *self._weights,
            self._vectors,
            (k, v, *first[2:]),
            (slots, lengths, tokens, tokens.stride(0), block_table, block_table.stride(0)),
            (self._buffer_indices[rows], self._flag),
            self._exchanges[rows],
            (logits, context_lens),
            (
                strides[0] // 4,
                self.num_layers,
                constants.window,
                constants.eps,
                constants.scale * LOG2_E,
            ),
            NUMBERS=shape.numbers,
            BLOCK_SIZE=k.shape[1],
            ROWS=rows,
            NEW=rows if verifies else 1,
            num_warps=8,
            launch_cooperative_grid=True,  # all CTAs are co-resident, or the launch fails
        )

    def gave_up(self) -> bool:
        """Return whether a finished step timed out, and reset the flag.

        CTAs poll for each other's values. A poll times out if a CTA makes no progress, for
        example while another process uses the GPU. After a timeout, no more steps may run.
        """
        gave_up = bool(self._gave_up[0])
        self._gave_up[0] = 0
        return gave_up


def make_descriptors(
    weight: Tensor | StackedQuantized, is_of_experts: bool = False
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Make the TMA descriptors of a weight and of its scales.

    If it has no scales, return the same descriptor twice. A TMA copy loads a whole tile or, for the
    experts' `down`, a piece of a tile.
    """
    bits = 16 if isinstance(weight, Tensor) else weight.bits
    plain = weight if isinstance(weight, Tensor) else weight.words.view(torch.bfloat16)
    width = plain.shape[-1] * 16 // bits
    piece = piece_segments(width, bits) if is_of_experts else 8 * num_halves(width, bits)
    descriptor = make_descriptor(plain, piece)
    if isinstance(weight, Tensor):
        return descriptor, descriptor
    scales = arrange_scales(weight.scales, bits, is_of_experts)
    size = 8 * segment_groups(bits) * piece
    return descriptor, TensorDescriptor(scales, [scales.numel()], [1], [size], SCALES.value)


def make_descriptor(weight: Tensor, piece: int) -> TensorDescriptor:
    """Make a TMA descriptor of a weight [..., width]; a copy loads `piece` segments of 8 rows."""
    width = weight.shape[-1]
    shape = [width // 64, weight.numel() // width, 64]
    return TensorDescriptor(weight, shape, [64, width, 1], [piece, 8, 64], RING.value)


def arrange_scales(scales: Tensor, bits: int, is_of_experts: bool = False) -> Tensor:
    """Transpose scales [..., out, groups] to [..., out / 8, groups, 8], and flatten them.

    The groups are padded to whole tiles or, for the `down` of experts, to `expert_segments`.
    """
    groups = scales.shape[-1]
    width = groups * 128
    count = 8 * num_tiles(width, bits) * num_halves(width, bits)
    count = expert_segments(width, bits) if is_of_experts else count
    padded = count * segment_groups(bits)
    whole = torch.nn.functional.pad(scales, (0, padded - groups))
    return whole.view(-1, 8, padded).transpose(1, 2).contiguous().flatten()


def pack_norms(norms: Tensor, bits: int = 16) -> Tensor:
    """Pad norm weights [..., hidden] to whole chunks, and view four bfloat16 as one int64."""
    padding = num_chunks(norms.shape[-1], bits) * 1024 - norms.shape[-1]
    padded: Tensor = torch.nn.functional.pad(norms, (0, padding))
    return padded.contiguous().view(torch.int64)


def allocate_exchanges(shape: StepShape, rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """Allocate the partials and the buffers of all exchanges, in the order of `make_exchanges`."""
    widths = num_stored(shape.hidden), shape.q, num_stored(shape.hidden)
    x, attended, y = (allocate_exchange(width, rows, device, shape.bits) for width in widths)
    parts, capacity = gated_parts(shape), gated_capacity(shape)
    gated = allocate_exchange(shape.mlp, rows, device, shape.bits, parts, capacity)
    qkv = allocate_exchange(shape.qkv, rows, device)
    router_logits = allocate_exchange(shape.experts.num_experts, rows, device)
    count = rows * num_output_groups(shape.q) * num_splits(shape.num_kv_heads)
    sizes = NUM_BUFFERS.value, count, PARTIAL_WORDS.value
    partials = torch.full(sizes, -1, dtype=torch.int32, device=device)
    return x, qkv, partials, attended, y, gated, router_logits


def allocate_exchange(
    width: int,
    rows: int,
    device: torch.device,
    bits: int = 16,
    parts: int = 1,
    capacity: int | None = None,
) -> Tensor:
    """Allocate the buffers of one exchange; values are initially EMPTY (-1), and padding is 0."""
    capacity = width if capacity is None else capacity
    size = num_chunks(parts * capacity, bits) * 1024
    memory = torch.zeros(NUM_BUFFERS.value, 2, rows, size, dtype=torch.int16, device=device)
    memory[..., : parts * capacity].unflatten(-1, (parts, capacity))[..., : width // parts] = -1
    return memory
