"""Day 2: a KV cache, with prefill and decode measured apart.

Day 1 ran the whole text again for every token. But only attention looks at earlier tokens, and all
that it needs from them are their keys and values. These never change, because a token only looks
back. So we keep them. The prompt runs once (prefill), then one token at a time (decode).

From day 1: the model (`forward`, `compute_logits`, `attention`), unchanged.

    python learn/day2_kv_cache.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import day1_forward as day1
from common import Config, Model, Table, best_time, load_from_command_line, show, timed
from day1_forward import attention, compute_logits, forward

PROMPT = day1.PROMPT
MAX_TOKENS = 16
CONTEXT_LENGTHS = (16, 64, 256)


class KVCache:
    """The keys and values of one sequence in every layer, with room for `max_len` tokens."""

    def __init__(self, config: Config, max_len: int) -> None:
        shape = (config.num_layers, max_len, config.num_kv_heads, config.head_dim)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.length = 0  # tokens whose keys and values are here

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values, then attend to all of them, old and new."""
        start, end = self.length, self.length + len(k)
        self.k[layer_index, start:end] = k
        self.v[layer_index, start:end] = v
        return attention(q, self.k[layer_index, :end], self.v[layer_index, :end])

    @property
    def bytes_per_token(self) -> int:
        return (self.k[:, 0].numel() + self.v[:, 0].numel()) * self.k.itemsize


@torch.inference_mode()
def run_tokens(model: Model, cache: KVCache, token_ids: list[int]) -> Tensor:
    """Run the tokens that follow the cached ones; return the scores of the next token.

    This is prefill and decode: prefill is a call with many tokens, decode is a call with one.
    """
    positions = torch.arange(cache.length, cache.length + len(token_ids))
    hidden = forward(model, torch.tensor(token_ids), positions, cache.attend)
    cache.length += len(token_ids)  # only now, because every layer writes at the same positions
    return compute_logits(model, hidden[-1:])[0]


def generate(model: Model, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """Decode greedily, as on day 1, but run every token only once."""
    cache = KVCache(model.config, len(prompt_ids) + max_tokens)
    token_ids, new_ids = list(prompt_ids), prompt_ids
    for _ in range(max_tokens):
        next_id = int(run_tokens(model, cache, new_ids).argmax())
        token_ids.append(next_id)
        new_ids = [next_id]
        if next_id in model.config.eos_ids:
            break
    return token_ids[len(prompt_ids) :]


def compare_with_day1(model: Model, tokenizer: Any) -> None:
    """Generate the same text with and without the cache, and print both times of every token."""
    prompt_ids = tokenizer.encode(PROMPT)
    cache = KVCache(model.config, len(prompt_ids) + MAX_TOKENS)
    token_ids = list(prompt_ids)
    header = ["token", "text", "kind", "run: day 1", "day 2", "ms: day 1", "day 2"]
    table = Table(header, [0, 12, 7, 0, 0, 0, 0])
    day1.next_token_logits(model, token_ids)  # the first call is slower
    for step in range(1, MAX_TOKENS + 1):
        slow_logits, slow_ms = timed(day1.next_token_logits, model, token_ids)
        new_ids = token_ids[cache.length :]  # the tokens that the cache does not hold yet
        logits, fast_ms = timed(run_tokens, model, cache, new_ids)

        next_id = int(logits.argmax())
        assert next_id == int(slow_logits.argmax()), "the cache changed the output"
        kind = "prefill" if step == 1 else "decode"
        num_run = len(token_ids), len(new_ids)
        table.add(step, show(tokenizer, [next_id]), kind, *num_run, slow_ms, fast_ms)
        token_ids.append(next_id)
        if next_id in model.config.eos_ids:
            break
    slow, fast = (sum(row[i] for row in table.rows) for i in (3, 4))
    print(f"\nBoth chose the same tokens. Day 1 ran {slow} tokens, day 2 ran {fast}.")


def measure(model: Model) -> None:
    """Print what the next token costs after contexts of several lengths."""
    cache = KVCache(model.config, max(CONTEXT_LENGTHS) + 1)
    header = ["context", "ms: prefill", "decode", "tokens/s: prefill", "decode", "cache KiB"]
    table = Table(header, [0] * len(header))

    def run_after(length: int, token_ids: list[int]) -> None:
        cache.length = length  # forget what an earlier call has added
        run_tokens(model, cache, token_ids)

    for length in CONTEXT_LENGTHS:
        token_ids = [i % model.config.vocab_size for i in range(length)]  # any tokens will do
        prefill_ms = best_time(run_after, 0, token_ids)
        decode_ms = best_time(run_after, length, token_ids[:1])
        rates = round(1000 * length / prefill_ms, 1), round(1000 / decode_ms, 1)
        kib = length * cache.bytes_per_token // 1024
        table.add(length, prefill_ms, decode_ms, *rates, kib)


def main(model: Model, tokenizer: Any) -> None:
    print("The same text without a cache (day 1) and with one (day 2):")
    compare_with_day1(model, tokenizer)

    print("\nWithout a cache, every next token costs a prefill of the whole context:")
    measure(model)
    per_token = KVCache(model.config, 1).bytes_per_token
    print(
        f"\nThe cache takes {per_token:,} bytes per token: keys and values of "
        f"{model.config.num_layers} layers x {model.config.num_kv_heads} kv heads x "
        f"{model.config.head_dim} float32 numbers.\n"
        f"A decode step reads all weights, {4 * model.num_parameters / 1e6:,.0f} MB, for a single "
        "token; a prefill reads them once for the whole prompt.\n"
        "That is why prefill has the higher rate, and why day 4 decodes many sequences together."
    )


# Exercises (solutions: learn/solutions/day2.py)
#
# 1. A long prompt blocks everything else while it runs. Write `prefill_in_chunks(model, cache,
#    prompt_ids, chunk_size)`, which runs a prompt in pieces and returns the same scores. Which
#    line of `KVCache` has to change?
# 2. Mistral's layers look back over a window of the last `window` tokens only, so the rest of the
#    cache is never read again. Write `WindowCache`, which keeps only `window` tokens per layer; it
#    may assume that tokens run one at a time. Use it in `generate_in_window(model, prompt_ids,
#    max_tokens, window)`. (Does the order of the keys in the cache matter?)

if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
