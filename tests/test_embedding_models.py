"""Embedding models: pooling, dense layers and bidirectional attention, as in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, Gemma3TextConfig, Gemma3TextModel, Qwen3Config

from nanovllm import LLM, SamplingParams
from nanovllm.errors import CheckpointError, ConfigError, RequestError, UnsupportedModelError
from tests.checkpoints import SIZES, TinyCheckpoint, make_checkpoint
from tests.devices import DEVICES, NEEDS_GPU, runner_of
from tests.test_edited_requests import OPTIONS
from tests.test_equals_transformers import make_prompts
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, INNER = SIZES["hidden_size"], 64
# In the order in which they run; type names differ between versions of sentence-transformers.
TYPES = {
    "": "sentence_transformers.models.Transformer",
    "1_Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "2_Dense": "sentence_transformers.models.Dense",
    "3_Dense": "sentence_transformers.models.Dense",
    "4_Normalize": "sentence_transformers.models.Normalize",
}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}
LAST = {"embedding_dimension": HIDDEN, "pooling_mode": "lasttoken"}
IDENTITY = {"activation_function": "torch.nn.modules.linear.Identity"}
PROMPTS = [[9], *make_prompts()[:8], [*range(100)]]


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def add_modules(folder: Path, pooling: dict[str, Any], *names: str) -> None:
    modules = [{"idx": i, "path": name, "type": TYPES[name]} for i, name in enumerate(names)]
    write(folder / "modules.json", modules)
    write(folder / "1_Pooling" / "config.json", pooling)


def add_dense(folder: Path, layer: nn.Linear) -> None:
    sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
    write(folder / "config.json", {**sizes, **IDENTITY})
    tensors = {f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like EmbeddingGemma's; its window is shorter than most prompts."""
    folder = tmp_path_factory.mktemp("gemma")
    config = Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_bidirectional_attention=True,
    )
    torch.manual_seed(1)
    model = Gemma3TextModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["architectures"] == ["Gemma3TextModel"]
    assert saved["sliding_window"] == 12
    add_modules(folder, MEAN, *TYPES)
    for name, layer in (
        ("2_Dense", nn.Linear(HIDDEN, INNER, bias=False)),
        ("3_Dense", nn.Linear(INNER, HIDDEN)),
    ):
        add_dense(folder / name, layer)
    return folder


@torch.inference_mode()
def wanted(folder: Path, prompt: list[int], pool: Callable[[Tensor], Tensor]) -> np.ndarray:
    """Return the unnormalized embedding of transformers' model, `pool` and the dense layers."""
    from safetensors.torch import load_file

    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    vector = pool(model(torch.tensor([prompt])).last_hidden_state[0])
    for path in sorted(folder.glob("*_Dense")):
        tensors = load_file(path / "model.safetensors")
        vector = nn.functional.linear(vector, tensors["linear.weight"], tensors.get("linear.bias"))
    return vector.numpy()


def mean(states: Tensor) -> Tensor:
    return states.mean(0)


def last(states: Tensor) -> Tensor:
    return states[-1]


def assert_close(vector: list[float], right: np.ndarray) -> None:
    assert len(vector) == len(right)
    assert np.abs(np.array(vector) - right).max() < 1e-4 * np.abs(right).max()


def embed(llm: LLM, prompts: Any, *options: Any) -> list[list[float]]:
    outputs = llm.embed(prompts, *options, normalize=False, use_tqdm=False)
    return [output.embedding for output in outputs]


@DEVICES
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 110, "depth": 1}])
def test_bidirectional_attention(gemma: Path, device: str, options: dict[str, Any]) -> None:
    """Runs twice; prompts must neither reuse cached blocks nor be split into chunks."""
    with LLM(gemma, device=device, **{**OPTIONS, **options}) as llm:
        sizes = []
        run = runner_of(llm).run
        runner_of(llm).run = lambda plan: (sizes.extend(plan.counts.tolist()), run(plan))[1]
        for _ in range(2):
            for prompt, vector in zip(PROMPTS, embed(llm, PROMPTS), strict=True):
                assert_close(vector, wanted(gemma, prompt, mean))
        assert sorted(sizes) == sorted(2 * [len(prompt) for prompt in PROMPTS])
        for prompt, vector in zip(PROMPTS, embed(llm, PROMPTS, "last"), strict=True):
            assert_close(vector, wanted(gemma, prompt, last))
        [unit] = llm.embed(PROMPTS[1], use_tqdm=False)
        assert np.linalg.norm(unit.embedding) == pytest.approx(1, abs=1e-6)


def test_windows_across_tiles(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's first and last queries see keys before and after the tile."""
    monkeypatch.setattr("nanovllm.attention.sdpa.QUERY_TILE", 7)
    with LLM(gemma, device="cpu", **OPTIONS) as llm:
        for prompt, vector in zip(PROMPTS, embed(llm, PROMPTS), strict=True):
            assert_close(vector, wanted(gemma, prompt, mean))


def test_bidirectional_attention_on_two_ranks(gemma: Path) -> None:
    with engines_of(2), LLM(gemma, device="cpu", **OPTIONS) as llm:
        for prompt, vector in zip(PROMPTS, embed(llm, PROMPTS), strict=True):
            assert_close(vector, wanted(gemma, prompt, mean))


def test_what_needs_causal_attention_is_refused(gemma: Path) -> None:
    options = {**OPTIONS, "max_num_batched_tokens": 40}
    with LLM(gemma, device="cpu", **options) as llm:
        with pytest.raises(RequestError, match="has 41 tokens, but only 40 fit"):
            llm.embed([1] * 41, use_tqdm=False)
        assert len(embed(llm, [[1] * 40] * 3)) == 3
        with pytest.raises(RequestError, match="embedding model: use embed, or /v1/embeddings"):
            llm.generate([1], SamplingParams(max_tokens=1), use_tqdm=False)
        with pytest.raises(RequestError, match="embedding model"):
            llm.score([1], [[2]])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
def test_other_backends_are_refused(gemma: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="'triton' has no bidirectional attention"):
        LLM(gemma, device=device, attention_backend="triton", **OPTIONS)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like Qwen3-Embedding's: it has no LM head, although embeddings are not tied."""
    folder = tmp_path_factory.mktemp("qwen")
    config = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)
    checkpoint: TinyCheckpoint = make_checkpoint(folder / "whole", config)
    checkpoint.model.model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", {**saved, "architectures": ["Qwen3ForCausalLM"]})
    add_modules(folder, LAST, "", "1_Pooling", "4_Normalize")
    return folder


def test_the_checkpoint_chooses_the_pooling(qwen: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen, tmp_path / "mean")
    add_modules(folder, MEAN, "", "1_Pooling")
    for path, pool in ((qwen, last), (folder, mean)):
        with LLM(path, device="cpu", **OPTIONS) as llm:
            for _ in range(2):  # the second time from the prefix cache
                for prompt, vector in zip(PROMPTS, embed(llm, PROMPTS), strict=True):
                    assert_close(vector, wanted(path, prompt, pool))
            for prompt, vector in zip(PROMPTS, embed(llm, PROMPTS, "mean"), strict=True):
                assert_close(vector, wanted(path, prompt, mean))
            with pytest.raises(RequestError, match="embedding model"):
                llm.generate([1], use_tqdm=False)


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "only the last token and"),
        ("1_Pooling/config.json", {**MEAN, "include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", [], "must hold a JSON object, not a list"),
        ("2_Dense/config.json", {"activation_function": "Tanh"}, "activation_function Tanh"),
        ("2_Dense/config.json", {}, "activation_function None"),
        ("modules.json", {}, "must hold a JSON list, not a dict"),
        ("modules.json", [{"path": ""}], "must list types and paths"),
        (
            "modules.json",
            [{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.LayerNorm", "path": ""}],
            "'LayerNorm'",
        ),
        ("modules.json", [{"type": "x.Pooling", "path": "missing"}], "cannot be read"),
    ],
)
def test_unsupported_modules_are_named(
    gemma: Path, tmp_path: Path, file: str, content: Any, match: str
) -> None:
    folder = shutil.copytree(gemma, tmp_path / "changed")
    write(folder / file, content)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=match):
        LLM(folder, device="cpu", **OPTIONS)


@pytest.mark.parametrize(
    ("names", "shape", "match"),
    [
        (
            ["weight", "scale"],
            [64, HIDDEN],
            r"must hold linear\.weight and optionally linear\.bias, not scale, w",
        ),
        (["linear.bias"], [64], r"must hold linear\.weight"),
        (["linear.weight"], [64, 9], "2_Dense: linear.weight has 9 inputs, not 48"),
        (["linear.weight"], [9, HIDDEN], "3_Dense: linear.weight has 64 inputs, not 9"),
    ],
)
def test_damaged_dense_layers_are_named(
    gemma: Path, tmp_path: Path, names: list[str], shape: list[int], match: str
) -> None:
    folder = shutil.copytree(gemma, tmp_path / "changed")
    tensors = {name: torch.zeros(shape) for name in names}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=match):
        LLM(folder, device="cpu", **OPTIONS)


def test_a_reranker_of_sentence_transformers_generates(tiny: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("qwen3").path, tmp_path / "reranker")
    write(
        folder / "modules.json",
        [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1_LogitScore"}],
    )
    with LLM(folder, device="cpu", **OPTIONS) as llm:
        assert llm.generate([1], use_tqdm=False)[0].token_ids
