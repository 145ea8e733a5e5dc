"""Random models for the persistent step, with a cache, and what plain torch makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm.devices.cuda.persistent.packed_weights import factors_of
from nanovllm.devices.cuda.persistent.persistent_step import (
    PersistentStep,
    StackedCodes,
    StepConstants,
    StepTensors,
)
from nanovllm.devices.cuda.persistent.sizes import StepShape
from nanovllm.ops.interface import LayerCache, Routing
from nanovllm.ops.quantized_weight import QuantizedWeight, pack_words
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
    """A model with random weights, and a cache for `max_context` tokens of one sequence."""

    def __init__(self, shape: StepShape, variant: Variant, max_context: int) -> None:
        self.shape, self.variant = shape, variant
        self.generator = torch.Generator("cuda").manual_seed(0)
        self._given: dict[str, StackedCodes] = {}  # weights that the kernel gets as codes
        self.tensors = self._tensors(max_context)
        experts, scale = shape.experts, shape.head_dim**-0.5
        routing = Routing(experts.top_k, experts.is_normalized) if experts.num_experts else None
        self.constants = StepConstants(1e-6, scale, variant.window, routing)
        num_blocks = -(-max_context // variant.block_size) + 3
        sizes = variant.num_layers, 2, num_blocks, variant.block_size, shape.num_kv_heads
        caches = self._random(*sizes, shape.head_dim)
        self.k, self.v = [layer[0] for layer in caches], [layer[1] for layer in caches]
        self.table = torch.stack(
            [torch.randperm(num_blocks, generator=self.generator, device="cuda") for _ in range(3)]
        ).int()
        self.slot = torch.tensor([1], dtype=torch.int32, device="cuda")
        self.lengths, self.context_len = torch.zeros(2, 3, dtype=torch.int32, device="cuda")
        self.tokens = torch.zeros(3, max_context, dtype=torch.int32, device="cuda")
        self.logits = torch.empty(1, shape.vocab, dtype=torch.bfloat16, device="cuda")
        self.given = replace(self.tensors, **self._given)
        self.step = PersistentStep(shape, self.given, self.constants)

    def run(self) -> Tensor:
        tables = self.lengths, self.tokens, self.table
        caches = [LayerCache(k, v) for k, v in zip(self.k, self.v, strict=True)]
        self.step.run(self.slot, *tables, caches, self.logits, self.context_len)
        return self.logits

    def places(self, context: int) -> Tensor:
        positions, size = torch.arange(context, device="cuda"), self.variant.block_size
        return self.table[1, positions // size].long() * size + positions % size

    def errors(self, context: int, token: int) -> tuple[float, float, float]:
        """Run a context: the kernel's error, that of plain bfloat16, and that of the cache."""
        places = self.places(context)
        flat = [[cache.flatten(0, 1) for cache in caches] for caches in (self.k, self.v)]
        arguments = self.tensors, self.constants, token, places
        exact, plain = (
            reference_step(*arguments, *[[c.clone() for c in caches] for caches in flat], dtype)
            for dtype in (torch.float32, torch.bfloat16)
        )
        wide = [[c.float() for c in caches] for caches in flat]
        reference_step(*arguments, *wide, torch.float32)
        self.tokens[1, context - 1] = token
        self.lengths[1] = context
        self.logits.fill_(float("nan"))
        logits = self.run()[0]
        torch.cuda.synchronize()
        assert not self.step.gave_up()
        written = torch.stack([c[places[-1]] for caches in flat for c in caches])
        wanted = torch.stack([c[places[-1]] for caches in wide for c in caches])
        return difference(logits, exact), difference(plain, exact), difference(written, wanted)

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
        """The weights of all layers; of codes, what they mean, in float32."""
        values = self._random(self.variant.num_layers, num_out, num_in, std=num_in**-0.5)
        if self.shape.bits == 16:
            return values
        make = make_fp8 if self.shape.bits == 8 else make_int4
        weights = [make(each) for each in values]
        words = torch.stack([weight.qweight for weight in weights])
        factors = torch.stack([factors_of(weight) for weight in weights])
        self._given[name] = StackedCodes(self.shape.bits, words, factors)
        return torch.stack([weight.dequantize(torch.float32) for weight in weights])

    def _random(self, *shape: int, std: float = 1.0) -> Tensor:
        out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return out.normal_(0, std, generator=self.generator)


def make_fp8(values: Tensor) -> QuantizedWeight:
    quantized = quantize_blocks(values)
    return QuantizedWeight(8, pack_words(quantized.values), quantized.scales, None, values.shape[1])


def make_int4(values: Tensor, group: int = 128) -> QuantizedWeight:
    """With zero points other than the middle."""
    codes, scales = quantize_int4(values, group)
    zeros = (torch.arange(scales.numel(), device=values.device).view_as(scales) % 3 + 7).byte()
    return QuantizedWeight(4, pack_words(codes), scales.bfloat16(), zeros, values.shape[1])


def difference(value: Tensor, exact: Tensor) -> float:
    """The error's norm as a part of the value's; NaN if anything was not written."""
    exact = exact.double()
    return float((value.double() - exact).norm() / exact.norm())
