"""Write tiny GGUF files the way converters do."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 32, 48
Arrays = dict[str, np.ndarray]


def hf_tensors(arch: str, *, tied: bool, seed: int = 0) -> Arrays:
    """Random weights under Hugging Face names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
        if arch == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (HEAD_DIM,)
            shapes[prefix + "self_attn.k_norm.weight"] = (HEAD_DIM,)
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def gguf_name(hf_name: str, arch: str) -> str:
    """Ask the gguf package, which knows Hugging Face names, for the stored one."""
    number = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, LAYERS)
    name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    assert name is not None, hf_name
    return name


def permute_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Store row `half * D/2 + i` of each head at `2 * i + half`, one row at a time."""
    stored = np.empty_like(array)
    head_dim = len(array) // num_heads
    for row in range(len(array)):
        head, within = divmod(row, head_dim)
        half, pair = divmod(within, head_dim // 2)
        stored[head * head_dim + 2 * pair + half] = array[row]
    return stored


def write_gguf(
    path: Path,
    arch: str = "llama",
    tensors: Arrays | None = None,
    quant: str = "F32",
    metadata: dict[str, Any] | None = None,
    raw: Arrays | None = None,
) -> Path:
    """Write a model as converters do: matrices quantised, norms float32, llama's q/k permuted."""
    writer = gguf.GGUFWriter(path, arch)
    values = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INTERMEDIATE,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD_DIM,
        f"{arch}.attention.value_length": HEAD_DIM,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 50000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | (metadata or {})
    for key, value in values.items():
        if value is not None:
            add_value(writer, key, value)
    for name, array in (hf_tensors(arch, tied=True) if tensors is None else tensors).items():
        if arch == "llama" and ".q_proj." in name:
            array = permute_rows(array, HEADS)
        if arch == "llama" and ".k_proj." in name:
            array = permute_rows(array, KV_HEADS)
        kind = gguf.GGMLQuantizationType[quant if array.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name(name, arch), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (raw or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)
