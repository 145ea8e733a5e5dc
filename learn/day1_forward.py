"""Day 1: a forward pass, and greedy decoding without a cache.

A language model maps a list of tokens to a score for every token that could come next. We write
that map in plain torch, take the best token, append it, and ask again. The output is right, but
almost all of the work is done again and again.

    python learn/day1_forward.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common import Config, Model, Table, load_from_command_line, print_table, show, timed

PROMPT = "The first man on the moon was"
MAX_TOKENS = 16

# Attention of one layer: (layer index, q, k, v) -> output. All are [tokens, heads, head_dim], where
# k and v have fewer heads.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each token's vector to a root mean square of 1, then each element by its weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by angles that grow with each token's position.

    The product of a rotated query and a rotated key depends only on the distance between them.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half) / half)  # radians per position, fast to slow
    angles = positions[:, None, None] * frequencies  # [tokens, 1, half]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let each query look at its own and all earlier keys.

    k and v are [positions, kv_heads, head_dim]. The queries [queries, heads, head_dim] belong to
    the last of these positions; today, to all of them.
    """
    group_size = q.shape[1] // k.shape[1]  # query heads per kv head
    k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5  # [heads, queries, keys]
    key_positions = torch.arange(len(k))
    query_positions = key_positions[len(k) - len(q) :]
    is_future = key_positions[None, :] > query_positions[:, None]  # [queries, keys]
    weights = scores.masked_fill(is_future, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def project_qkv(
    config: Config, layer: dict[str, Tensor], x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's queries and keys (rotated by its position) and values."""
    q, k, v = (
        F.linear(x, layer[name]).view(len(x), -1, config.head_dim)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    return rope(q, positions, config.rope_theta), rope(k, positions, config.rope_theta), v


def mlp(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """Transform each token's vector separately: widen it, gate it, narrow it again."""
    gate, up = F.linear(x, layer["gate_proj"]), F.linear(x, layer["up_proj"])
    return F.linear(F.silu(gate) * up, layer["down_proj"])


def forward(model: Model, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Run tokens through all layers; return their hidden states [tokens, hidden_size].

    Only `attend` looks at other tokens; everything else treats each token separately. That is why
    this function stays the same for seven days: whatever we invent, we pass another `attend`.
    """
    config = model.config
    hidden = model.embedding[token_ids]  # [tokens, hidden_size]; each layer adds to it
    for index, layer in enumerate(model.layers):
        x = rms_norm(hidden, layer["input_layernorm"], config.norm_eps)
        q, k, v = project_qkv(config, layer, x, positions)
        hidden = hidden + F.linear(attend(index, q, k, v).flatten(1), layer["o_proj"])
        x = rms_norm(hidden, layer["post_attention_layernorm"], config.norm_eps)
        hidden = hidden + mlp(layer, x)
    return rms_norm(hidden, model.norm, config.norm_eps)


def compute_logits(model: Model, hidden: Tensor) -> Tensor:
    """Score every token of the vocabulary as the next one; return [tokens, vocab_size]."""
    return F.linear(hidden, model.lm_head)


def attend_to_input(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without a memory: it sees the tokens of this call only."""
    return attention(q, k, v)


@torch.inference_mode()  # we need no gradients
def next_token_logits(model: Model, token_ids: list[int]) -> Tensor:
    """Run the whole text; return the scores at its last position, which predict the next token."""
    positions = torch.arange(len(token_ids))
    hidden = forward(model, torch.tensor(token_ids), positions, attend_to_input)
    return compute_logits(model, hidden[-1:])[0]  # [vocab_size]


def generate(model: Model, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """Decode greedily: append the token with the best score until one ends the text."""
    token_ids = list(prompt_ids)
    for _ in range(max_tokens):
        token_ids.append(int(next_token_logits(model, token_ids).argmax()))
        if token_ids[-1] in model.config.eos_ids:
            break
    return token_ids[len(prompt_ids) :]


def main(model: Model, tokenizer: Any) -> None:
    config, prompt_ids = model.config, tokenizer.encode(PROMPT)
    print(
        f"The model: {config.num_layers} layers, {config.num_heads} query heads on "
        f"{config.num_kv_heads} kv heads of {config.head_dim} numbers, "
        f"{model.num_parameters:,} parameters.\n"
    )
    print(f"The prompt {PROMPT!r} is {len(prompt_ids)} tokens:")
    print_table(
        ["position", "token id", "text"],
        [(i, token_id, show(tokenizer, [token_id])) for i, token_id in enumerate(prompt_ids)],
    )

    print("\nEvery new token runs the whole text again ('#' is new, '.' has run before):")
    next_token_logits(model, prompt_ids)  # the first call is slower
    token_ids, num_seen = list(prompt_ids), 0
    table = Table(["token", "best", "second best", "ms", "tokens run"], [0, 16, 16, 4, 0])
    for step in range(1, MAX_TOKENS + 1):
        logits, milliseconds = timed(next_token_logits, model, token_ids)
        work = "." * num_seen + "#" * (len(token_ids) - num_seen)
        table.add(step, *top_two(tokenizer, logits), milliseconds, work)
        num_seen = len(token_ids)
        token_ids.append(int(logits.argmax()))
        if token_ids[-1] in config.eos_ids:
            break

    num_run = sum(len(row[-1]) for row in table.rows)
    num_needed = len(token_ids) - 1
    print(f"\nThe text: {show(tokenizer, token_ids)}")
    print(
        f"{len(table.rows)} new tokens ran {num_run} tokens through the model, but only "
        f"{num_needed} are different: {num_run / num_needed:.1f} times the work of day 2."
    )


def top_two(tokenizer: Any, logits: Tensor) -> list[str]:
    """Return the texts and probabilities of the two best tokens."""
    best = logits.softmax(dim=-1).topk(2)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [f"{show(tokenizer, [token_id])} {probability:.0%}" for token_id, probability in pairs]


# Exercises (solutions: learn/solutions/day1.py)
#
# 1. One forward pass predicts the next token at *every* position, but `next_token_logits` looks at
#    the last one only. Write `prompt_logprobs(model, token_ids)`: the log-probability that the
#    model gave to each token of a text, from the second on, in a single pass. Which word of
#    "The capital of France is Berlin" surprises the model most? (It is not the last one. Why?)
# 2. Qwen3 differs from Llama in one place: it normalizes each head of q and of k (RMSNorm with the
#    weights `q_norm` and `k_norm`, each [head_dim]) before it rotates them. Write a
#    `project_qkv` that works for both families. The test makes a tiny random Qwen3 to check it; for
#    a real one (a download), use `load_model(path, families=("qwen3",))`.

if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
