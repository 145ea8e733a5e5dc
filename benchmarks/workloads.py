"""Workloads of random token ids, identical on every run and machine."""

from __future__ import annotations

import random
from dataclasses import dataclass

LAST_ID = 10000


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: list[list[int]]
    max_tokens: list[int]  # per prompt; EOS is ignored

    @property
    def prompt_lens(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_lens)

    @property
    def num_new_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def total_lens(self) -> list[int]:
        """Tokens of each sequence: prompt and output."""
        return [sum(lens) for lens in zip(self.prompt_lens, self.max_tokens, strict=True)]


def mixed(
    vocab_size: int,
    num_prompts: int = 256,
    max_input_len: int = 1024,
    max_output_len: int = 1024,
    min_len: int = 100,
    seed: int = 0,
) -> Workload:
    """Return nano-vLLM's benchmark: 142,827 tokens in and 133,966 out, lengths of 100 to 1,024.

    The order of the random draws matters: length and ids of each prompt in turn, then all output
    lengths.
    """
    rng = random.Random(seed)
    last_id = min(LAST_ID, vocab_size - 1)
    min_len = min(min_len, min(max_input_len, max_output_len) // 8 + 1)
    prompts = [
        [rng.randint(0, last_id) for _ in range(rng.randint(min_len, max_input_len))]
        for _ in range(num_prompts)
    ]
    return Workload(prompts, [rng.randint(min_len, max_output_len) for _ in prompts])


def mixed_name(num_prompts: int, max_input_len: int, max_output_len: int) -> str:
    """Return the case's name in results: "nano", with its sizes if they are not the default."""
    if (num_prompts, max_input_len, max_output_len) == (256, 1024, 1024):
        return "nano"
    lengths = [max_input_len] + [max_output_len] * (max_input_len != max_output_len)
    return "-".join(map(str, ["nano", num_prompts, *lengths]))


def uniform(vocab_size: int, num_prompts: int, prompt_len: int, max_tokens: int) -> Workload:
    """Return prompts of equal length with outputs of equal length."""
    rng = random.Random(0)
    last_id = min(LAST_ID, vocab_size - 1)
    prompts = [[rng.randint(0, last_id) for _ in range(prompt_len)] for _ in range(num_prompts)]
    return Workload(prompts, [max_tokens] * num_prompts)


def shared_prefix(vocab_size: int, prefix_len: int, tail_len: int = 20) -> tuple[Workload, ...]:
    """Return two prompts, to run one after the other, that differ only in their tails."""
    first, second = uniform(vocab_size, 2, prefix_len + tail_len, 1).prompts
    return Workload([first], [1]), Workload([first[:prefix_len] + second[prefix_len:]], [1])
