"""A model that was found and can run, and the front for it; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.checkpoint.find import Checkpoint, eos_token_ids
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.front import Front

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
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(found.checkpoint)
    eos_ids = eos_token_ids(found.checkpoint) or tokenizer_eos(tokenizer)
    has_workers = is_remote or config.tensor_parallel_size > 1
    return Front(tokenizer, found.model_config.vocab_size, eos_ids, config.seed, has_workers)


def tokenizer_eos(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return () if eos is None else (eos,)
