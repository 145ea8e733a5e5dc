"""The decoder-only model that all families share; each family supplies its own layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext, ForwardBatch, Layer
from nanovllm.layers.gated_delta_net import GatedDeltaNet
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Embedding, LMHead
from nanovllm.layers.rotary_embedding import rope_table
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.ops.interface import ResidualStream

BuildLayer = Callable[[ModelConfig, int, BuildContext], nn.Module]


class DecoderLayer(Layer):
    """Attention and MLP, each after a norm; their outputs are added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        self_attn: SelfAttention | GatedDeltaNet,
        mlp: nn.Module,
        build: BuildContext,
        mlp_name: str = "mlp",  # name of the MLP in checkpoints
        attention_name: str = "self_attn",
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config, build)
        # Register modules under their checkpoint names first: named_modules() reports a module
        # with two names only under the first.
        self.add_module(attention_name, self_attn)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config, build)
        self.add_module(mlp_name, mlp)
        self.mlp = mlp

    def forward(self, hidden: ResidualStream, rope: Tensor, batch: ForwardBatch) -> ResidualStream:
        output, residual = self.self_attn(hidden, self.input_layernorm, rope, batch)
        hidden = self.self_attn.o_proj.add_to(residual, output)
        return self.mlp(hidden, self.post_attention_layernorm)


class DecoderBody(Layer):
    """Embedding, layers and final norm; checkpoints name this module `model`."""

    def __init__(
        self, config: ModelConfig, max_model_len: int, build: BuildContext, build_layer: BuildLayer
    ) -> None:
        super().__init__()
        # The scale is rounded to the model's dtype, as in training.
        scale = torch.tensor(config.embedding_scale).to(build.dtype).item()
        scale /= config.embedding_divisor
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scale, build)
        self.layers = nn.ModuleList(
            build_layer(config, i, build) for i in range(len(config.layers))
        )
        self.norm = RMSNorm(config, build)
        tables = {
            rope: rope_table(config.head_dim, max_model_len, rope, build.device)
            for rope in {layer.rope for layer in config.layers}
        }
        self.ropes = [tables[layer.rope] for layer in config.layers]

    def forward(self, batch: ForwardBatch) -> ResidualStream:
        """Return the hidden states of the sampled tokens, before the final norm."""
        x, ropes = self.embed_tokens(batch.input_ids), self.ropes
        if batch.embedded is not None:
            x[batch.embedded.index] = batch.embedded.values
        if batch.rope is not None:
            ropes = [batch.rope] * len(ropes)
        hidden = ResidualStream(x)
        for layer, rope in zip(self.layers, ropes, strict=True):
            hidden = layer(hidden, rope, batch)
        return hidden


class DecoderModel(Layer):
    """A causal language model: batch in, logits [sampled tokens, vocab_size] out."""

    def __init__(
        self, config: ModelConfig, max_model_len: int, build: BuildContext, build_layer: BuildLayer
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, build.dtype
        self.model = DecoderBody(config, max_model_len, build, build_layer)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(
            config.hidden_size,
            config.vocab_size,
            build,
            tied,
            config.logits_scale,
            config.logits_softcap,
        )
        self.dense = nn.Sequential()  # linear layers of an embedding model, for pooled vectors

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.logits(self.model(batch))

    def logits(self, hidden: ResidualStream) -> Tensor:
        return self.lm_head.logits(hidden, self.model.norm)

    def states(self, hidden: ResidualStream) -> Tensor:
        """Return the hidden states after the final norm."""
        norm = self.model.norm
        return norm.ops.norm(hidden, norm.weights)[0]
