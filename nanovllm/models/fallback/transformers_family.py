"""Decoders that run in transformers' model code: check whether they are supported, and load them.

A forward pass on the meta device, without weights, records how each layer calls its attention. If
our attention cannot replace these calls, the model is rejected with the reason.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.attention.backend import AttentionSpec
from nanovllm.checkpoint.find import Checkpoint, is_mxfp4, stores_quantized
from nanovllm.checkpoint.tensor_names import NOT_TEXT
from nanovllm.config import (
    DTYPES,
    ConfigJson,
    EngineConfig,
    LayerAttention,
    ModelConfig,
    RopeConfig,
)
from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.layers.build import BuildContext
from nanovllm.models.config_json import INT32_MAX, MAX_LAYERS, read_architecture
from nanovllm.models.fallback.transformers_model import (
    TransformersModel,
    attention_forward,
    attention_spec,
    run_body,
    run_head,
    set_attention,
    without_body,
)

ATTENTION = "nanovllm"  # the name of our attention in transformers' AttentionInterface
NO_INTERFACE = "its attention does not use transformers' AttentionInterface"
LAYER_TYPES = {"full_attention", "sliding_attention"}
MAX_NAMED = 5  # maximum number of tensors or messages listed in an error
# RoPE types whose frequencies depend on the longest sequence of the batch.
BATCH_ROPES = {"dynamic", "longrope"}
# Prefixes of the text model's tensors in multimodal models, and their replacements.
TEXT_KEYS = {
    r"^(model\.)?language_model\.(?!(lm_head|model)\.)": "model.",
    r"^language_model\.(?=(lm_head|model)\.)": "",
}
# Fields of ModelConfig that nothing reads, because transformers' code does these parts itself.
UNUSED: dict[str, Any] = {
    **{"rms_norm_eps": 0.0, "activation": "silu", "attention_scale": 1.0},
    **{"qkv_bias": False, "output_bias": False, "mlp_bias": False},
}


def read_config(config: ConfigJson) -> ModelConfig:
    """Return the sizes of a model that transformers implements; reject models we cannot run."""
    calls: list[AttentionCall] = []
    causal_lm_class, hf_config = find_class(config)
    try:
        # The experts' grouped GEMM needs bfloat16.
        causal_lm = create_on_meta(causal_lm_class, hf_config, torch.bfloat16)
        set_attention(causal_lm, partial(record_call, calls))
        tokens = torch.zeros(2, dtype=torch.int64, device="meta")
        hidden = run_body(causal_lm, tokens, tokens)
        vocab_size = run_head(without_body(causal_lm), hidden).shape[-1]
    except Exception as error:  # the model's code may read values, or not know our attention
        reason = f"its code does not run without data ({error!r:.200})"
        if error.args == (ATTENTION,):  # a KeyError of the model's own attention table
            reason = NO_INTERFACE
        raise refusal(config, reason) from error
    if problem := find_problem(causal_lm, calls):
        raise refusal(config, problem)
    head_dim, hidden_size = max(call.head_dim for call in calls), hidden.shape[-1]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    read_field = partial(getattr, hf_config)
    return ModelConfig(
        architecture=causal_lm_class.__name__,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,  # an estimate: some families have several sizes
        num_heads=max(call.num_heads for call in calls),
        num_kv_heads=max(call.num_kv_heads for call in calls),
        head_dim=head_dim + head_dim % 2,
        layers=tuple(layer_attention(call, calls) for call in calls),
        tie_word_embeddings=bool(read_field("tie_word_embeddings", False)),
        max_position_embeddings=read_field("max_position_embeddings", None) or INT32_MAX,
        dtype=dtype if dtype in DTYPES else "float32",
        transformers_config=config,
        **UNUSED,
    )


def check_options(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for options that only our own families support."""
    size, quantization = config.tensor_parallel_size, config.quantization
    for name, is_set in {"tensor_parallel_size": size > 1, "quantization": quantization}.items():
        if is_set:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is not supported for {model.architecture}, "
                "which runs through transformers' model code; leave it out",
                param=name,
            )


def create_on_meta(causal_lm_class: Any, hf_config: Any, dtype: torch.dtype) -> Any:
    """Create a transformers model without allocating its weights."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return causal_lm_class._from_config(hf_config, dtype=dtype, attn_implementation=ATTENTION)


def find_class(config: ConfigJson) -> tuple[Any, Any]:
    """Return transformers' class for an architecture, and its config; reject all but decoders."""
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
    for name, value in config.items():
        if isinstance(value, float) and math.isnan(value):
            raise CheckpointError(f"config.json: {name} must be a number, got NaN")
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
        return f"its num_hidden_layers is not between 1 and {MAX_LAYERS}"
    layer_types = set(getattr(hf_config, "layer_types", None) or ())
    if causal_lm_class._is_stateful or any("linear" in each for each in layer_types):
        return "it has recurrent state"
    if unknown := sorted(layer_types - LAYER_TYPES):
        return f"it has layers of type {', '.join(unknown)}"
    if getattr(hf_config, "kv_lora_rank", None):
        return "it has multi-head latent attention (MLA)"
    if hf_config is not hf_config.get_text_config():
        return "it is a multimodal model"
    # With "vision", only image tokens attend to later tokens.
    is_bidirectional = getattr(hf_config, "use_bidirectional_attention", None) in (True, "all")
    if is_bidirectional or getattr(hf_config, "is_causal", True) is False:
        return "its attention is not causal"
    rope = getattr(hf_config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if (kind := str(each.get("rope_type"))) in BATCH_ROPES:
            return f"its rope type {kind!r} depends on the other rows of a batch"
        if (theta := each.get("rope_theta")) is not None and not theta > 0:
            return f"its rope_theta must be above 0, got {theta}"
    return None


def find_problem(causal_lm: Any, calls: list[AttentionCall]) -> str | None:
    """Return why our attention cannot replace the recorded calls of a forward pass, or None."""
    hf_config = causal_lm.config
    if not calls:
        return NO_INTERFACE
    if "position_ids" not in inspect.signature(causal_lm.base_model.forward).parameters:
        return "it computes positions itself, instead of taking position_ids"
    if any(map(has_padding_position, causal_lm.modules())):
        return "its positions start at pad_token_id + 1"
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


def has_padding_position(module: nn.Module) -> bool:
    """Return whether a module embeds positions as RoBERTa does, which reserves one for padding."""
    positions = getattr(module, "position_embeddings", None)
    return isinstance(positions, nn.Embedding) and positions.padding_idx is not None


def refusal(config: ConfigJson, reason: str) -> UnsupportedModelError:
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
    k: Tensor
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
    if mask is not None or options.get("position_bias") is not None:
        problem = "its attention has a mask or a bias of its own"
    elif not options.get("is_causal", getattr(module, "is_causal", True)):
        problem = "its attention is not causal: it is an encoder"
    elif k.shape[2] != q.shape[2]:
        problem = "it has cross attention"
    layer_index, head_dim = getattr(module, "layer_idx", None), max(k.shape[3], v.shape[3])
    sizes = q.shape[1], k.shape[1], head_dim
    calls.append(AttentionCall(layer_index, *sizes, attention_spec(q, options), k, problem))
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def layer_attention(call: AttentionCall, calls: list[AttentionCall]) -> LayerAttention:
    """Return a layer's window, KV heads, and the layer whose keys and values it uses, if any."""
    window = call.spec.window
    first = next(each for each in calls if each.k is call.k and each.spec.window == window)
    shared = None if first is call else first.layer_index
    shape = call.num_kv_heads, call.head_dim + call.head_dim % 2
    return LayerAttention(RopeConfig(0.0), window, shared, shape)


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
        # In other dtypes, the grouped GEMM reads offsets on the host, which CUDA graphs forbid.
        options["experts_implementation"] = "batched_mm"
    if checkpoint is None:
        with torch.random.fork_rng(), torch.device(build.device):
            torch.manual_seed(seed)
            causal_lm = causal_lm_class._from_config(hf_config, **options)
    elif checkpoint.is_gguf:
        raise refusal(config.transformers_config, "its weights are in a GGUF file")
    else:
        causal_lm = load_pretrained(causal_lm_class, checkpoint, config=hf_config, **options)
    return TransformersModel(config, causal_lm.to(build.device).eval(), build)


def load_pretrained(causal_lm_class: Any, checkpoint: Checkpoint, **options: Any) -> Any:
    """Load weights with transformers; raise if any are missing, unexpected or of another shape."""
    from transformers import Mxfp4Config

    if is_mxfp4(checkpoint.config):
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    causal_lm, info = causal_lm_class.from_pretrained(
        checkpoint.path,
        local_files_only=True,
        output_loading_info=True,
        key_mapping=TEXT_KEYS,
        **options,
    )
    info["unexpected_keys"] = {key for key in info["unexpected_keys"] if not NOT_TEXT.match(key)}
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, info[kind])):
            which = ", ".join(names[:MAX_NAMED])
            raise CheckpointError(f"{checkpoint.path}: {kind.replace('_', ' ')}: {which}")
    if is_mxfp4(checkpoint.config):  # dequantized to bfloat16
        causal_lm.to(options["dtype"])
    return causal_lm
