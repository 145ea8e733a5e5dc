"""A model that was found and can run, and the front for it; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nanovllm.checkpoint.find import Checkpoint, eos_token_ids
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.front import Front
from nanovllm.errors import ConfigError
from nanovllm.grammar.matching import Grammars, Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that can run here, and the options with which it will."""

    config: EngineConfig
    model_config: ModelConfig
    checkpoint: Checkpoint


def make_front(found: FoundModel, is_remote: bool = False) -> Front:
    """Load the tokenizer; a remote core, like workers, is in another process."""
    config = found.config
    if config.data_parallel_size > 1 and not is_remote:
        raise ConfigError("data_parallel_size is for AsyncLLM, `nanovllm serve` and `batch`")
    vocabulary = load_vocabulary(found)
    has_workers = is_remote or config.tensor_parallel_size > 1
    return Front(vocabulary, found.model_config.vocab_size, config.seed, has_workers)


def make_grammars(found: FoundModel) -> Grammars:
    """For a core in another process than its front."""
    return Grammars(partial(load_vocabulary, found), found.model_config.vocab_size)


def load_vocabulary(found: FoundModel) -> Vocabulary:
    is_skipped, vocab_size = found.config.skip_tokenizer_init, found.model_config.vocab_size
    tokenizer = None if is_skipped else load_tokenizer(found.checkpoint)
    eos_ids = eos_token_ids(found.checkpoint) or tokenizer_eos(tokenizer)
    return Vocabulary(tokenizer, frozenset(i for i in eos_ids if 0 <= i < vocab_size))


def tokenizer_eos(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return () if eos is None else (eos,)
