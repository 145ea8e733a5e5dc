"""Transformers' own model code, with our paged attention in every layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.attention.backend import AttentionSpec
from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext, ForwardBatch, Layer
from nanovllm.ops.interface import LayerCache, PackedLinear, ResidualStream

# Every layer calls this with its attention module, q, k and v, a mask, and further options.
Attend = Callable[[Any, tuple[Tensor, Tensor, Tensor], Any, dict[str, Any]], Tensor]


class TransformersModel(Layer):
    """A causal language model: batch in, logits [sampled tokens, vocab_size] out."""

    def __init__(self, config: ModelConfig, causal_lm: Any, build: BuildContext) -> None:
        super().__init__()
        self.config, self.dtype = config, build.dtype
        self.model = Body(config, causal_lm, build)
        self.lm_head = Head(config, causal_lm, build)
        self.dense = nn.Sequential()  # linear layers of an embedding model, for pooled vectors

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.logits(self.model(batch))

    def logits(self, hidden: ResidualStream) -> Tensor:
        return self.lm_head(hidden.residual)

    def states(self, hidden: ResidualStream) -> Tensor:
        """Return the hidden states after the final norm."""
        return hidden.residual

    @property
    def num_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())

    def pack_linears(self, allow_copy: bool) -> None:
        """Run the projections in our kernels, except in float32, where torch is as fast."""
        if self.dtype == torch.float32:
            return
        ops, causal_lm = self.lm_head.ops, self.model.causal_lm
        lm_head = causal_lm.get_output_embeddings()
        for module in causal_lm.modules():
            if type(module) is not nn.Linear or module.weight.dtype != self.dtype:
                continue
            weight = module.weight.data
            bias = None if module.bias is None else module.bias.data
            if module is lm_head and bias is None:
                packed = ops.pack_lm_head(weight, allow_copy)
            else:
                packed = ops.pack_linear(weight, bias, None, allow_copy)
            module.forward = partial(project, packed)  # type: ignore[method-assign]


def project(packed: PackedLinear, x: Tensor) -> Tensor:
    """Project x [1, tokens, in] with a kernel that takes [tokens, in]."""
    return packed(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class Body(Layer):
    """Everything but the LM head."""

    def __init__(self, config: ModelConfig, causal_lm: Any, build: BuildContext) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.attention = PagedAttention(config, build)
        set_attention(causal_lm, self.attention)

    def forward(self, batch: ForwardBatch) -> ResidualStream:
        """Return the hidden states of the sampled tokens, after the final norm."""
        self.attention.batch = batch
        hidden = run_body(self.causal_lm, batch.input_ids, batch.positions)
        return ResidualStream(hidden if batch.sampled is None else hidden[batch.sampled.index])


def run_body(causal_lm: Any, input_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states [tokens, hidden] after the final norm; all tokens form one row."""
    inputs = {"input_ids": input_ids[None], "position_ids": positions[None]}
    hidden: Tensor = causal_lm.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden[0]


class Head(Layer):
    """The LM head, with any scale and softcap that the model applies to its logits."""

    def __init__(self, config: ModelConfig, causal_lm: Any, build: BuildContext) -> None:
        super().__init__()
        self.vocab_size, self.ops, self.group = config.vocab_size, build.ops, build.group
        self.causal_lm = without_body(causal_lm)

    def forward(self, hidden: Tensor) -> Tensor:
        return run_head(self.causal_lm, hidden)


def run_head(causal_lm: Any, hidden: Tensor) -> Tensor:
    logits: Tensor = causal_lm(inputs_embeds=hidden[None], use_cache=False).logits
    return logits[0].contiguous()  # decode graphs need contiguous logits


def without_body(causal_lm: Any) -> Any:
    """Return the same ...ForCausalLM, but with a body that returns the hidden states it is given.

    So the model's own code computes the logits from them, including any scale or softcap.
    """
    head = copy.copy(causal_lm)
    head._modules = {**causal_lm._modules, causal_lm.base_model_prefix: GivenStates()}
    return head


class GivenStates(nn.Module):
    """A replacement for a model's body that returns the hidden states it is given."""

    @property
    def decoder(self) -> GivenStates:  # OPT's head calls `model.decoder`
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **_: Any) -> BodyOutput:
        return BodyOutput(inputs_embeds)


@dataclass(frozen=True)
class BodyOutput:
    """The output of a body, whose other fields (cache, router logits, ...) are None."""

    last_hidden_state: Tensor

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class PagedAttention:
    """Attention over the paged KV cache, instead of transformers' own.

    Layers with fewer or smaller heads than their cache are zero-padded.
    """

    batch: ForwardBatch  # the current step

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self.attention, self.ops, self.dtype = build.attention, build.ops, build.dtype
        # Use `rope_write`, which supports every kind of cache, with a rotation by zero:
        # transformers has already rotated q and k. Keyed by head_dim.
        half = torch.ones(config.head_dim // 2, device=build.device)
        table = torch.stack((half, 0 * half))[None]
        dims = {config.head_dim, *(each.kv_shape[1] for each in config.layers if each.kv_shape)}
        self.no_rotation = {dim: table[..., : dim // 2].contiguous() for dim in dims}

    def __call__(
        self,
        module: Any,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        batch, (q, k, v) = self.batch, qkv
        num_heads, v_dim = q.shape[1], v.shape[3]
        cache = batch.caches[module.layer_idx]
        assert isinstance(cache, LayerCache)
        num_kv_heads, head_dim = cache.k.shape[2:]
        num_q = num_heads // k.shape[1] * num_kv_heads
        counts = num_q, num_kv_heads, num_kv_heads
        rows = torch.cat([self._pad(*each, head_dim) for each in zip(qkv, counts, strict=True)], 1)
        positions = torch.zeros_like(batch.positions)
        slot_mapping = batch.slot_mapping[cache.group]
        self.ops.rope_write(rows, None, self.no_rotation[head_dim], positions, cache, slot_mapping)
        spec = attention_spec(q, options)
        if spec.sinks is not None and num_q > num_heads:
            spec = replace(spec, sinks=F.pad(spec.sinks, (0, num_q - num_heads)))
        output = self.attention.attend(rows[:, :num_q], cache, batch.attention, spec)
        return output[None, :, :num_heads, :v_dim].contiguous()

    def _pad(self, x: Tensor, num_heads: int, head_dim: int) -> Tensor:
        """Return [tokens, num_heads, head_dim] for x [1, heads, tokens, dim]."""
        missing = head_dim - x.shape[3], num_heads - x.shape[1]
        x = x[0].transpose(0, 1).to(self.dtype)  # some models rotate in float32
        return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x


def attention_spec(q: Tensor, options: dict[str, Any]) -> AttentionSpec:
    scale = options.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    window, softcap, sinks = (options.get(key) for key in ("sliding_window", "softcap", "s_aux"))
    return AttentionSpec(scale, window, softcap, sinks)


def set_attention(causal_lm: Any, attend: Attend) -> None:
    """Make `attention_forward`, which all models share, call `attend` for this model."""
    for module in causal_lm.modules():
        module.nanovllm_attend = attend
        # Some models read token ids on the host, to warn about padding. There is none here.
        module.warn_if_padding_and_no_attention_mask = _ignore


def _ignore(*args: Any) -> None:
    pass


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Call the model's `attend`, with q, k and v [1, heads, tokens, dim] from transformers."""
    return module.nanovllm_attend(module, (query, key, value), attention_mask, options), None
