"""Run any decoder of transformers: its own model code, with our paged attention in every layer.

A forward pass on the meta device, without weights, records how each layer calls its attention. A
model that needs more than these calls express is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.attention.backend import AttentionSpec
from nanovllm.checkpoint.find import Checkpoint, stores_quantized
from nanovllm.config import DTYPES, LayerAttention, ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.build import BuildContext, ForwardBatch, Layer
from nanovllm.models.config_json import INT32_MAX, MAX_LAYERS, read_architecture
from nanovllm.ops.interface import PackedLinear, ResidualStream

ATTENTION = "nanovllm"  # the name of our attention in transformers' AttentionInterface
LAYER_TYPES = {"full_attention", "sliding_attention"}
MAX_NAMED = 5  # maximum number of tensors listed in an error
# RoPE types whose frequencies depend on the longest sequence of the batch.
BATCH_ROPES = {"dynamic", "longrope"}
# Fields of ModelConfig that describe what transformers' code does itself.
UNUSED: dict[str, Any] = {
    **{"rms_norm_eps": 0.0, "activation": "silu", "attention_scale": 1.0},
    **{"qkv_bias": False, "output_bias": False, "mlp_bias": False},
}


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Return the sizes of a model that transformers implements; refuse those we cannot run."""
    calls: list[AttentionCall] = []
    causal_lm_class, hf_config = find_class(config)
    try:
        # The experts' grouped GEMM needs bfloat16.
        causal_lm = create_on_meta(causal_lm_class, hf_config, torch.bfloat16)
        set_attention(causal_lm, partial(record_call, calls))
        tokens = torch.zeros(2, dtype=torch.int64, device="meta")
        hidden = run_body(causal_lm, tokens, tokens)
        vocab_size = run_head(without_body(causal_lm), hidden).shape[-1]
    except Exception as error:  # its code may need values, or not know our attention
        raise refusal(config, f"its code does not run without data ({error!r:.200})") from error
    if problem := find_problem(causal_lm, calls):
        raise refusal(config, problem)
    head_dim, hidden_size = max(call.head_dim for call in calls), hidden.shape[-1]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    found = partial(getattr, hf_config)
    return ModelConfig(
        architecture=read_architecture(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,  # an estimate: some families have several sizes
        num_heads=max(call.num_heads for call in calls),
        num_kv_heads=max(call.num_kv_heads for call in calls),
        head_dim=head_dim + head_dim % 2,
        layers=tuple(LayerAttention(RopeConfig(0.0), call.spec.window) for call in calls),
        tie_word_embeddings=bool(found("tie_word_embeddings", False)),
        max_position_embeddings=found("max_position_embeddings", None) or INT32_MAX,
        dtype=dtype if dtype in DTYPES else "float32",
        transformers_config=config,
        **UNUSED,
    )


def create_on_meta(causal_lm_class: Any, hf_config: Any, dtype: torch.dtype) -> Any:
    """Create a model of transformers without memory for its weights."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return causal_lm_class._from_config(hf_config, dtype=dtype, attn_implementation=ATTENTION)


def find_class(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return transformers' class of an architecture, and its config; refuse all but decoders."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.AttentionInterface.register(ATTENTION, attention_forward)
    decoders = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    own_name, [given] = read_architecture(config), config["architectures"]
    architecture = given if given in decoders else own_name
    if config.get("is_encoder_decoder"):
        raise refusal(config, "it has an encoder and cross attention")
    if architecture not in decoders:
        version = transformers.__version__
        raise refusal(config, f"transformers {version} has no decoder-only language model for it")
    if stores_quantized(config):
        raise refusal(config, "its weights are quantized, which only our own families support")
    causal_lm_class = getattr(transformers, architecture)
    try:
        hf_config = causal_lm_class.config_class.from_dict(dict(config))
    except Exception as error:  # transformers validates each config class in its own way
        raise CheckpointError(f"config.json has an invalid value ({error!r:.300})") from error
    if problem := find_config_problem(causal_lm_class, hf_config):
        raise refusal(config, problem)
    return causal_lm_class, hf_config


def find_config_problem(causal_lm_class: Any, hf_config: Any) -> str | None:
    """Return why a class cannot run over a paged KV cache, or None."""
    if not 1 <= getattr(hf_config, "num_hidden_layers", 0) <= MAX_LAYERS:
        return f"it has no num_hidden_layers from 1 to {MAX_LAYERS}"
    layer_types = set(getattr(hf_config, "layer_types", None) or ())
    if causal_lm_class._is_stateful or any("linear" in each for each in layer_types):
        return "it has recurrent state"
    if unknown := sorted(layer_types - LAYER_TYPES):
        return f"it has layers of the type {', '.join(unknown)}"
    if getattr(hf_config, "kv_lora_rank", None):
        return "it has multi-head latent attention (MLA)"
    if hf_config is not hf_config.get_text_config():
        return "it is a multimodal model"
    is_bidirectional = getattr(hf_config, "use_bidirectional_attention", False)
    if is_bidirectional or getattr(hf_config, "is_causal", True) is False:
        return "its attention is not causal"
    rope = getattr(hf_config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if each.get("rope_type") in BATCH_ROPES:
            return f"its rope type {each['rope_type']!r} depends on the other rows of a batch"
    return None


def find_problem(causal_lm: Any, calls: list[AttentionCall]) -> str | None:
    """Return why our attention cannot replace the recorded calls of a forward pass, or None."""
    hf_config = causal_lm.config
    if not calls:
        return "its attention does not use transformers' AttentionInterface"
    if "position_ids" not in inspect.signature(causal_lm.base_model.forward).parameters:
        return "it computes positions itself, instead of taking position_ids"
    if [call.layer_index for call in calls] != list(range(hf_config.num_hidden_layers)):
        return (
            f"its {hf_config.num_hidden_layers} layers call attention {len(calls)} times: they "
            "have recurrent state, cross attention or several attentions"
        )
    if problem := next((call.problem for call in calls if call.problem), None):
        return problem
    layer_types = getattr(hf_config, "layer_types", None) or ()
    is_sliding = [each == "sliding_attention" for each in layer_types]
    windows = [call.spec.window is not None for call in calls]
    has_window = getattr(hf_config, "sliding_window", None) is not None
    if is_sliding != windows if is_sliding else has_window and not any(windows):
        return "its sliding window is not passed to the attention"
    return None


def refusal(config: Mapping[str, Any], reason: str) -> UnsupportedModelError:
    [architecture] = config["architectures"]
    return UnsupportedModelError(
        f"architecture {architecture!r} is not supported by transformers' model code in this "
        f"engine: {reason}"
    )


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How a layer calls its attention."""

    layer_index: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    spec: AttentionSpec
    problem: str | None


def record_call(
    calls: list[AttentionCall],
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Record a call on the meta device, and return an output of the right shape."""
    q, k, v = qkv
    problem = None
    if options.get("s_aux") is not None:
        problem = "its attention has sinks"
    elif options.get("softcap") is not None:
        problem = "its attention has soft-capped scores"
    elif mask is not None or options.get("position_bias") is not None:
        problem = "its attention has a mask or a bias of its own"
    elif not options.get("is_causal", getattr(module, "is_causal", True)):
        problem = "its attention is not causal: it is an encoder"
    elif k.shape[2] != q.shape[2]:
        problem = "it has cross attention"
    layer_index, head_dim = getattr(module, "layer_idx", None), max(k.shape[3], v.shape[3])
    sizes = q.shape[1], k.shape[1], head_dim
    calls.append(AttentionCall(layer_index, *sizes, attention_spec(q, options), problem))
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def attention_spec(q: Tensor, options: dict[str, Any]) -> AttentionSpec:
    scale = options.get("scaling")
    window = options.get("sliding_window")
    return AttentionSpec(q.shape[-1] ** -0.5 if scale is None else float(scale), window or None)


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, with q, k and v [1, heads, tokens, dim]."""
    return module.attend(module, (query, key, value), attention_mask, options), None


def set_attention(causal_lm: nn.Module, attend: Any) -> None:
    for module in causal_lm.modules():
        module.attend = attend


def run_body(causal_lm: Any, input_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states [tokens, hidden] after the final norm; tokens form one batch row."""
    inputs = {"input_ids": input_ids[None], "position_ids": positions[None]}
    hidden: Tensor = causal_lm.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden[0]


class TransformersModel(Layer):
    """A causal language model: batch in, logits [sampled tokens, vocab_size] out."""

    def __init__(self, config: ModelConfig, causal_lm: Any, build: BuildContext) -> None:
        super().__init__()
        self.config, self.dtype = config, build.dtype
        self.model = Body(config, causal_lm, build)
        self.lm_head = Head(config, causal_lm, build)

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
        """Let our kernels compute the projections."""
        for module in self.model.causal_lm.modules():
            if type(module) is nn.Linear and module.weight.dtype == self.dtype:
                bias = None if module.bias is None else module.bias.data
                packed = self.lm_head.ops.pack_linear(module.weight.data, bias, None, allow_copy)
                module.forward = partial(project, packed)  # type: ignore[method-assign]


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


class Head(Layer):
    """The LM head, with the scales and caps that the model applies to its logits."""

    def __init__(self, config: ModelConfig, causal_lm: Any, build: BuildContext) -> None:
        super().__init__()
        self.vocab_size, self.ops, self.group = config.vocab_size, build.ops, build.group
        self.causal_lm = without_body(causal_lm)

    def forward(self, hidden: Tensor) -> Tensor:
        return run_head(self.causal_lm, hidden)


def without_body(causal_lm: Any) -> Any:
    """Return the same ...ForCausalLM, but with a body that returns the hidden states it is given.

    Thus the class itself computes logits from hidden states, whatever it does to them.
    """
    head = copy.copy(causal_lm)
    head._modules = {**causal_lm._modules, causal_lm.base_model_prefix: GivenStates()}
    return head


def run_head(causal_lm: Any, hidden: Tensor) -> Tensor:
    logits: Tensor = causal_lm(inputs_embeds=hidden[None], use_cache=False).logits
    return logits[0]


class GivenStates(nn.Module):
    """Stands in for the body of a model, and returns hidden states that are already known."""

    @property
    def decoder(self) -> GivenStates:  # OPT calls this module of its body
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
    """Attention over the paged KV cache, in the place of transformers' own.

    Layers with fewer or smaller heads than others are padded with zeros: the cache has one shape.
    """

    batch: ForwardBatch  # the current step

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self.attention, self.ops = build.attention, build.ops
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        # `rope_write` writes to every kind of cache. transformers has rotated q and k already.
        half = torch.ones(config.head_dim // 2, device=build.device)
        self.no_rotation = torch.stack((half, 0 * half))[None]

    def __call__(
        self,
        module: Any,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        batch, (q, k, v) = self.batch, qkv
        num_heads, v_dim = q.shape[1], v.shape[3]
        num_q = num_heads // k.shape[1] * self.num_kv_heads
        counts = num_q, self.num_kv_heads, self.num_kv_heads
        cache = batch.caches[module.layer_idx]
        rows = torch.cat([self._pad(*each) for each in zip(qkv, counts, strict=True)], 1)
        positions = torch.zeros_like(batch.positions)
        self.ops.rope_write(rows, None, self.no_rotation, positions, cache, batch.slot_mapping)
        spec = attention_spec(q, options)
        output = self.attention.attend(rows[:, :num_q], cache, batch.attention, spec)
        return output[None, :, :num_heads, :v_dim].contiguous()

    def _pad(self, x: Tensor, num_heads: int) -> Tensor:
        """Return [tokens, num_heads, head_dim] for x [1, heads, tokens, dim]."""
        missing = self.head_dim - x.shape[3], num_heads - x.shape[1]
        x = x[0].transpose(0, 1)
        return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x


def build_model(config: ModelConfig, build: BuildContext) -> TransformersModel:
    """Create a model on the meta device, to count its weights."""
    assert config.transformers_config is not None
    causal_lm = create_on_meta(*find_class(config.transformers_config), build.dtype)
    return TransformersModel(config, causal_lm, build)


def load_model(
    config: ModelConfig, checkpoint: Checkpoint | None, seed: int, build: BuildContext
) -> TransformersModel:
    """Load a checkpoint or, without one, create random weights."""
    assert config.transformers_config is not None
    causal_lm_class, hf_config = find_class(config.transformers_config)
    options = {"dtype": build.dtype, "attn_implementation": ATTENTION}
    if build.device.type == "cuda" and build.dtype != torch.bfloat16:
        # CUDA graphs cannot capture torch's grouped GEMM in other dtypes, which reads its offsets.
        options["experts_implementation"] = "batched_mm"
    if checkpoint is None:
        with torch.random.fork_rng(), torch.device(build.device):
            torch.manual_seed(seed)
            causal_lm = causal_lm_class._from_config(hf_config, **options)
    elif checkpoint.weight_format == "gguf":
        raise refusal(config.transformers_config, "its weights are in a GGUF file")
    else:
        causal_lm = load_pretrained(causal_lm_class, checkpoint, config=hf_config, **options)
    return TransformersModel(config, causal_lm.to(build.device).eval(), build)


def load_pretrained(causal_lm_class: Any, checkpoint: Checkpoint, **options: Any) -> Any:
    """Load weights with transformers, which knows how every family stores them, but strictly."""
    causal_lm, found = causal_lm_class.from_pretrained(
        checkpoint.path, local_files_only=True, output_loading_info=True, **options
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, found[kind])):
            which = ", ".join(names[:MAX_NAMED])
            raise CheckpointError(f"{checkpoint.path}: {kind.replace('_', ' ')}: {which}")
    return causal_lm


def project(packed: PackedLinear, x: Tensor) -> Tensor:
    """Project x [1, tokens, in] with a kernel that takes [tokens, in]."""
    return packed(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
