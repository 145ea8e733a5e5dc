"""FP8 weights: one scale per block, per output channel, or per tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.quantized.checks import (
    FLOATS,
    check_matrix,
    check_part,
    choose,
    read_names,
    unsupported,
)
from nanovllm.checkpoint.quantized.weight_format import Parts, Quantization, QuantLayout

if TYPE_CHECKING:
    from nanovllm.checkpoint.stored_tensors import StoredTensor

E4M3 = "float8_e4m3fn"


def read_fp8(stored: Mapping[str, Any]) -> Quantization:
    choose(stored, "activation_scheme", "dynamic", "dynamic")
    choose(stored, "fmt", "e4m3", "e4m3", E4M3)
    ignored = stored.get("ignored_layers") or stored.get("modules_to_not_convert")
    return Quantization("fp8", read_block(stored.get("weight_block_size")), read_names(ignored))


def read_block(block: list[int] | None) -> Fp8:
    if block is None:
        return Fp8()
    rows, columns = block
    if not all(type(size) is int and 0 < size < 2**31 for size in block):
        raise unsupported(f"blocks of {block!r:.80}", "two positive integers")
    return Fp8((rows, columns))


@dataclass(frozen=True, slots=True)
class Fp8:
    """The settings of FP8 weights."""

    # (outputs, inputs) of a block that shares a scale; None: one scale per output, or per tensor.
    block: tuple[int, int] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return "weight", "weight_scale", *(() if self.block is None else ("weight_scale_inv",))

    @property
    def layout(self) -> QuantLayout:
        return QuantLayout("fp8", -1 if self.block is None else self.block[1])

    def open(self, parts: Parts) -> list[StoredTensor]:
        from nanovllm.checkpoint.quantized import weight
        from nanovllm.ops.quantized_weight import QuantizedPiece

        values, scales = parts["weight"], parts.get("weight_scale_inv") or parts["weight_scale"]
        shape = check_matrix(values, E4M3)
        rows, columns = self.block or (1, max(shape[1], 1))
        num_blocks = -(-shape[0] // rows), -(-shape[1] // columns)
        is_single = self.block is None and scales.shape in ((), (1,))
        is_flat = is_single or (self.block is None and scales.shape == shape[:1])
        check_part(scales, scales.shape if is_flat else num_blocks, *FLOATS)

        def read(outputs: slice, inputs: slice) -> QuantizedPiece:
            part = weight.read_part(values, outputs, inputs)
            groups, group_of = weight.in_groups(inputs, columns)
            blocks = slice(outputs.start // rows, -(-outputs.stop // rows)), groups
            index = () if is_single else blocks[: len(scales.shape)]
            by_block = weight.read_part(scales, *index).float()
            by_block = by_block.view(-1, 1) if is_flat else by_block
            by_output = by_block.repeat_interleave(rows, 0)[: len(part)].expand(len(part), -1)
            return QuantizedPiece(part, by_output, group_of=group_of)

        alignment = self.block or (1, 1)
        return [weight.quantized_tensor(values, shape, alignment, self.layout, read)]
