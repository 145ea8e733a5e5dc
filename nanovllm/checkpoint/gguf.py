"""Read the metadata of a GGUF file as a Hugging Face config."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_architectures import ARCHITECTURES, Architecture
from nanovllm.checkpoint.gguf_file import field, list_field, special_token_id, to_float
from nanovllm.checkpoint.quantized.weight_format import Layouts, QuantLayout
from nanovllm.engine.step import Pooling
from nanovllm.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor


_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_WINDOWS = "attention.sliding_window_pattern"
ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
# Converters may omit the end-of-turn token id, so it is found by its text, as in llama.cpp.
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|eom_id|>", "<|end_of_text|>"),  # Llama 3 uses these in addition to <|eot_id|>
)

# Keyed by llama.cpp's numbers for pooling types.
_POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 3: "last"}

# `read_config` adds this key, which config.json never has: tensor name -> quant block type.
BLOCK_TYPES_KEY = "gguf_block_types"

FLOAT_TYPES = ("F32", "F16", "BF16")
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
TENSOR_TYPES = (*FLOAT_TYPES, *BLOCK_TYPES)

# Keys that any architecture may have. A key that is neither here nor in Architecture.numbers
# may change the output, so it raises an error.
_KNOWN_KEYS = re.compile(
    r"block_count|context_length|embedding_length|feed_forward_length|vocab_size|expert_count"
    r"|pooling_type"  # set by embedding models; `read_pooling` reads it
    r"|attention\.(head_count|head_count_kv|key_length|value_length|layer_norm_rms_epsilon)"
    r"|rope\.(freq_base|dimension_count|dimension_sections)"  # only images need dimension_sections
    r"|rope\.scaling\.(type|factor|original_context_length|finetuned)"
    r"|rope\.scaling\.yarn_(attn_factor|beta_fast|beta_slow)"
)


def read_config(path: Path, reader: GGUFReader) -> dict[str, Any]:
    """Return the metadata in config.json layout."""
    metadata = Metadata.of(path, reader)
    metadata.check_keys()
    architecture = ARCHITECTURES[metadata.architecture]
    number, tensors = metadata.number, {tensor.name: tensor for tensor in metadata.reader.tensors}
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path} has no tensor token_embd.weight; is it a language model?")
    if len(tensors["token_embd.weight"].shape) != 2:
        raise CheckpointError(f"{path}: tensor token_embd.weight is not a matrix")
    heads = number("attention.head_count")
    config = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length", architecture.default_size),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, tensors.get(ROPE_FACTORS)),
        "max_position_embeddings": number("context_length"),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _torch_dtype(metadata.reader),
        "bos_token_id": special_token_id(metadata.reader, "bos"),
        "eos_token_id": special_token_id(metadata.reader, "eos"),
        **architecture.constants,
        **{name: tensor in tensors for name, tensor in architecture.biases.items()},
    }
    for key, (name, default) in architecture.numbers.items():
        config[name] = number(key, default) or None  # 0 means unset, such as no window
    if architecture.lists_windows and (windows := metadata.windows()) is not None:
        kinds = "full_attention", "sliding_attention"
        config["layer_types"] = [kinds[has_window] for has_window in windows]
    if types := _block_types(reader, architecture):
        config[BLOCK_TYPES_KEY] = types
    return config | architecture.derive(config)


def read_pooling(path: Path, reader: GGUFReader) -> Pooling | None:
    """Return the pooling of an embedding model; None for a model that generates."""
    kind = Metadata.of(path, reader).number("pooling_type", 0)
    if kind not in _POOLINGS:
        raise UnsupportedModelError(
            f"{path}: pooling_type {kind} is not supported; 0 (none), 1 (mean) and 3 (last) are"
        )
    return _POOLINGS[kind]


def read_generation_config(reader: GGUFReader) -> dict[str, Any]:
    """Return every token id that ends a generation, in generation_config.json layout."""
    ids = [special_token_id(reader, role) for role in ("eos", "eot", "eom")]
    tokens = list_field(reader, "tokenizer.ggml.tokens", str) or []
    ids += [tokens.index(text) for text in _END_TEXTS if text in tokens]
    return {"eos_token_id": list(dict.fromkeys(i for i in ids if i is not None))}


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's header, with access to the keys under its architecture's prefix."""

    path: Path
    reader: GGUFReader
    architecture: str

    @classmethod
    def of(cls, path: Path, reader: GGUFReader) -> Metadata:
        name = field(reader, "general.architecture", None, str)
        if name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path} has architecture {name!r}; supported in GGUF: {', '.join(ARCHITECTURES)}"
            )
        for tensor in reader.tensors:
            if (kind := tensor.tensor_type.name) not in TENSOR_TYPES:
                raise UnsupportedModelError(
                    f"{path}: tensor {tensor.name} has type {kind}; "
                    f"supported: {', '.join(TENSOR_TYPES)}"
                )
        return cls(path, reader, name)

    def number(self, key: str, default: float | None = None) -> Any:
        value = field(self.reader, f"{self.architecture}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path} has no {self.architecture}.{key}; convert it again")
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            key = f"{self.architecture}.{key}"
            raise UnsupportedModelError(f"{self.path}: {key} is {value!r}, not one number >= 0")
        return value

    def windows(self) -> list[bool] | None:
        """Return, for each layer, whether it has a sliding window; None if the file has no list."""
        return list_field(self.reader, f"{self.architecture}.{_WINDOWS}", bool)

    def check_keys(self) -> None:
        """Raise UnsupportedModelError for unknown keys and tensors that may change the output."""
        architecture, prefix = ARCHITECTURES[self.architecture], f"{self.architecture}."
        own_keys = {*architecture.numbers, *([_WINDOWS] if architecture.lists_windows else [])}
        keys = [key.removeprefix(prefix) for key in self.reader.fields if key.startswith(prefix)]
        unknown = [
            prefix + key for key in keys if key not in own_keys and not _KNOWN_KEYS.fullmatch(key)
        ]
        if "expert_count" not in own_keys and self.number("expert_count", 0):
            unknown.append(f"{prefix}expert_count")
        unknown += [t.name for t in self.reader.tensors if t.name in _LONGROPE_FACTORS]
        if unknown:
            raise UnsupportedModelError(f"{self.path} uses {', '.join(unknown)}: not supported")


def _head_dim(metadata: Metadata) -> int:
    number = metadata.number
    head_dim = number("attention.key_length", 0)
    head_dim = head_dim or number("embedding_length") // (number("attention.head_count") or 1)
    # An architecture that reads a key itself, such as one with partial rotation, allows any value.
    own_keys = ARCHITECTURES[metadata.architecture].numbers
    for key in ("attention.value_length", "rope.dimension_count"):
        if key not in own_keys and number(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{metadata.path}: {metadata.architecture}.{key} is {number(key)}, but a head has "
                f"{head_dim} dimensions; only equal sizes are supported"
            )
    return int(head_dim)


def _rope_scaling(metadata: Metadata, factors: ReaderTensor | None) -> dict[str, Any] | None:
    """Return the rope scaling in transformers' format; only GGUF files have the type "factors"."""
    number = metadata.number
    implied = "linear" if number("rope.scaling.factor", 0) else "none"
    kind = field(metadata.reader, f"{metadata.architecture}.rope.scaling.type", implied)
    if kind not in ("none", "linear", "yarn") or (kind != "none" and factors is not None):
        also = f" with {ROPE_FACTORS}" if factors is not None else ""
        raise UnsupportedModelError(f"{metadata.path}: rope scaling {kind!r}{also}: not supported")
    if factors is not None and factors.tensor_type.name not in FLOAT_TYPES:
        raise UnsupportedModelError(f"{metadata.path}: {ROPE_FACTORS} is not a float tensor")
    if kind == "none":
        if factors is None:
            return None
        values = to_float(factors.data, factors.tensor_type).tolist()
        return {"rope_type": "factors", "factors": values}
    scaling = {"rope_type": kind, "factor": number("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    original = number("rope.scaling.original_context_length", number("context_length"))
    betas = {key: number(f"rope.scaling.yarn_{key}", beta) for key, beta in _YARN_BETAS.items()}
    if factor := number("rope.scaling.yarn_attn_factor", 0):
        scaling["attention_factor"] = factor
    return scaling | {"original_max_position_embeddings": original} | betas


def _torch_dtype(reader: GGUFReader) -> str:
    """Infer the model's dtype from its matrices: norms are float32 in every GGUF file."""
    types = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if types <= {"F16", "F32"} else "bfloat16"


def _block_types(reader: GGUFReader, architecture: Architecture) -> dict[str, str]:
    named = [(known_name(tensor, architecture), tensor) for tensor in reader.tensors]
    types = {name: t.tensor_type.name for name, t in named if name is not None}
    return {name: kind for name, kind in types.items() if kind in BLOCK_TYPES}


def block_layouts(types: Mapping[str, str]) -> Layouts:
    """Return the layouts, given each tensor's GGUF type; a layer's experts share a tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    def layout_of(module: str) -> QuantLayout | None:
        kind = types.get(re.sub(r"experts\.\d+\.", "experts.*.", f"{module}.weight"))
        if kind is None:
            return None
        size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        return QuantLayout(kind, size, block_bytes=num_bytes)

    return layout_of


def known_name(tensor: ReaderTensor, architecture: Architecture) -> str | None:
    if tensor.name in _TOP_TENSORS:
        return _TOP_TENSORS[tensor.name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+?)(\.weight|\.bias)?", tensor.name)
    if match is None or match[2] not in architecture.layer_tensors:
        return None
    suffix = "" if match[2] in ("ssm_a", "ssm_dt") else match[3] or ""
    return f"model.layers.{match[1]}.{architecture.layer_tensors[match[2]]}{suffix}"
