"""Solutions of day 1.

PYTHONPATH=learn python learn/solutions/day1.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import day1_forward as day1
from common import Config, Model, load_from_command_line, print_table, show
from day1_forward import attend_to_input, compute_logits, forward, rms_norm, rope


# Exercise 1: keep the scores of every position, and look up the token that did come next.
@torch.inference_mode()
def prompt_logprobs(model: Model, token_ids: list[int]) -> list[float]:
    """Return the log-probability of each token of a text, from the second on."""
    ids = torch.tensor(token_ids)
    hidden = forward(model, ids, torch.arange(len(ids)), attend_to_input)
    logprobs = compute_logits(model, hidden[:-1]).log_softmax(dim=-1)  # [tokens - 1, vocab_size]
    return logprobs.gather(1, ids[1:, None])[:, 0].tolist()


# Exercise 2: replace this function in day1_forward.py.
def project_qkv(
    config: Config, layer: dict[str, Tensor], x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        F.linear(x, layer[name]).view(len(x), -1, config.head_dim)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if "q_norm" in layer:  # Qwen3; one weight serves all heads, because they are separate rows here
        q = rms_norm(q, layer["q_norm"], config.norm_eps)
        k = rms_norm(k, layer["k_norm"], config.norm_eps)
    return rope(q, positions, config.rope_theta), rope(k, positions, config.rope_theta), v


def main(model: Model, tokenizer: Any) -> None:
    token_ids = tokenizer.encode("The capital of France is Berlin")
    logprobs = prompt_logprobs(model, token_ids)
    rows = zip(token_ids[1:], logprobs, strict=True)
    table = [(show(tokenizer, [token_id]), round(logprob, 2)) for token_id, logprob in rows]
    print_table(["token", "logprob"], table)
    # After a single word, almost anything can follow.
    print(f"The most surprising token is {min(table, key=lambda row: row[1])[0]}.")

    # SmolLM2 with the norms of Qwen3. It was trained without them, so its text may get worse.
    ones = torch.ones(model.config.head_dim)
    layers = [{**layer, "q_norm": ones, "k_norm": ones} for layer in model.layers]
    day1.project_qkv = project_qkv
    for name, each in {"Llama": model, "Qwen3": replace(model, layers=layers)}.items():
        output_ids = day1.generate(each, token_ids, max_tokens=4)
        print(f"{name}: {show(tokenizer, token_ids + output_ids)}")


if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
