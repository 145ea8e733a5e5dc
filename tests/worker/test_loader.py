"""Every checkpoint format loads to the same tokens; errors name the invalid tensors."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("gguf")

import numpy as np

from benchmarks.engine.loading import load_in_process, write_checkpoint
from nanovllm import LLM, SamplingParams
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.checkpoint import stored_tensors as weights
from nanovllm.checkpoint.find import Checkpoint, find_checkpoint
from nanovllm.checkpoint.list_tensors import list_tensors
from nanovllm.checkpoint.stored_tensors import StoredTensor
from nanovllm.config import EngineConfig
from nanovllm.devices.choose import create_device
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.build import BuildContext, Layer
from nanovllm.layers.linear import MergedLinear
from nanovllm.models.registry import build_model, read_config
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker import load_model, loader
from tests.checkpoint import tiny_gguf
from tests.checkpoints import TinyCheckpoint
from tests.devices import DEVICES, cpu_device
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[3, 14, 15, 92, 65], list(range(20)), [7]]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
Tensors = dict[str, Tensor]
Tiny = Callable[[str], TinyCheckpoint]

CPU = torch.device("cpu")
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def run(path: Path, **options: Any) -> list[list[int]]:
    sizes = {"kvcache_block_size": 16, "max_num_seqs": 4, "max_model_len": 64}
    with LLM(path, skip_tokenizer_init=True, **sizes, **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def read_tensors(checkpoint: TinyCheckpoint) -> Tensors:
    return dict(load_file(checkpoint.path / "model.safetensors"))


def make_folder(folder: Path, checkpoint: TinyCheckpoint, tensors: Tensors, **config: Any) -> Path:
    """Write a checkpoint's config, with changes, and the given tensors to a folder."""
    folder.mkdir()
    whole = json.loads((checkpoint.path / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Case:
    checkpoint: TinyCheckpoint
    tensors: Tensors
    tokens: list[list[int]]  # generated from its single safetensors file


GGUF_NAMES = {  # keyed by model_type
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
VARIANTS = ["qwen3", "llama", "qwen3-tied", "llama-tied-rope", "llama-mha-bias"]


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tiny: Tiny) -> Case:
    checkpoint = tiny(request.param)
    return Case(checkpoint, read_tensors(checkpoint), run(checkpoint.path))


@pytest.fixture
def llama(tiny: Tiny) -> TinyCheckpoint:
    return tiny("llama")


def test_safetensors_equal_transformers(case: Case) -> None:
    assert case.tokens == case.checkpoint.answers(PROMPTS, 8)


def split_in_three(tensors: Tensors) -> list[Tensors]:
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[i::3]} for i in range(3)]


def test_sharded_safetensors(case: Case, tmp_path: Path) -> None:
    shards = split_in_three(case.tensors)
    shutil.copy(case.checkpoint.path / "config.json", tmp_path)
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-00003.safetensors"
        save_file(shard, tmp_path / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(tmp_path) == case.tokens


def test_pytorch_bin(case: Case, tmp_path: Path) -> None:
    path = bin_folder(tmp_path / "whole", case.checkpoint)
    torch.save(case.tensors, path / "pytorch_model.bin")
    assert run(path) == case.tokens
    path = bin_folder(tmp_path / "sharded", case.checkpoint)
    for i, shard in enumerate(split_in_three(case.tensors), 1):
        torch.save(shard, path / f"pytorch_model-{i:05}-of-00003.bin")
    assert run(path) == case.tokens


def write_gguf(path: Path, checkpoint: TinyCheckpoint, quant: str = "F32") -> Path:
    """Write a checkpoint as converters do; projections are quantized."""
    config = checkpoint.model.config
    arch = GGUF_NAMES.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "expert_count": getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
    }
    arrays = {name: tensor.numpy() for name, tensor in read_tensors(checkpoint).items()}
    raw: dict[str, Any] = {}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.type"] = "yarn"
        values["rope.scaling.factor"] = rope["factor"]
        trained = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = trained
    if rope["rope_type"] == "llama3":
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        factors = plain / checkpoint.model.model.rotary_emb.inv_freq
        raw["rope_freqs.weight"] = factors.numpy()
    if arch == "mistral3":
        values["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        values["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if arch == "gemma2":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            values[key] = getattr(config, key)
    if arch == "glm4":
        values["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if arch.startswith("qwen35"):
        values |= delta_net_values(config)
        raw[f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight"] = np.ones((3, 3), np.float32)
        arrays = dict(as_in_gguf(config, *each) for each in arrays.items())
    if arch == "granite":
        values["attention.scale"] = config.attention_multiplier
        values["embedding_scale"] = config.embedding_multiplier
        values["residual_scale"] = config.residual_multiplier
        values["logit_scale"] = config.logits_scaling
    if config.model_type == "olmo3":
        values["rope.scaling.attn_factor"] = rope["attention_factor"]
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        values["attention.sliding_window_pattern"] = kinds
    metadata = {f"{arch}.{key}": value for key, value in values.items()}
    metadata |= dict.fromkeys(("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"))
    sizes = values["block_count"], config.num_attention_heads, config.num_key_value_heads
    return tiny_gguf.write_gguf(path, arch, arrays, quant, metadata, raw, sizes=sizes)


def delta_net_values(config: Any) -> dict[str, Any]:
    """Return the keys of Qwen3.5, with a layer for multi-token prediction that is not run."""
    value_dim, num_heads = config.linear_value_head_dim, config.linear_num_value_heads
    factor = config.rope_parameters["partial_rotary_factor"]
    return {
        "block_count": config.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": num_heads,
        "ssm.inner_size": value_dim * num_heads,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "rope.dimension_count": int(config.head_dim * factor),
        "rope.dimension_sections": [1, 1, 0, 0],
        "expert_shared_feed_forward_length": getattr(
            config, "shared_expert_intermediate_size", None
        ),
    }


def as_in_gguf(config: Any, name: str, array: Any) -> tuple[str, Any]:
    """Rename and change a tensor as converters do: value head i then shares key head i % keys."""
    keys = config.linear_num_key_heads
    group = config.linear_num_value_heads // keys
    first = 2 * keys * config.linear_key_head_dim

    def tile(heads: Any) -> Any:
        grouped = heads.reshape(keys, group, -1, *heads.shape[1:])
        return grouped.swapaxes(0, 1).reshape(heads.shape)

    part = name.removesuffix(".weight").split(".")[-1]
    if part == "A_log":
        return name, tile(-np.exp(array))
    if part == "dt_bias":
        return name.replace("dt_bias", "dt_proj.bias"), tile(array)
    if part in ("in_proj_qkv", "conv1d"):
        array = np.concatenate((array[:first], tile(array[first:])))
    elif part in ("in_proj_z", "in_proj_b", "in_proj_a"):
        array = tile(array)
    elif part == "out_proj":
        array = np.ascontiguousarray(tile(np.ascontiguousarray(array.T)).T)
    elif part == "shared_expert_gate":
        array = array[0]
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        array = array + 1
    return name, array.squeeze(1) if part == "conv1d" else array


GGUF_FAMILIES = [
    "qwen2",
    "qwen3-yarn",
    "qwen3-moe",
    "gemma3-six",
    "phi3",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "glm4",
    "gemma2",
    "ministral3",
    "qwen3.5",
    "qwen3.5-moe",
]


def test_gguf(case: Case, tmp_path: Path) -> None:
    assert run(write_gguf(tmp_path / "model.gguf", case.checkpoint)) == case.tokens


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_gguf_of_every_family(name: str, tiny: Tiny, tmp_path: Path) -> None:
    checkpoint = tiny(name)
    want = checkpoint.answers(PROMPTS, 8)
    assert run(write_gguf(tmp_path / "model.gguf", checkpoint)) == want


@pytest.mark.parametrize("is_new", [False, True])
def test_the_text_model_of_a_multimodal_one(tiny: Tiny, tmp_path: Path, is_new: bool) -> None:
    """Names and config of Mistral 3 as published, and as transformers 5 saves them."""
    checkpoint = tiny("ministral3")
    prefix = "model.language_model." if is_new else "language_model.model."
    vision = "model." if is_new else ""
    tensors = {
        name.replace("model.", prefix, 1): tensor
        for name, tensor in read_tensors(checkpoint).items()
    }
    if not is_new:
        tensors["language_model.lm_head.weight"] = tensors.pop(HEAD)
    for name in ("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"):
        tensors[f"{vision}{name}"] = torch.ones(3)
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {**checkpoint.model.config.to_dict(), "architectures": None},
        "vision_config": {"hidden_size": 1024, "head_dim": 64},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    assert run(tmp_path) == checkpoint.answers(PROMPTS, 8)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_published_names_of_qwen3_5(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """The text model of a multimodal one, with stacked experts, and MTP layers to be skipped."""
    checkpoint = tiny(name)
    config = checkpoint.model.config
    head, text = {"lm_head.weight"}, "model.language_model."
    stored = read_tensors(checkpoint)
    if name == "qwen3.5-moe":
        stored = {key: value for key, value in stored.items() if ".experts." not in key}
        stored |= {
            k: v.detach() for k, v in checkpoint.model.named_parameters() if ".experts." in k
        }
    tensors = {
        key if key in head else key.replace("model.", text, 1): tensor.clone()
        for key, tensor in stored.items()
    }
    tensors |= {"model.visual.norm.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)}
    architecture = type(checkpoint.model).__name__.replace("ForCausalLM", "")
    whole = {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "text_config": config.to_dict(),
        "vision_config": {"hidden_size": 1024, "head_dim": 64},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    save_file(tensors, tmp_path / "model.safetensors")
    assert run(tmp_path) == checkpoint.answers(PROMPTS, 8)


def test_a_bfloat16_checkpoint_loads_in_float32(llama: TinyCheckpoint, tmp_path: Path) -> None:
    """Stored weights are upcast exactly, so the rounded weights give the same tokens."""
    rounded = {name: tensor.bfloat16() for name, tensor in read_tensors(llama).items()}
    narrow = make_folder(tmp_path / "narrow", llama, rounded, dtype="bfloat16")
    wide = {name: tensor.float() for name, tensor in rounded.items()}
    want = run(make_folder(tmp_path / "wide", llama, wide))
    assert run(narrow, dtype="float32") == want


@pytest.mark.parametrize(
    "name", [NORM, Q_PROJ, "lm_head.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_a_missing_tensor_is_named(llama: TinyCheckpoint, tmp_path: Path, name: str) -> None:
    tensors = read_tensors(llama)
    del tensors[name]
    path = make_folder(tmp_path / "m", llama, tensors)
    with pytest.raises(CheckpointError, match=f"missing.*{name}"):
        run(path)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", Q_PROJ.replace("weight", "bias"), "extra"]
)
def test_a_tensor_without_a_place_is_named(
    llama: TinyCheckpoint, tmp_path: Path, name: str
) -> None:
    path = make_folder(tmp_path / "m", llama, read_tensors(llama) | {name: torch.ones(4)})
    with pytest.raises(CheckpointError, match=f"'{name}' is not part of the model"):
        run(path)


def write_shards(folder: Path, checkpoint: TinyCheckpoint, shards: list[Tensors]) -> Path:
    folder.mkdir()
    shutil.copy(checkpoint.path / "config.json", folder)
    for i, shard in enumerate(shards, 1):
        save_file(shard, folder / f"model-{i:05}.safetensors")
    return folder


def test_a_problem_names_its_shard(llama: TinyCheckpoint, tmp_path: Path) -> None:
    shards = split_in_three(read_tensors(llama))
    extra = [*shards[:2], shards[2] | {"extra": torch.ones(4)}]
    with pytest.raises(
        CheckpointError, match=r"model-00003.safetensors: tensor 'extra' is not part"
    ):
        run(write_shards(tmp_path / "extra", llama, extra))
    name = next(iter(shards[1]))
    odd = [shards[0], shards[1] | {name: torch.ones(1, 2, 3)}, shards[2]]
    with pytest.raises(CheckpointError, match=rf"model-00002.safetensors: tensor '{name}' has sh"):
        run(write_shards(tmp_path / "odd", llama, odd))
    twice = [*shards[:2], shards[2] | {name: shards[1][name]}]
    expected = rf"-00003.safetensors: tensor '{name}' appears twice, also in .*-00002.safetensors"
    with pytest.raises(CheckpointError, match=expected):
        run(write_shards(tmp_path / "twice", llama, twice))
    path = write_shards(tmp_path / "broken", llama, shards)
    broken = path / "model-00002.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002.safetensors is not a readable"):
        run(path)


def test_many_problems_are_counted(llama: TinyCheckpoint, tmp_path: Path) -> None:
    tensors = read_tensors(llama)
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    with pytest.raises(CheckpointError) as error:
        run(make_folder(tmp_path / "m", llama, kept | {"a": torch.ones(1), "b": torch.ones(1)}))
    problems = str(error.value).split("; ")
    assert "'a' is not part of the model" in problems[0]
    assert "'b' is not part of the model" in problems[1]
    assert all("layers.1." in problem and "missing" in problem for problem in problems[2:5])
    assert problems[5:] == [f"and {len(tensors) - len(kept) - 3} more"]


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (NORM, lambda tensor: tensor[:-1].clone()),
        (NORM, lambda tensor: tensor[:1].clone()),  # would broadcast
        (Q_PROJ, transposed),
        (Q_PROJ, lambda tensor: tensor[:1].clone()),
        ("model.embed_tokens.weight", lambda tensor: torch.cat((tensor, tensor))),
    ],
    ids=["norm-short", "norm-broadcast", "q-transposed", "q-broadcast", "embedding-long"],
)
def test_a_wrong_shape_is_named(
    llama: TinyCheckpoint, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    tensors = read_tensors(llama)
    tensors[name] = change(tensors[name])
    path = make_folder(tmp_path / "m", llama, tensors)
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[.*expected \["):
        run(path)


def test_a_doubled_tensor_is_named(llama: TinyCheckpoint, tmp_path: Path) -> None:
    tensors = read_tensors(llama)
    path = make_folder(tmp_path / "m", llama, tensors)
    (path / "model.safetensors").rename(path / "a.safetensors")
    save_file({NORM: tensors[NORM]}, path / "b.safetensors")
    with pytest.raises(CheckpointError, match=f"'{NORM}' appears twice"):
        run(path)


@pytest.mark.parametrize("variant", ["llama-tied-rope", "qwen3-tied"])
def test_a_stored_head_overrides_tie_word_embeddings(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    """As in transformers, a head is tied if config.json says so and no other head is stored."""
    checkpoint = tiny(variant)
    tensors = read_tensors(checkpoint)
    assert HEAD not in tensors
    tensors[HEAD] = tensors["model.embed_tokens.weight"].clone()
    assert run(make_folder(tmp_path / "same", checkpoint, tensors)) == run(checkpoint.path)
    tensors[HEAD] = tensors[HEAD].roll(1, 0)
    path = make_folder(tmp_path / "other", checkpoint, tensors)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    want = replace(checkpoint, path=path, model=model).answers(PROMPTS, 8)
    assert run(path) == want != run(checkpoint.path)
    with engines_of(2):
        assert run(path) == want
    assert run(path, model_impl="transformers") == want


@pytest.mark.parametrize("variant", ["qwen3-tied", "gemma3", "qwen3-moe"])
def test_a_model_may_be_stored_without_its_head(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    """Embedding models are stored like this, whether or not their architecture says so."""
    checkpoint = tiny(variant)
    body = checkpoint.model.model
    body.save_pretrained(tmp_path / "body")
    tensors = load_file(tmp_path / "body" / "model.safetensors")
    assert "embed_tokens.weight" in tensors
    if not checkpoint.model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = read_tensors(checkpoint)["lm_head.weight"]
    for index, names in enumerate(([type(body).__name__], [type(checkpoint.model).__name__])):
        path = make_folder(tmp_path / str(index), checkpoint, tensors, architectures=names)
        assert run(path) == run(checkpoint.path)


SPECIAL = {  # a tensor that only one family has
    "gemma3": "model.layers.1.pre_feedforward_layernorm.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "phi3": "model.layers.0.self_attn.qkv_proj.weight",
    "qwen2": "model.layers.0.self_attn.k_proj.bias",
    "qwen3-moe": "model.layers.0.mlp.gate.weight",
    "qwen3-moe-mixed": "model.layers.0.mlp.experts.4.up_proj.weight",
}


@pytest.mark.parametrize(("family", "name"), list(SPECIAL.items()))
def test_what_is_special_is_loaded_as_strictly(
    tiny: Tiny, tmp_path: Path, family: str, name: str
) -> None:
    checkpoint = tiny(family)
    tensors = read_tensors(checkpoint)
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=f"missing.*{re.escape(name)}"):
        run(make_folder(tmp_path / "missing", checkpoint, rest))
    short = tensors | {name: tensors[name][:-1].clone()}
    with pytest.raises(CheckpointError, match=f"'{re.escape(name)}' has shape"):
        run(make_folder(tmp_path / "short", checkpoint, short))
    extra = re.sub(r"layers\.\d", "layers.2", name)
    with pytest.raises(CheckpointError, match=f"'{re.escape(extra)}' is not part of the model"):
        run(make_folder(tmp_path / "extra", checkpoint, tensors | {extra: tensors[name].clone()}))


def test_derived_buffers_are_ignored(llama: TinyCheckpoint, tmp_path: Path) -> None:
    tensors = read_tensors(llama)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)
    assert run(make_folder(tmp_path / "m", llama, tensors)) == run(llama.path)


@pytest.mark.parametrize("name", ["MambaForCausalLM", "LlamaForSequenceClassification"])
def test_an_unsupported_architecture_lists_the_supported(
    llama: TinyCheckpoint, tmp_path: Path, name: str
) -> None:
    path = make_folder(tmp_path / "m", llama, read_tensors(llama), architectures=[name])
    match = f"'{name}'.*LlamaForCausalLM, .*Qwen3ForCausalLM"
    with pytest.raises(UnsupportedModelError, match=match):
        run(path)


class Trap:
    """Unpickling this calls a function, as a malicious file would."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def bin_folder(folder: Path, checkpoint: TinyCheckpoint, content: bytes | None = None) -> Path:
    folder.mkdir()
    shutil.copy(checkpoint.path / "config.json", folder)
    if content is not None:
        (folder / "pytorch_model.bin").write_bytes(content)
    return folder


def test_pickled_code_is_refused_and_never_runs(llama: TinyCheckpoint, tmp_path: Path) -> None:
    path, touched = bin_folder(tmp_path / "m", llama), tmp_path / "touched"
    torch.save({**read_tensors(llama), "trap": Trap(touched)}, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        run(path)
    assert not touched.exists()


@pytest.mark.parametrize("kind", ["empty", "text", "pickle", "truncated"])
def test_a_broken_bin_file_is_named(llama: TinyCheckpoint, tmp_path: Path, kind: str) -> None:
    whole = tmp_path / "whole.bin"
    torch.save(read_tensors(llama), whole)
    content = {
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "pickle": pickle.dumps({"a": 1}),
        "truncated": whole.read_bytes()[:-2000],
    }[kind]
    path = bin_folder(tmp_path / "m", llama, content)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        run(path)


@pytest.mark.parametrize("content", [[torch.ones(2)], {"model.norm.weight": "text"}, torch.ones(2)])
def test_a_bin_file_without_a_state_dict_is_named(
    llama: TinyCheckpoint, tmp_path: Path, content: Any
) -> None:
    path = bin_folder(tmp_path / "m", llama)
    torch.save(content, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin|model.norm.weight"):
        run(path)


def test_a_bin_file_in_the_old_format_loads(llama: TinyCheckpoint, tmp_path: Path) -> None:
    path = bin_folder(tmp_path / "m", llama)
    tensors = read_tensors(llama)
    torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert run(path) == run(llama.path)


@pytest.mark.parametrize("size", [0, 7, 100, -50])
def test_a_broken_safetensors_file_is_named(
    llama: TinyCheckpoint, tmp_path: Path, size: int
) -> None:
    whole = (llama.path / "model.safetensors").read_bytes()
    path = make_folder(tmp_path / "m", llama, {})
    (path / "model.safetensors").write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        run(path)


def test_the_log_says_how_fast(llama: TinyCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nanovllm.worker.loader"):
        run(llama.path)
    assert re.search(r"Loaded 0\.\d+ GB of weights in \d+\.\d s, \d+\.\d GB/s", caplog.text)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_arrive_in_place(device: str, dtype: torch.dtype) -> None:
    """Several threads convert pieces and copy them into rows that may not be contiguous."""
    place, rows = create_device(EngineConfig("none", device=device)), torch.randn(64, 96).bfloat16()
    whole = torch.zeros(64, 128, dtype=dtype, device=place.torch_device)
    slot = whole[:, 16:112]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(place.fill, slot.split(4), rows.split(4)))
    assert torch.equal(slot.cpu(), rows.to(dtype))
    assert not whole[:, :16].any()
    assert not whole[:, 112:].any()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_beyond_the_weights_is_a_few_pieces(tmp_path: Path) -> None:
    """A memory map of the 200 MB file that stays open would count in full beside the weights."""
    write_checkpoint(tmp_path, gigabytes=0.2, num_shards=1)
    load = load_in_process(tmp_path, "bfloat16", "cpu")
    assert load.weight_bytes > 0.19e9
    assert load.peak_bytes - load.held_bytes - load.weight_bytes < 0.1e9
    share = load_in_process(tmp_path, "bfloat16", "cpu", num_ranks=4)
    assert share.weight_bytes < 0.3 * load.weight_bytes
    assert share.peak_bytes - share.held_bytes - share.weight_bytes < 0.1e9


class ReadBytes:
    """Counts the bytes that are read from a checkpoint's tensors."""

    def __init__(self) -> None:
        self.num_bytes: Counter[str] = Counter()

    def list_weights(self, checkpoint: Checkpoint, expected: object) -> list[StoredTensor]:
        return [
            replace(tensor, read=partial(self.read, tensor)) for tensor in list_tensors(checkpoint)
        ]

    def read(self, tensor: StoredTensor, index: weights.Index) -> Iterator[Tensor]:
        for rows in tensor.read(index):
            self.num_bytes[tensor.name] += rows.nbytes
            yield rows


@pytest.mark.parametrize("variant", ["llama", "phi3", "qwen3-moe"])
def test_a_rank_reads_its_share_alone(tiny: Tiny, variant: str) -> None:
    checkpoint = find_checkpoint(str(tiny(variant).path), need_tokenizer=False)
    model_config = read_config(checkpoint.config)
    whole = {tensor.name: math.prod(tensor.shape) for tensor in list_tensors(checkpoint)}
    shares: Counter[str] = Counter()
    for rank in range(4):
        build = BuildContext(CPU, torch.float32, SdpaAttention(16), TorchOps(), TPGroup(rank, 4))
        model, reads = build_model(model_config, 64, build), ReadBytes()
        held = sum(parameter.numel() for parameter in model.parameters())
        with mock.patch.object(loader, "list_weights", reads.list_weights):
            loader.load_weights(model, checkpoint, cpu_device())
        assert sum(reads.num_bytes.values()) == 4 * held
        shares += reads.num_bytes
    for name, size in whole.items():
        copies = 1
        if "norm" in name or name.endswith("mlp.gate.weight"):
            copies = 4
        elif re.search("(k|v)_proj", name):
            copies = 2  # two KV heads, replicated over four ranks
        if "qkv_proj" not in name:
            assert shares[name] == 4 * copies * size, name


@pytest.mark.parametrize("variant", ["llama", "qwen3-tied", "qwen3-moe"])
def test_a_layer_is_packed_when_its_last_tensor_is_there(
    tiny: Tiny, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not packed earlier, and no reference to the unpacked weights remains."""
    stored = read_tensors(tiny(variant))
    model_config = read_config(find_checkpoint(str(tiny(variant).path)).config)
    build = BuildContext(CPU, torch.float32, SdpaAttention(16), TorchOps())
    model = build_model(model_config, 64, build)
    layers = loader.LoadingLayers(model, cpu_device())
    missing = {
        layer: set(names)
        for path, layer in model.named_modules()
        if isinstance(layer, Layer) and (names := layer.expected_tensors(path))
    }
    packed: list[Layer] = []
    pack = loader.LoadingLayers._process

    def note(self: loader.LoadingLayers, layer: Layer) -> None:
        packed.append(layer)
        pack(self, layer)

    monkeypatch.setattr(loader.LoadingLayers, "_process", note)
    for name in stored:
        layers.loaded(name)
        assert name not in layers.expected
        for names in missing.values():
            names.discard(name)
        assert set(packed) == {layer for layer, names in missing.items() if not names}
    head = model.lm_head
    assert (head in packed) == (not head.is_tied)
    layers.process_rest()
    assert len(packed) == len(set(packed))
    assert head in packed
    assert not any(hasattr(layer, "weight") for layer in packed if isinstance(layer, MergedLinear))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("show_progress", [False, True])
def test_a_bar_at_a_terminal(
    llama: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, show_progress: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    checkpoint = find_checkpoint(str(llama.path), need_tokenizer=False)
    build = BuildContext(CPU, torch.float32, SdpaAttention(16), TorchOps())
    model = build_model(read_config(checkpoint.config), 64, build)
    loader.load_weights(model, checkpoint, cpu_device(), show_progress=show_progress)
    assert ("Loading weights" in sys.stderr.getvalue()) == show_progress  # type: ignore[attr-defined]


def test_a_closed_stderr_has_no_bar(llama: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    want = run(llama.path)
    monkeypatch.setattr(sys, "stderr", None)
    assert run(llama.path) == want
    with LLM(llama.path, skip_tokenizer_init=True, device="cpu", num_kvcache_blocks=8) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=2))


def test_only_the_first_rank_draws_a_bar(
    llama: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, bool]] = []

    def load(model: Any, checkpoint: Any, device: Any, show_progress: bool) -> None:
        shown.append((threading.current_thread().name, show_progress))
        loader.load_weights(model, checkpoint, device, show_progress)

    monkeypatch.setattr(load_model, "load_weights", load)
    with engines_of(2):
        run(llama.path)
    assert sorted(shown) == [("rank 0_0", True), ("rank 1_0", False)]


@pytest.mark.parametrize(
    "variant", ["llama", "qwen3-moe", pytest.param("phi3", marks=pytest.mark.slow)]
)
def test_ranks_load_what_one_worker_loads(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    """In GGUF, the rows of llama's heads are permuted and experts are stacked."""
    checkpoint = tiny(variant)
    want = run(checkpoint.path)
    path = bin_folder(tmp_path / "bin", checkpoint)
    torch.save(read_tensors(checkpoint), path / "pytorch_model.bin")
    for stored in (path, write_gguf(tmp_path / "model.gguf", checkpoint)):
        with engines_of(4):
            assert run(stored) == want


def test_ranks_name_what_is_odd(llama: TinyCheckpoint, tmp_path: Path) -> None:
    """Errors show the stored shapes, not those of a shard."""
    tensors = read_tensors(llama)
    half = tensors | {Q_PROJ: tensors[Q_PROJ][:48].clone()}
    path = make_folder(tmp_path / "half", llama, half)
    with (
        engines_of(2),
        pytest.raises(CheckpointError, match=r"q_proj.* has shape \[48, 48\], expected \[96, 48\]"),
    ):
        run(path)
    path = make_folder(tmp_path / "extra", llama, tensors | {"extra": torch.ones(4)})
    with engines_of(2), pytest.raises(CheckpointError, match="'extra' is not part of the model"):
        run(path)
    del tensors[NORM]
    path = make_folder(tmp_path / "missing", llama, tensors)
    with engines_of(2), pytest.raises(CheckpointError, match=f"'{NORM}' is missing"):
        run(path)
