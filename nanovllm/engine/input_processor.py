"""InputProcessor: turn a prompt and its parameters into validated, tokenized requests.

Nothing here imports torch, so it can run in a different process than the model.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.grammar import GrammarEngine
from nanovllm.engine.images import ImageReader, ImageSource, NoImages, PlacedImages
from nanovllm.engine.output_processor import CompletionState, RequestState
from nanovllm.engine.request import Request
from nanovllm.engine.scoring import check_pooling
from nanovllm.engine.step import Pooling
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import require, require_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]


class InputProcessor:
    """Turns prompts into requests. Thread-safe."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        seed: int,
        has_workers: bool = False,
        create_grammars: Callable[[], GrammarEngine] | None = None,
        default_pooling: Pooling | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer = vocabulary.tokenizer
        self._create_grammars = create_grammars
        self._has_workers = has_workers  # workers in other processes cannot receive functions
        self._vocab_size = vocab_size
        self._eos_token_ids = vocabulary.eos_token_ids
        self.grammars: GrammarEngine | None = None  # created by the first request with a grammar
        self._engine_seed = seed
        # The pooling of a model that only embeds; None for a model that generates.
        self.default_pooling = default_pooling
        self.image_reader = image_reader or NoImages()
        self._seq_ids = itertools.count()
        self._lock = threading.Lock()
        self._tokenizing = threading.Lock()  # tokenizer.encode may change the tokenizer's settings

    def get_grammars(self) -> GrammarEngine:
        """Return the grammar engine; the first call creates it."""
        with self._lock:
            if self.grammars is None:
                assert self._create_grammars is not None
                self.grammars = self._create_grammars()
            return self.grammars

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()

    def process(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        cache_salt: str | None = None,
        is_streaming: bool = False,
        pooling: Pooling | None = None,
        request_id: str | None = None,
        images: Sequence[ImageSource] = (),
    ) -> RequestState:
        """Validate and tokenize a prompt; return its state, with one request per completion."""
        self._check_params(params)
        if pooling is not None:
            check_pooling(pooling, self._vocab_size)
        if self.default_pooling is not None and not isinstance(pooling, str):
            raise RequestError("this is an embedding model: use embed, or /v1/embeddings")
        for name, text in (("cache_salt", cache_salt), ("request_id", request_id)):
            if text is not None:
                require_text(name, text)
        token_ids = self.token_ids_of(prompt)
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        placed = PlacedImages(token_ids, ())
        if images:
            require(pooling is None, "prompt", "text, without images, for embeddings", prompt)
            limit = params.truncate_prompt_tokens
            require(limit is None, "truncate_prompt_tokens", "None for prompts with images", limit)
            placed = self.image_reader.place(token_ids, images)
        tokenizer = self.tokenizer if is_streaming or params.stop else None
        seq_id = next(self._seq_ids)
        request_id = str(seq_id) if request_id is None else request_id
        grammar, asked = None, params.structured_outputs
        if asked is not None:
            grammar = self.get_grammars().compile(asked)
            params = replace(params, structured_outputs=None)
        first = Request(
            seq_id,
            placed.token_ids,
            params,
            self._seed(params, seq_id, 0),
            stop_token_ids=self._stop_token_ids(params),
            grammar=grammar,
            bad_words=self._bad_words(params),
            cache_salt=cache_salt or None,  # an empty salt means no salt
            is_streaming=is_streaming or tokenizer is not None or params.logprobs is not None,
            pooling=pooling,
            images=placed.images,
            request_id=request_id,
        )
        requests = [first]
        if params.n > 1:  # only the first completion computes prompt logprobs
            other = replace(first, params=replace(params, prompt_logprobs=None))
            for index, seq_id in zip(range(1, params.n), self._seq_ids, strict=False):
                seed = self._seed(params, seq_id, index)
                requests.append(replace(other, seq_id=seq_id, seed=seed))
        completions = []
        for index, request in enumerate(requests):
            detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params)
            completions.append(CompletionState(index, request, detokenizer))
        text = prompt if isinstance(prompt, str) else None
        return RequestState(text, is_streaming, completions, len(completions), request_id)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise RequestError("no tokenizer is loaded with skip_tokenizer_init=True")
        return self.tokenizer

    def encode(self, text: str, **options: Any) -> list[int]:
        """Tokenize text. Safe in any thread."""
        assert self.tokenizer is not None
        with self._tokenizing:
            ids: list[int] = self.tokenizer.encode(text, **options)
        return ids

    def token_ids_of(self, prompt: str | list[int], **options: Any) -> array[int]:
        """Validate a prompt, and tokenize it if it is text. Safe in any thread."""
        require(isinstance(prompt, (str, list)), "prompt", "a string or token ids", prompt)
        if not isinstance(prompt, str):
            ids = prompt
        else:
            has_tokenizer = self.tokenizer is not None
            require(has_tokenizer, "prompt", "token ids with skip_tokenizer_init=True", prompt)
            require_text("prompt", prompt)
            ids = self.encode(prompt, **options)
        require(ids, "prompt", "at least one token", prompt)
        return to_token_ids(ids, self._vocab_size)

    def _check_params(self, params: SamplingParams) -> None:
        is_params = isinstance(params, SamplingParams)
        require(is_params, "sampling_params", "SamplingParams", params)
        for name in ("stop", "bad_words"):
            words = getattr(params, name)
            can_tokenize = self.tokenizer is not None or not words
            expected = "empty without a tokenizer; stop_token_ids and logit_bias need none"
            require(can_tokenize, name, expected, words)
            for word in words:
                require_text(name, word)
        has_functions = any(map(callable, params.logits_processors))
        require(
            not (self._has_workers and has_functions),
            "logits_processors",
            "names of the form 'module:function' if workers run in other processes",
            params.logits_processors,
        )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            high = max(getattr(params, name) or (), default=0)
            expected = f"ids inside the vocabulary of {self._vocab_size}"
            require(high < self._vocab_size, name, expected, high)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        if params.max_tokens == 0:  # the sampled token is discarded, whatever it is
            return frozenset()
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        return eos.union(params.stop_token_ids)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, both at the start of a text and after a space.

        Words with ids outside the model's vocabulary are skipped: the model cannot generate them.
        """
        texts = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        found = [tuple(self.encode(text, add_special_tokens=False)) for text in texts]
        return tuple(dict.fromkeys(word for word in found if word and max(word) < self._vocab_size))

    def _seed(self, params: SamplingParams, seq_id: int, index: int) -> int:
        """Return a 64-bit seed, derived from the request's seed or else from the engine's."""
        if params.seed is None:
            seed = xxhash.xxh3_64_intdigest(f"{self._engine_seed}/{seq_id}".encode())
        else:
            seed = (params.seed + index) % 2**64
        return seed - 2**64 if seed >= 2**63 else seed


def to_token_ids(ids: list[int], vocab_size: int) -> array[int]:
    """Validate token ids and pack them into an array."""
    try:  # without a Python loop over the ids, except 0 and 1, which may be booleans
        values = np.array(array("L", ids))  # unsigned is several times as fast as signed
        has_bool = any(isinstance(ids[i], bool) for i in np.flatnonzero(values <= 1))
        if not has_bool and values.max() < vocab_size:
            return array("i", values.astype(np.int32).tobytes())
    except (TypeError, OverflowError):
        pass  # the code below finds the invalid id
    is_integer = all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in ids)
    require(is_integer, "prompt", "a string or a list of token ids (integers)", ids)
    wrong = min(ids) if min(ids) < 0 else max(ids)
    raise RequestError(
        f"token id {wrong} is outside the model's vocabulary of {vocab_size}", param="prompt"
    )
