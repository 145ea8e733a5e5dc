"""A tokenizer for tiny models: the text of a token is its id."""

from __future__ import annotations

from typing import Any

from nanovllm import LLM


class NumberTokenizer:
    """Decodes ids as numbers; every third token is special."""

    eos_token_id = None

    def encode(self, text: str, **options: Any) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = False, **options: Any
    ) -> str:
        kept = [i for i in token_ids if not skip_special_tokens or i % 3]
        return "".join(f" {token_id}" for token_id in kept)


def read_numbers(llm: LLM, eos_token_ids: tuple[int, ...] = ()) -> None:
    """Install this tokenizer in an engine that has none."""
    input_processor, tokenizer = llm.engine.input_processor, NumberTokenizer()
    input_processor.tokenizer = tokenizer  # type: ignore[assignment]
    llm.engine.client.output_processor.tokenizer = tokenizer  # type: ignore[assignment]
    input_processor._eos_token_ids = frozenset(eos_token_ids)
