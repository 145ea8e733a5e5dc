"""A resolved model: its checkpoint and configuration, with the engine options it runs with."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from nanovllm.checkpoint.find import Checkpoint, eos_token_ids
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import WHOLE_CONTEXT, EngineConfig, ModelConfig
from nanovllm.engine.input_processor import Vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    config: EngineConfig
    model_config: ModelConfig
    checkpoint: Checkpoint

    def load_vocabulary(self) -> Vocabulary:
        tokenizer = None if self.config.skip_tokenizer_init else load_tokenizer(self.checkpoint)
        eos_ids = eos_token_ids(self.checkpoint)
        if not eos_ids and tokenizer is not None and tokenizer.eos_token_id is not None:
            eos_ids = (tokenizer.eos_token_id,)
        vocab_size = self.model_config.vocab_size
        return Vocabulary(tokenizer, frozenset(i for i in eos_ids if 0 <= i < vocab_size))


def clamp_model_len(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    limit = model_config.max_position_embeddings
    if config.max_model_len <= limit:
        return config
    if config.max_model_len != WHOLE_CONTEXT:
        logger.warning("max_model_len=%d is clamped to the model's %d", config.max_model_len, limit)
    return replace(config, max_model_len=limit)
