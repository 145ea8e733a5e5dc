"""Solutions of day 6.

PYTHONPATH=learn python learn/solutions/day6.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common import Model, load_from_command_line
from day1_forward import next_token_logits
from day6_sampling import PROMPTS, SamplingParams, sample, sampling_probs


# Exercise 1: only the maximum depends on several tokens, so a GPU needs one pass over the logits.
# And if the vocabulary is sharded over several GPUs, they only compare their best tokens.
def uniform_per_token(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Return a number in (0, 1) for each token; it depends on the arguments alone."""
    # As in `uniform`, but modulo 2**32: int64 may overflow, but keeps the lower bits.
    bits = (seed * 0x85EBCA6B + position * 0xC2B2AE35) % 2**32 + token_ids * 0x9E3779B1 % 2**32
    for factor in (0x7FEB352D, 0x846CA68B):
        bits = ((bits ^ bits >> 16) * factor) % 2**32
    return ((bits ^ bits >> 16).double() + 0.5) / 2**32


def sample_gumbel(logits: Tensor, params: SamplingParams, position: int) -> int:
    """Choose the token at `position`, given its scores [vocab_size]."""
    uniform = uniform_per_token(params.seed, position, torch.arange(len(logits)))
    return int((logits / params.temperature - (-uniform.log()).log()).argmax())


# Exercise 2: a real grammar engine compiles the grammar and the vocabulary ahead of time. It walks
# a trie of all tokens only where the grammar can follow, and stores the result as a bitmask: one
# bit per token of the vocabulary, which is set if the token is allowed.
def allowed_ids(texts: list[str], choices: list[str], chosen: str) -> list[int]:
    """Return the ids of the tokens after which the text is still the beginning of a choice.

    `texts` has the text of every token, `chosen` is the output so far.
    """
    rests = [choice[len(chosen) :] for choice in choices if choice.startswith(chosen)]
    return [
        token_id
        for token_id, text in enumerate(texts)
        if text and any(rest.startswith(text) for rest in rests)
    ]


def choose(
    model: Model, tokenizer: Any, prompt: str, choices: list[str], params: SamplingParams
) -> str:
    """Generate one of the choices, none of which may be a prefix of another."""
    texts = [tokenizer.decode([token_id]) for token_id in range(model.config.vocab_size)]
    token_ids, chosen = tokenizer.encode(prompt), ""
    while chosen not in choices:
        logits = next_token_logits(model, token_ids)
        allowed = torch.tensor(allowed_ids(texts, choices, chosen))
        mask = torch.full_like(logits, -torch.inf).index_fill(0, allowed, 0.0)
        token_ids.append(sample(logits + mask, params, len(token_ids)))
        chosen += texts[token_ids[-1]]
    return chosen


def main(model: Model, tokenizer: Any) -> None:
    logits = next_token_logits(model, tokenizer.encode(PROMPTS[0]))
    params = SamplingParams(temperature=0.5, seed=1)
    counts = torch.zeros(len(logits))
    for position in range(1000):
        counts[sample_gumbel(logits, params, position)] += 1
    for token_id in logits.topk(3).indices.tolist():
        drawn, prob = counts[token_id] / 1000, sampling_probs(logits, params)[token_id]
        print(f"{tokenizer.decode([token_id])!r}: drawn {drawn:.1%}, probability {prob:.1%}")

    prompt = "Review: What a wonderful film!\nThe review is"
    chosen = choose(model, tokenizer, prompt, [" positive", " negative"], SamplingParams(0))
    print(f"{prompt!r} -> {chosen!r}")


if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
