"""Helpers for every day, which none is about: load a model and its tokenizer, print a table.

This is the only file in `learn/` that uses nanovllm, and only for reading checkpoints.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanovllm.checkpoint.find import Checkpoint, eos_token_ids, find_checkpoint
from nanovllm.checkpoint.list_tensors import list_tensors
from nanovllm.checkpoint.tokenizer import load_tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama model, with SmolLM2-135M's in the comments."""

    vocab_size: int  # 49152
    hidden_size: int  # 576 numbers represent a token between two layers
    num_layers: int  # 30
    num_heads: int  # 9 query heads ...
    num_kv_heads: int  # ... share 3 key/value heads
    head_dim: int  # 64
    norm_eps: float  # 1e-5, which avoids a division by zero
    rope_theta: float  # 100000.0, the base of the rotary position embedding
    eos_ids: frozenset[int]  # any of these tokens ends a text


@dataclass(frozen=True)
class Model:
    """Sizes and weights; every weight is a float32 tensor [outputs, inputs] on the CPU."""

    config: Config
    embedding: Tensor  # [vocab_size, hidden_size]
    # One dict per layer: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj,
    # input_layernorm, post_attention_layernorm.
    layers: list[dict[str, Tensor]]
    norm: Tensor  # [hidden_size], the norm after the last layer
    lm_head: Tensor  # [vocab_size, hidden_size]; SmolLM2 uses its embedding for this too

    @property
    def num_parameters(self) -> int:
        weights = [self.embedding, self.norm, *(w for layer in self.layers for w in layer.values())]
        if self.lm_head is not self.embedding:
            weights.append(self.lm_head)
        return sum(weight.numel() for weight in weights)


def load_from_command_line(description: str | None) -> tuple[Model, Any]:
    """Return the model and tokenizer that `--model` names; by default, SmolLM2-135M-Instruct."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="a Hugging Face folder or a .gguf file (Llama models)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # one core, as in docs/learn: steadier times, clearer gains
    return load_model(args.model), load_tokenizer(find_checkpoint(args.model))


def load_model(path: str, families: Sequence[str] = ("llama",)) -> Model:
    """Read a checkpoint; the quantized weights of a GGUF file are dequantized."""
    checkpoint = find_checkpoint(path)
    config = read_config(checkpoint, families)
    weights = {
        stored.name: torch.cat([rows.to(torch.float32, copy=True) for rows in stored.read()])
        for stored in list_tensors(checkpoint)
    }
    layers: list[dict[str, Tensor]] = [{} for _ in range(config.num_layers)]
    for name, weight in weights.items():
        if name.startswith("model.layers."):  # such as model.layers.7.self_attn.q_proj.weight
            _, _, index, *_, short_name, _ = name.split(".")
            layers[int(index)][short_name] = weight
    embedding = weights["model.embed_tokens.weight"]
    lm_head = weights.get("lm_head.weight", embedding)
    return Model(config, embedding, layers, weights["model.norm.weight"], lm_head)


def read_config(checkpoint: Checkpoint, families: Sequence[str]) -> Config:
    """Read the sizes from config.json, or from a GGUF header in the same layout."""
    config = checkpoint.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_plain = (
        config["model_type"] in families
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and not (config.get("attention_bias") or config.get("mlp_bias") or checkpoint.quantization)
    )
    if not is_plain:
        raise SystemExit(
            f"{checkpoint.path} is a {config['model_type']} model; these programs only run plain "
            f"models of {', '.join(families)}: no RoPE scaling, biases or quantized safetensors"
        )
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    return Config(
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        norm_eps=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        eos_ids=frozenset(eos_token_ids(checkpoint)),
    )


def timed(function: Callable[..., T], *args: Any) -> tuple[T, int]:
    """Call a function; return its result and the milliseconds that it took, at least 1."""
    began = time.perf_counter()
    result = function(*args)
    return result, max(round(1000 * (time.perf_counter() - began)), 1)


def best_time(function: Callable[..., object], *args: Any) -> int:
    """Return the milliseconds of the fastest of three calls, which was disturbed least."""
    return min(timed(function, *args)[1] for _ in range(3))


class Table:
    """Prints rows as they are added; numbers are right-aligned, texts left-aligned."""

    def __init__(self, header: Sequence[str], widths: Sequence[int]) -> None:
        """Set the widths of the columns; each is at least as wide as its heading."""
        self.header = header
        self.widths = [max(len(name), width) for name, width in zip(header, widths, strict=True)]
        self.rows: list[Sequence[Any]] = []

    def add(self, *row: object) -> None:
        if not self.rows:
            self._print(self.header, row)
            self._print(["-" * width for width in self.widths], row)
        self.rows.append(row)
        self._print([str(cell) for cell in row], row)

    def _print(self, cells: Sequence[str], row: Sequence[object]) -> None:
        """Print some cells, aligned like those of `row`."""
        padded = [
            text.ljust(width) if isinstance(cell, str) else text.rjust(width)
            for text, width, cell in zip(cells, self.widths, row, strict=True)
        ]
        print("  " + "  ".join(padded).rstrip(), flush=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table whose columns are as wide as necessary."""
    rows = list(rows)
    table = Table(header, [max(len(str(row[i])) for row in rows) for i in range(len(header))])
    for row in rows:
        table.add(*row)


def show(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of some tokens in quotes, so that leading spaces and newlines are visible."""
    return repr(tokenizer.decode(token_ids))
