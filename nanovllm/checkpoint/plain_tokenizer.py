"""A tokenizer that works without transformers, whose import takes a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase


class PlainTokenizer:
    """A stand-in for a transformers tokenizer.

    It implements the methods that engines and servers use. Any other attribute is looked up in the
    transformers tokenizer, which is created on first use and imports torch.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: dict[str, str],
        chat_template: str | None,
        make_transformers: Callable[[], PreTrainedTokenizerBase],
    ) -> None:
        self.special_tokens_map = special_tokens
        self.chat_template = chat_template
        self._backend = self.backend_tokenizer = backend
        self._make_transformers = make_transformers
        self._transformers: PreTrainedTokenizerBase | None = None

    @property
    def eos_token_id(self) -> int | None:
        eos = self.special_tokens_map.get("eos_token")
        return None if eos is None else self._backend.token_to_id(eos)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._backend.get_vocab())

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        tokens: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        return tokens

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self._backend.id_to_token(id) for id in ids]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        if clean_up_tokenization_spaces:
            raise ValueError("clean_up_tokenization_spaces would change the model's output")
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._as_transformers()(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle read these before __init__ has run
            raise AttributeError(name)
        return getattr(self._as_transformers(), name)

    def _as_transformers(self) -> PreTrainedTokenizerBase:
        if self._transformers is None:
            self._transformers = self._make_transformers()
        return self._transformers
