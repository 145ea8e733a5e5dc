"""Solutions of day 2.

PYTHONPATH=learn python learn/solutions/day2.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common import Model, load_from_command_line, show
from day1_forward import attention
from day2_kv_cache import PROMPT, KVCache, run_tokens


# Exercise 1: no line of KVCache changes. `run_tokens` continues where the cache ends, whether its
# tokens are a prompt, a piece of one, or a single new token.
def prefill_in_chunks(
    model: Model, cache: KVCache, prompt_ids: list[int], chunk_size: int
) -> Tensor:
    """Run a prompt in pieces; return the scores of the token after it."""
    for start in range(0, len(prompt_ids), chunk_size):
        logits = run_tokens(model, cache, prompt_ids[start : start + chunk_size])
    return logits


# Exercise 2: a new token overwrites the oldest one. The order of the keys does not matter, because
# each key was rotated by its own position before it was stored.
class WindowCache(KVCache):
    """The keys and values of the last `window` tokens in every layer."""

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert len(k) == 1, "several tokens could overwrite keys that the first of them needs"
        window = self.k.shape[1]
        self.k[layer_index, self.length % window] = k[0]
        self.v[layer_index, self.length % window] = v[0]
        num_kept = min(self.length + 1, window)
        return attention(q, self.k[layer_index, :num_kept], self.v[layer_index, :num_kept])


def generate_in_window(
    model: Model, prompt_ids: list[int], max_tokens: int, window: int
) -> list[int]:
    cache, output_ids = WindowCache(model.config, window), []
    logits = prefill_in_chunks(model, cache, prompt_ids, chunk_size=1)
    for _ in range(max_tokens):
        output_ids.append(int(logits.argmax()))
        logits = run_tokens(model, cache, output_ids[-1:])
    return output_ids


def main(model: Model, tokenizer: Any) -> None:
    prompt_ids = tokenizer.encode(PROMPT)
    for chunk_size in (1, 3, len(prompt_ids)):
        cache = KVCache(model.config, len(prompt_ids))
        best = int(prefill_in_chunks(model, cache, prompt_ids, chunk_size).argmax())
        print(f"in chunks of {chunk_size}: {PROMPT!r} -> {tokenizer.decode([best])!r}")
    for window in (4, 8, 16):
        output_ids = generate_in_window(model, prompt_ids, max_tokens=8, window=window)
        print(f"with a window of {window}: {PROMPT!r} -> {show(tokenizer, output_ids)}")


if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
