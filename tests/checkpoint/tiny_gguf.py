"""Write tiny GGUF files the way converters do."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from nanovllm.checkpoint import gguf as gguf_reader
from nanovllm.checkpoint.gguf_file import open_gguf
from nanovllm.checkpoint.gguf_tensors import list_gguf

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 32, 48
EXPERTS, EXPERTS_USED, EXPERT_INTERMEDIATE, WINDOW = 3, 2, 32, 16
ARCHITECTURES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma3",
    "phi3",
    "smollm3",
    "olmo2",
    "granite",
    "glm4",
    "gemma2",
    "mistral3",
]
PERMUTED = ("llama", "smollm3", "granite", "mistral3")  # converters permute rows of q and k
Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]


def hf_tensors(arch: str, *, tied: bool, seed: int = 0) -> Arrays:
    """Random weights under Hugging Face names."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        parts = layer_shapes(arch)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, array in tensors.items():
        if name.endswith("norm.weight"):
            array[:] = np.round(array * 1024) / 1024  # so that adding 1 to it is exact
    return tensors


def layer_shapes(arch: str) -> Shapes:
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: Shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.o_proj.weight": (HIDDEN, q_size),
    }
    if arch == "phi3":
        return shapes | {
            "self_attn.qkv_proj.weight": (q_size + 2 * kv_size, HIDDEN),
            "mlp.gate_up_proj.weight": (2 * INTERMEDIATE, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    if arch == "olmo2":
        del shapes["input_layernorm.weight"]
        shapes["post_feedforward_layernorm.weight"] = (HIDDEN,)
        shapes |= {"self_attn.q_norm.weight": (q_size,), "self_attn.k_norm.weight": (kv_size,)}
    if arch == "glm4":
        shapes |= {f"post_{name}_layernorm.weight": (HIDDEN,) for name in ("self_attn", "mlp")}
    sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    shapes |= {f"self_attn.{name}.weight": (size, HIDDEN) for name, size in sizes.items()}
    if arch == "qwen2":
        shapes |= {f"self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    if arch in ("qwen3", "qwen3moe", "gemma3"):
        shapes |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    if arch in ("gemma2", "gemma3"):
        shapes |= {f"{name}_feedforward_layernorm.weight": (HIDDEN,) for name in ("pre", "post")}
    if arch == "glm4":
        return shapes | {
            "mlp.gate_up_proj.weight": (2 * INTERMEDIATE, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    if arch != "qwen3moe":
        return shapes | mlp_shapes("mlp", INTERMEDIATE)
    shapes["mlp.gate.weight"] = (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        shapes |= mlp_shapes(f"mlp.experts.{expert}", EXPERT_INTERMEDIATE)
    return shapes


def mlp_shapes(prefix: str, size: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (size, HIDDEN),
        f"{prefix}.up_proj.weight": (size, HIDDEN),
        f"{prefix}.down_proj.weight": (HIDDEN, size),
    }


def gguf_name(hf_name: str, arch: str, num_layers: int = LAYERS) -> str:
    """Ask the gguf package, which knows Hugging Face names, for the stored one."""
    number = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, num_layers)
    name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    if hf_name == "lm_head.weight":  # Gemma 2 has none there
        name = "output.weight"
    assert name is not None, hf_name
    return name


def stack_experts(tensors: Arrays) -> Arrays:
    """Join `experts.0`, `experts.1` and so on into one tensor named `experts`."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, array in tensors.items():
        stacks.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(array)
    return {
        name: np.stack(arrays) if ".experts." in name else arrays[0]
        for name, arrays in stacks.items()
    }


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
    norm_quant: str = "F32",
    other_quants: dict[str, str] | None = None,
    sizes: tuple[int, int, int] = (LAYERS, HEADS, KV_HEADS),
) -> Path:
    """Write a model as converters do: matrices quantized, norms float32, rows and norms changed.

    `other_quants` are those of matrices with such a part in their name.
    """
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
    }
    if arch == "qwen3moe":
        values["qwen3moe.expert_count"] = EXPERTS
        values["qwen3moe.expert_used_count"] = EXPERTS_USED
        values["qwen3moe.expert_feed_forward_length"] = EXPERT_INTERMEDIATE
    if arch == "glm4":
        values["glm4.rope.dimension_count"] = HEAD_DIM // 2
    if arch == "granite":  # without a scale, attention is one-hot
        values["granite.attention.scale"] = HEAD_DIM**-0.5
    if arch in ("gemma2", "gemma3", "phi3"):
        values[f"{arch}.attention.sliding_window"] = WINDOW
    values |= metadata or {}
    num_layers, num_heads, num_kv_heads = sizes
    heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
    for key, value in values.items():
        if value is not None:
            add_value(writer, key, value)
    tensors = hf_tensors(arch, tied=True) if tensors is None else tensors
    for name, array in stack_experts(tensors).items():
        projection = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if arch in PERMUTED and projection in heads:
            array = permute_rows(array, heads[projection])
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            array = array + 1
        others = [other for part, other in (other_quants or {}).items() if part in name]
        matrix_quant = others[0] if others else quant
        is_matrix = array.ndim > 1 and projection != "conv1d"
        kind = gguf.GGMLQuantizationType[matrix_quant if is_matrix else norm_quant]
        stored = gguf_name(name, arch, num_layers)
        writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (raw or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_arrays(path: Path) -> Arrays:
    """Return every tensor of a file by its Hugging Face name."""
    return {tensor.name: np.concatenate(list(tensor.read())) for tensor in list_gguf(path)}


def read_config(path: Path) -> dict[str, Any]:
    return gguf_reader.read_config(path, open_gguf(path))


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)
