"""GGUF files: config layout, tensor names, un-permuted rows, and what is refused."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from nanovllm.checkpoint.gguf import iter_tensors, read_config, read_generation_config
from nanovllm.checkpoint.gguf_file import field, open_gguf
from nanovllm.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint.tiny_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCAB,
    Arrays,
    hf_tensors,
    write_gguf,
)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_float32_round_trip_is_exact(tmp_path: Path, arch: str, tied: bool) -> None:
    expected = hf_tensors(arch, tied=tied)
    path = write_gguf(tmp_path / "m.gguf", arch, expected)
    loaded = dict(iter_tensors(path))
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
        assert array.dtype == np.float32
        assert array.flags.writeable
    assert read_config(path)["tie_word_embeddings"] is tied


def test_config_layout(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3")
    assert read_config(path) == {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": float(np.float32(1e-6)),
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    absent = dict.fromkeys(
        [
            "llama.attention.head_count_kv",
            "llama.attention.key_length",
            "llama.attention.value_length",
            "llama.rope.freq_base",
            "tokenizer.ggml.bos_token_id",
            "tokenizer.ggml.eos_token_id",
        ]
    )
    config = read_config(write_gguf(tmp_path / "a.gguf", metadata=absent))
    assert config["num_key_value_heads"] == HEADS
    assert config["head_dim"] == HIDDEN // HEADS
    assert config["rope_theta"] == 10000.0
    assert config["bos_token_id"] is None
    assert config["eos_token_id"] is None
    rope = absent | {"llama.rope.dimension_count": 8}
    assert read_config(write_gguf(tmp_path / "b.gguf", metadata=rope))["head_dim"] == 8


def test_every_end_of_generation_id(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    path = write_gguf(tmp_path / "m.gguf", metadata=ids)
    assert read_generation_config(path) == {"eos_token_id": [2, 7]}


def test_biases_are_named_and_permuted(tmp_path: Path) -> None:
    expected = hf_tensors("llama", tied=True)
    for layer in range(LAYERS):
        for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            bias = np.arange(size * HEAD_DIM, dtype=np.float32)
            expected[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
    path = write_gguf(tmp_path / "m.gguf", tensors=expected)
    assert read_config(path)["attention_bias"] is True
    loaded = dict(iter_tensors(path))
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_transformers_reads_the_same_model(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokens = ["a"] * VOCAB  # transformers asks for a vocabulary
    path = write_gguf(
        tmp_path / "m.gguf",
        arch,
        hf_tensors(arch, tied=False),
        metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.model": "gpt2"},
    )
    reference = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    config = read_config(path)
    reference.head_dim = HEAD_DIM  # transformers does not read key_length
    for key in (config.keys() & reference.to_dict().keys()) - {"architectures", "rope_scaling"}:
        assert getattr(reference, key) == config[key], key
    assert reference.rope_parameters["rope_theta"] == config["rope_theta"]
    model = AutoModelForCausalLM.from_config(reference)
    assert type(model).__name__ == config["architectures"][0]
    state = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    loaded = dict(iter_tensors(path))
    assert loaded.keys() == state.keys()
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, state[name].float().numpy(), err_msg=name)


def test_rope_scaling_kinds(tmp_path: Path) -> None:
    def rope(metadata: dict[str, Any], raw: Arrays | None = None) -> Any:
        path = write_gguf(tmp_path / "m.gguf", metadata=metadata, raw=raw)
        return read_config(path)["rope_scaling"]

    kind, factor = "llama.rope.scaling.type", "llama.rope.scaling.factor"
    assert rope({kind: "none"}) is None
    assert rope({kind: "linear", factor: 4.0}) == {"rope_type": "linear", "factor": 4.0}
    assert rope({factor: 4.0}) == {"rope_type": "linear", "factor": 4.0}
    yarn = {kind: "yarn", factor: 4.0, "llama.rope.scaling.original_context_length": 128}
    assert rope(yarn) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert rope(yarn | {"llama.rope.scaling.yarn_beta_fast": 16.0})["beta_fast"] == 16.0
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    raw = {"rope_freqs.weight": factors}
    assert rope({}, raw) == {"rope_type": "factors", "factors": factors.tolist()}
    with pytest.raises(UnsupportedModelError, match=r"'yarn' with rope_freqs.weight"):
        rope(yarn, raw)
    with pytest.raises(UnsupportedModelError, match="longrope"):
        rope({kind: "longrope", factor: 4.0})
    with pytest.raises(CheckpointError, match=r"llama\.rope\.scaling\.factor"):
        rope({kind: "yarn"})


def test_llama3_factors_are_config_not_weights(tmp_path: Path) -> None:
    raw = {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", raw=raw)
    assert dict(iter_tensors(path)).keys() == hf_tensors("llama", tied=True).keys()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length is 16"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count is 16"),
        ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv is \[2, 4\]"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_would_change_the_numbers_is_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(path)


def test_zero_experts_is_a_dense_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.expert_count": 0})
    assert read_config(path)["architectures"] == ["LlamaForCausalLM"]


def test_missing_size_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.block_count": None})
    with pytest.raises(CheckpointError, match=r"llama\.block_count"):
        read_config(path)


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'falcon'; supported in GGUF: llama, qwen3"):
        read_config(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match="falcon"):
        list(iter_tensors(tmp_path / "m.gguf"))


def test_unknown_tensor_and_type_are_refused_before_any_is_read(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}  # qwen3's, not llama's
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM has no tensor blk.0.attn_q_norm"):
        next(iter_tensors(write_gguf(tmp_path / "a.gguf", raw=extra)))
    path = write_gguf(tmp_path / "b.gguf", quant="Q5_0")
    with pytest.raises(UnsupportedModelError, match=r"token_embd.weight has type Q5_0; supported"):
        next(iter_tensors(path))


def test_truncated_or_foreign_file(tmp_path: Path) -> None:
    whole = write_gguf(
        tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": [f"token{i}" for i in range(9)]}
    ).read_bytes()
    reader = open_gguf(tmp_path / "m.gguf")
    end = max(tensor.data_offset + tensor.n_bytes for tensor in reader.tensors)
    broken = tmp_path / "broken.gguf"
    for size in [*range(0, reader.data_offset, 7), reader.data_offset, end // 2, end - 1]:
        broken.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"broken.gguf cannot be read as GGUF"):
            read_config(broken)
    broken.write_bytes(b"PK\3\4" + whole[4:])
    with pytest.raises(CheckpointError, match="magic"):
        read_config(broken)


def test_fast_reader_agrees_with_the_package(tmp_path: Path) -> None:
    metadata = {
        "x.strings": ["", "é", "long " * 50],
        "x.ints": [1, -2, 3],
        "x.floats": [0.5, -1.5],
        "x.flags": [True, False],
    }
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    reference, reader = gguf.GGUFReader(path), open_gguf(path)
    assert list(reader.fields) == list(reference.fields)
    for key, value in reference.fields.items():
        assert field(reader, key) == value.contents(), key
    for ours, theirs in zip(reader.tensors, reference.tensors, strict=True):
        assert (ours.name, ours.data_offset) == (theirs.name, theirs.data_offset)


def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    raw = {f"blk.{i}.ffn_up.weight": np.ones((512, 512), np.float32) for i in range(16)}
    path = write_gguf(tmp_path / "m.gguf", tensors={}, raw=raw)
    list(iter_tensors(write_gguf(tmp_path / "warm.gguf")))
    tracemalloc.start()
    for _name, _array in iter_tensors(path):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 2**20  # sixteen tensors of 1 MiB; the last and the next may overlap
