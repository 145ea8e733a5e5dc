"""GGUF files: config layout, tensor names, un-permuted rows, and unsupported files."""

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from nanovllm import LLM
from nanovllm.checkpoint import gguf_tensors
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.gguf import read_generation_config
from nanovllm.checkpoint.gguf_architectures import ARCHITECTURES as ALL
from nanovllm.checkpoint.gguf_file import field, open_gguf
from nanovllm.checkpoint.gguf_tensors import list_gguf
from nanovllm.errors import CheckpointError, RequestError, UnsupportedModelError
from nanovllm.models import registry
from tests.checkpoint.tiny_gguf import (
    ARCHITECTURES,
    EXPERT_INTERMEDIATE,
    EXPERTS,
    EXPERTS_USED,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WINDOW,
    Arrays,
    hf_tensors,
    read_arrays,
    read_config,
    stack_experts,
    write_gguf,
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_float32_round_trip_is_exact(tmp_path: Path, arch: str, tied: bool) -> None:
    expected = hf_tensors(arch, tied=tied)
    path = write_gguf(tmp_path / "m.gguf", arch, expected)
    loaded = read_arrays(path)
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
        assert array.dtype == np.float32
        assert array.flags.writeable
    assert read_config(path)["tie_word_embeddings"] is tied


@pytest.mark.parametrize("arch", list(ALL))
def test_names_are_those_of_the_converter(arch: str) -> None:
    """llama.cpp's converter maps the same tensors to the same names, and knows all our keys."""
    [number] = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.TensorNameMap(number, 2)
    for name, hf_name in ALL[arch].layer_tensors.items():
        # The converter renames this tensor first.
        hf_name = hf_name.replace(".dt_bias", ".dt_proj")
        hf_name = f"model.layers.1.{hf_name}".replace(".*.", ".")
        assert names.get_name(hf_name) == f"blk.1.{name}"
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    keys = {value for group in groups for value in vars(group).values() if type(value) is str}
    assert {f"{{arch}}.{key}" for key in ALL[arch].numbers} <= keys


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
    partial = absent | {"llama.rope.dimension_count": 8}
    with pytest.raises(UnsupportedModelError, match=r"dimension_count is 8, but a head has 16"):
        read_config(write_gguf(tmp_path / "b.gguf", metadata=partial))


def test_expert_fields(tmp_path: Path) -> None:
    config = read_config(write_gguf(tmp_path / "m.gguf", "qwen3moe"))
    assert config["model_type"] == "qwen3_moe"
    assert config["num_experts"] == EXPERTS
    assert config["num_experts_per_tok"] == EXPERTS_USED
    assert config["moe_intermediate_size"] == EXPERT_INTERMEDIATE
    assert config["norm_topk_prob"] is True
    silent = {"qwen3moe.expert_used_count": None}
    with pytest.raises(CheckpointError, match=r"qwen3moe\.expert_used_count"):
        read_config(write_gguf(tmp_path / "s.gguf", "qwen3moe", metadata=silent))


def test_gemma3_layers(tmp_path: Path) -> None:
    def layers(metadata: dict[str, Any]) -> dict[str, Any]:
        metadata = {f"gemma3.{key}": value for key, value in metadata.items()}
        return read_config(write_gguf(tmp_path / "m.gguf", "gemma3", metadata=metadata))

    config = layers({"block_count": 13, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    windows = [layer.window for layer in registry.read_config(config).layers]
    assert windows == [WINDOW, WINDOW, WINDOW, WINDOW, WINDOW, None] * 2 + [WINDOW]
    assert config["sliding_window"] == WINDOW
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (50000.0, 10000.0)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert "hidden_act" not in config
    assert layers({"rope.freq_base_swa": 500.0})["rope_local_base_freq"] == 500.0
    assert layers({"block_count": 62})["query_pre_attn_scalar"] == HIDDEN // HEADS
    everything = layers({"attention.sliding_window": None})
    assert everything["sliding_window"] is None
    assert [layer.window for layer in registry.read_config(everything).layers] == [None] * LAYERS


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_olmo3_is_olmo2_with_windows(tmp_path: Path, key: str) -> None:
    assert read_config(write_gguf(tmp_path / "2.gguf", "olmo2"))["model_type"] == "olmo2"
    metadata = {
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [True, False],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        f"rope.scaling.{key}": 1.5,
    }
    metadata = {f"olmo2.{name}": value for name, value in metadata.items()}
    config = read_config(write_gguf(tmp_path / "3.gguf", "olmo2", metadata=metadata))
    assert config["architectures"] == ["Olmo3ForCausalLM"]
    local, whole = registry.read_config(config).layers
    assert (local.window, local.rope.kind) == (WINDOW, "default")
    assert (whole.window, whole.rope.kind, whole.rope.attention_factor) == (None, "yarn", 1.5)


def test_phi3_window_and_long_factors(tmp_path: Path) -> None:
    assert read_config(write_gguf(tmp_path / "a.gguf", "phi3"))["sliding_window"] == WINDOW
    none = {"phi3.attention.sliding_window": 0, "phi3.rope.scaling.original_context_length": 512}
    config = read_config(write_gguf(tmp_path / "b.gguf", "phi3", metadata=none))
    assert (config["sliding_window"], config["rope_scaling"]) == (None, None)
    factors = np.ones(HEAD_DIM // 2, np.float32)
    raw = {f"rope_factors_{kind}.weight": factors for kind in ("long", "short")}
    with pytest.raises(UnsupportedModelError, match=r"rope_factors_long.*rope_factors_short"):
        read_config(write_gguf(tmp_path / "c.gguf", "phi3", raw=raw))
    scaled = {"phi3.rope.scaling.attn_factor": 1.19}
    with pytest.raises(UnsupportedModelError, match=r"phi3\.rope\.scaling\.attn_factor"):
        read_config(write_gguf(tmp_path / "d.gguf", "phi3", metadata=scaled))


def test_every_end_of_generation_id(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    path = write_gguf(tmp_path / "m.gguf", metadata=ids)
    assert read_generation_config(open_gguf(path)) == {"eos_token_id": [2, 7]}
    tokens = ["a", "<end_of_turn>", "</s>", "<|endoftext|>", "<|end|>", "end"]
    path = write_gguf(tmp_path / "t.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    assert read_generation_config(open_gguf(path)) == {"eos_token_id": [2, 4, 1, 3]}


def test_every_end_of_llama3(tmp_path: Path) -> None:
    """The ids equal those of generation_config.json; instruct models' files store only the last."""
    tokens = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "a"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 3}
    path = write_gguf(tmp_path / "model.gguf", metadata=metadata)
    assert sorted(read_generation_config(open_gguf(path))["eos_token_id"]) == [1, 2, 3]


def test_biases_are_named_and_permuted(tmp_path: Path) -> None:
    expected = hf_tensors("llama", tied=True)
    for layer in range(LAYERS):
        for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            bias = np.arange(size * HEAD_DIM, dtype=np.float32)
            expected[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
    path = write_gguf(tmp_path / "m.gguf", tensors=expected)
    assert read_config(path)["attention_bias"] is True
    loaded = read_arrays(path)
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


# Fields that transformers' own import leaves at their defaults, although the file holds them.
UNREAD = {
    "llama": {"head_dim"},
    "qwen2": {"head_dim"},
    "qwen3": {"head_dim"},
    "qwen3moe": {"moe_intermediate_size"},
    "gemma3": {"query_pre_attn_scalar", "sliding_window_pattern"},
    "phi3": {"head_dim", "sliding_window"},
}


@pytest.mark.parametrize("arch", UNREAD)  # transformers reads only these architectures
def test_transformers_reads_the_same_model(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # transformers asks for a vocabulary
    vocabulary = {"tokenizer.ggml.tokens": ["a"] * VOCAB, "tokenizer.ggml.model": "gpt2"}
    path = write_gguf(tmp_path / "m.gguf", arch, hf_tensors(arch, tied=False), metadata=vocabulary)
    theirs, config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name), read_config(path)
    ours = type(theirs)(**config)
    expected, fields = theirs.to_dict(), ours.to_dict()
    described = {"architectures", "dtype", "_name_or_path", "torch_dtype", "mlp_bias"}
    for key in (fields.keys() | expected.keys()) - UNREAD[arch] - described:
        assert fields.get(key) == expected.get(key), key
    ours.pad_token_id = None  # phi3's default is outside this vocabulary
    model = AutoModelForCausalLM.from_config(ours)
    assert type(model).__name__ == config["architectures"][0]
    state = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    loaded = fuse_experts(stack_experts(read_arrays(path)))
    assert loaded.keys() == state.keys() == model.state_dict().keys()
    for name, array in loaded.items():
        assert array.shape == model.state_dict()[name].shape, name
        np.testing.assert_array_equal(array, state[name].float().numpy(), err_msg=name)


def fuse_experts(tensors: Arrays) -> Arrays:
    """transformers 5 stores all experts in two tensors: gates with ups, and downs."""
    fused = {name: array for name, array in tensors.items() if ".experts." not in name}
    for name, array in tensors.items():
        if name.endswith("experts.down_proj.weight"):
            fused[name.removesuffix(".weight")] = array
            names = [name.replace("down_proj", part) for part in ("gate_proj", "up_proj")]
            pair = np.concatenate([tensors[part] for part in names], axis=1)
            fused[name.replace("down_proj.weight", "gate_up_proj")] = pair
    return fused


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
    assert rope(yarn | {"llama.rope.scaling.yarn_attn_factor": 1.5})["attention_factor"] == 1.5
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
    assert read_arrays(path).keys() == hf_tensors("llama", tied=True).keys()


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


@pytest.mark.parametrize(("kind", "pooling"), [(0, None), (1, "mean"), (3, "last")])
def test_the_file_chooses_the_pooling(tmp_path: Path, kind: int, pooling: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.pooling_type": kind})
    options: Any = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(path, **options) as llm:
        assert llm.engine.input_processor.default_pooling == pooling
        found, right = llm.embed([[1, 2, 3]]), llm.embed([[1, 2, 3]], pooling or "last")
        assert found == right
        if pooling is not None:
            with pytest.raises(RequestError, match="embedding model"):
                llm.generate([[1]])


@pytest.mark.parametrize("kind", [2, 4])
def test_other_poolings_are_refused(tmp_path: Path, kind: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.pooling_type": kind})
    with pytest.raises(UnsupportedModelError, match=f"pooling_type {kind} is not supported"):
        find_checkpoint(str(path))


def test_missing_size_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.block_count": None})
    with pytest.raises(CheckpointError, match=r"llama\.block_count"):
        read_config(path)


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'falcon'; supported in GGUF: llama, qwen2"):
        read_config(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match="falcon"):
        list(list_gguf(tmp_path / "m.gguf"))


def test_unknown_tensor_and_type_are_refused_before_any_is_read(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}  # qwen3's, not llama's
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM has no tensor blk.0.attn_q_norm"):
        list(list_gguf(write_gguf(tmp_path / "a.gguf", raw=extra)))
    integers = {"blk.9.ffn_up.weight": np.ones((4, 4), np.int8)}
    with pytest.raises(UnsupportedModelError, match=r"blk.9.ffn_up.weight has type I8; supported"):
        list(list_gguf(write_gguf(tmp_path / "b.gguf", raw=integers)))


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


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen3moe"])
@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q5_0", "Q5_1"])
def test_pieces_are_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, quant: str
) -> None:
    """A piece may end within a tensor, but not within a head whose rows are permuted."""
    path = write_gguf(tmp_path / "m.gguf", arch, quant=quant)
    whole = read_arrays(path)
    monkeypatch.setattr(gguf_tensors, "PIECE_ELEMENTS", 3 * HIDDEN)
    num_pieces = {tensor.name: len(list(tensor.read())) for tensor in list_gguf(path)}
    assert num_pieces["model.embed_tokens.weight"] == VOCAB // 3
    assert num_pieces["model.layers.0.self_attn.q_proj.weight"] > 1
    pieces = read_arrays(path)
    for name, array in whole.items():
        np.testing.assert_array_equal(pieces[name], array, err_msg=name)


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q5_0", "Q5_1"])
def test_rows_of_some_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str) -> None:
    """A rank reads its own shard; in llama files the rows of each head are permuted."""
    path = write_gguf(tmp_path / "m.gguf", "llama", quant=quant)
    whole = read_arrays(path)
    for piece in (1, 1 << 20):
        monkeypatch.setattr(gguf_tensors, "PIECE_ELEMENTS", piece)
        for tensor in list_gguf(path):
            if re.search("[qk]_proj", tensor.name):
                rows = slice(HEAD_DIM, 2 * HEAD_DIM)
                array = np.concatenate(list(tensor.read((rows,))))
                np.testing.assert_array_equal(array, whole[tensor.name][rows])


@pytest.mark.parametrize("stacked", [False, True])
def test_one_tensor_in_memory_at_a_time(tmp_path: Path, stacked: bool) -> None:
    raw = {f"blk.{i}.ffn_up.weight": np.ones((512, 512), np.float32) for i in range(16)}
    if stacked:
        raw = {"blk.0.ffn_up_exps.weight": np.stack(list(raw.values()))}
    arch = "qwen3moe" if stacked else "llama"
    path = write_gguf(tmp_path / "m.gguf", arch, tensors={}, raw=raw)
    read_arrays(write_gguf(tmp_path / "warm.gguf"))
    tracemalloc.start()
    for tensor in list_gguf(path):
        for _array in tensor.read():
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 2**20  # sixteen tensors of 1 MiB; the last and the next may overlap
