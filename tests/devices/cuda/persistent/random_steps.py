"""Random models and KV caches for the persistent step, and a comparison with plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm.devices.cuda.persistent.packed_weights import pack_scales
from nanovllm.devices.cuda.persistent.persistent_step import (
    PersistentStep,
    StackedQuantized,
    StepConstants,
    StepTensors,
)
from nanovllm.devices.cuda.persistent.sizes import StepShape
from nanovllm.ops import fp8
from nanovllm.ops.interface import LayerCache, Routing
from nanovllm.ops.quantized_weight import QuantizedWeight, pack_words
from nanovllm.worker.kv_cache import Kind, KVCacheSpec, LayerGroups, Place
from tests.devices.cuda.persistent.reference import reference_step
from tests.ops.quantized_products import quantize_blocks, quantize_int4


@dataclass(frozen=True, slots=True)
class Variant:
    num_layers: int = 2
    has_qk_norm: bool = True
    has_bias: bool = False
    window: int | None = None
    block_size: int = 64


class RandomStep:
    """A model with random weights, and a cache for `max_context` tokens of some sequences.

    The cache is FP8 if the shape says so. Slot 0 is padding; every other slot has a sequence.
    """

    def __init__(
        self, shape: StepShape, variant: Variant, max_context: int, num_sequences: int = 1
    ) -> None:
        self.shape, self.variant = shape, variant
        self.generator = torch.Generator("cuda").manual_seed(0)
        self._given: dict[str, StackedQuantized] = {}  # quantized weights as the kernel gets them
        self.tensors = self._tensors(max_context)
        experts, scale = shape.experts, shape.head_dim**-0.5
        routing = Routing(experts.top_k, experts.is_normalized) if experts.num_experts else None
        self.constants = StepConstants(1e-6, scale, variant.window, routing)
        num_slots = num_sequences + 1
        each = -(-max_context // variant.block_size)
        self.caches = self._caches(num_slots * each)
        order = torch.randperm(num_slots * each, generator=self.generator, device="cuda")
        self.table = order.view(num_slots, each).int()
        self.lengths = torch.zeros(num_slots, dtype=torch.int32, device="cuda")
        self.tokens = torch.randint(
            shape.vocab, (num_slots, max_context), generator=self.generator, device="cuda"
        ).int()
        self.logits = torch.empty(8, shape.vocab, dtype=torch.float32, device="cuda")
        self.context_lens = torch.zeros(8, dtype=torch.int32, device="cuda")
        self.given = replace(self.tensors, **self._given)
        self.step = PersistentStep(shape, self.given, self.constants)
        self.use([1])

    def use(self, slots: list[int], verifies: bool = False) -> None:
        """Make `run` use these slots."""
        self.slots = torch.tensor(slots, dtype=torch.int32, device="cuda")
        self.verifies = verifies

    def run(self) -> Tensor:
        """Run a step; return its logits, which the next run overwrites."""
        tables, rows = (self.lengths, self.tokens, self.table), slice(len(self.slots))
        outputs = self.logits[rows], self.context_lens[rows]
        self.step.run(self.slots, *tables, self.caches, *outputs, self.verifies)
        return self.logits[rows]

    def run_rows(self, slots: list[int], lengths: dict[int, int], verifies: bool = False) -> Tensor:
        """Run slots with the given lengths of their sequences; return a copy of the logits."""
        self.use(slots, verifies)
        for slot, length in lengths.items():
            self.lengths[slot] = length
        self.logits.fill_(float("nan"))
        logits = self.run().clone()
        torch.cuda.synchronize()
        assert not self.step.gave_up()
        return logits

    @property
    def cache_parts(self) -> list[Tensor]:
        """All tensors of the cache; FP8 ones as bytes."""
        return [part for cache in self.caches for part in cache.parts]

    def overwrite_cache(self, block: Tensor, first: int) -> None:
        """Overwrite a block of the cache from a token on, in all layers."""
        for cache in self.caches:
            for rows in cache.parts[:2]:
                rows[block, first:] = 1
            for exponents in cache.parts[2:]:
                exponents[block, :, first:] = 1

    def values(self) -> list[list[Tensor]]:
        """Return copies of the keys and of the values of all layers, [tokens, KV heads, dim]."""
        found: list[list[Tensor]] = [[], []]
        for cache in self.caches:
            exponents = cache.k_exponents, cache.v_exponents
            for rows, each, layers in zip((cache.k, cache.v), exponents, found, strict=True):
                if each is None:
                    layers.append(rows.flatten(0, 1).clone())
                else:
                    quantized = fp8.Fp8Rows(rows, each.transpose(1, 2))
                    layers.append(fp8.dequantize(quantized, torch.bfloat16).flatten(0, 1))
        return found

    def slot_mapping(self, slot: int, context: int) -> Tensor:
        positions, size = torch.arange(context, device="cuda"), self.variant.block_size
        return self.table[slot, positions // size].long() * size + positions % size

    def errors(
        self, slots: list[int], lengths: dict[int, int], verifies: bool = False
    ) -> tuple[float, float, float]:
        """Run rows; return the errors of the kernel, of torch in bfloat16, and of the cache."""
        rows = [
            (row, slot, lengths[slot] - (slots[row + 1 :].count(slot) if verifies else 0))
            for row, slot in enumerate(slots)
            if slot
        ]
        exact, wide = self._reference(rows, torch.float32)
        plain, _ = self._reference(rows, torch.bfloat16)
        logits = self.run_rows(slots, lengths, verifies)
        for row, _, context in rows:
            assert self.context_lens[row] == context
        ours = [difference(logits[row], x) for (row, *_), x in zip(rows, exact, strict=True)]
        theirs = [difference(x, y) for x, y in zip(plain, exact, strict=True)]
        last = torch.stack([self.slot_mapping(slot, context)[-1] for _, slot, context in rows])
        written, wanted = (
            torch.stack([cache[last].float() for caches in both for cache in caches])
            for both in (self.values(), wide)
        )
        return max(ours), max(theirs), difference(written, wanted)

    def _reference(
        self, rows: list[tuple[int, int, int]], dtype: torch.dtype
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Run rows one after another; return their logits, and float32 caches after them."""
        caches, is_fp8 = self.values(), self.shape.cache_bits == 8
        wide = [[cache.float() for cache in each] for each in caches]
        logits = []
        for _, slot, context in rows:
            slot_mapping, token = (
                self.slot_mapping(slot, context),
                int(self.tokens[slot, context - 1]),
            )
            arguments = self.tensors, self.constants, token, slot_mapping
            logits.append(reference_step(*arguments, *caches, dtype, is_fp8))
            if dtype == torch.float32:
                reference_step(*arguments, *wide, dtype, is_fp8)
        return logits, wide

    def _caches(self, num_blocks: int) -> list[LayerCache]:
        shape, variant = self.shape, self.variant
        dtype = torch.bfloat16 if shape.cache_bits == 16 else fp8.FP8
        heads = shape.num_kv_heads, shape.head_dim
        places = tuple(Place(0, row) for row in range(variant.num_layers))
        groups = LayerGroups((Kind(None),), places, variant.num_layers)
        spec = KVCacheSpec(groups, variant.block_size, *heads, dtype)
        buffer = torch.zeros(num_blocks * spec.block_bytes, dtype=torch.uint8, device="cuda")
        caches = spec.views(buffer, num_blocks)
        for cache in caches:
            exponents = cache.k_exponents, cache.v_exponents
            for rows, each in zip((cache.k, cache.v), exponents, strict=True):
                values = self._random(*rows.shape)
                if each is not None:
                    quantized = fp8.quantize(values * self._random(*rows.shape[:-1], 1).exp2())
                    each.copy_(quantized.exponents.transpose(1, 2))
                    values = quantized.values
                rows.copy_(values)
        return caches

    def _tensors(self, max_context: int) -> StepTensors:
        shape, variant, random = self.shape, self.variant, self._random
        layers, hidden, dim = variant.num_layers, shape.hidden, shape.head_dim
        frequencies = 1e4 ** (-torch.arange(0, dim, 2, device="cuda") / dim)
        angles = torch.arange(max_context, device="cuda")[:, None] * frequencies
        return StepTensors(
            embedding=random(shape.vocab, hidden),
            norms=1 + random(layers, 2, hidden, std=0.1),
            qkv=self._weight("qkv", shape.qkv, hidden),
            qkv_bias=random(layers, shape.qkv) if variant.has_bias else None,
            qk_norms=1 + random(layers, 2, dim, std=0.1) if variant.has_qk_norm else None,
            o=self._weight("o", hidden, shape.q),
            **self._mlp(),
            final_norm=1 + random(hidden, std=0.1),
            head=random(shape.vocab, hidden, std=hidden**-0.5),
            rope=torch.stack((angles.cos(), angles.sin()), dim=1),
        )

    def _mlp(self) -> dict[str, Tensor]:
        hidden, experts, layers = self.shape.hidden, self.shape.experts, self.variant.num_layers
        if not experts.num_experts:
            return {
                "gate_up": self._weight("gate_up", 2 * self.shape.mlp, hidden),
                "down": self._weight("down", hidden, self.shape.mlp),
            }
        count, size = experts.num_experts, experts.size
        gate_up = self._weight("gate_up", 2 * count * size, hidden)
        down = self._weight("down", count * hidden, size)
        return {
            "gate_up": gate_up.view(layers, count, 2 * size, hidden),
            "down": down.view(layers, count, hidden, size),
            "router": self._random(layers, count, hidden, std=hidden**-0.5),
        }

    def _weight(self, name: str, num_out: int, num_in: int) -> Tensor:
        """Random weights of all layers; quantized ones are returned dequantized, in float32."""
        values = self._random(self.variant.num_layers, num_out, num_in, std=num_in**-0.5)
        if self.shape.bits == 16:
            return values
        make = make_fp8 if self.shape.bits == 8 else make_int4
        weights = [make(each) for each in values]
        words = torch.stack([weight.qweight for weight in weights])
        scales = torch.stack([pack_scales(weight) for weight in weights])
        self._given[name] = StackedQuantized(self.shape.bits, words, scales)
        return torch.stack([weight.dequantize(torch.float32) for weight in weights])

    def _random(self, *shape: int, std: float = 1.0) -> Tensor:
        out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return out.normal_(0, std, generator=self.generator)


def make_fp8(values: Tensor) -> QuantizedWeight:
    quantized = quantize_blocks(values)
    return QuantizedWeight(8, pack_words(quantized.values), quantized.scales, None, values.shape[1])


def make_int4(values: Tensor, group: int = 128) -> QuantizedWeight:
    """Quantize to 4 bits, with various zero points."""
    quantized, scales = quantize_int4(values, group)
    zeros = (torch.arange(scales.numel(), device=values.device).view_as(scales) % 3 + 7).byte()
    return QuantizedWeight(4, pack_words(quantized), scales.bfloat16(), zeros, values.shape[1])


def difference(value: Tensor, exact: Tensor) -> float:
    """Norm of the error relative to that of `exact`; NaN if a value was not written."""
    exact = exact.double()
    return float((value.double() - exact).norm() / exact.norm())
