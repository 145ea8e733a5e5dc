"""A tokenizer for tiny models: a token per printable ASCII character, and some longer tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import VOCAB_SIZE

EOS = 2
LONGER = ['{"', '":', '",', '"}', "true", "null", "}]", "name", "12", "0.", "</think>", "ab", "no"]


def with_tokenizer(source: Path, target: Path) -> Path:
    """Copy a checkpoint and add a tokenizer without the last ids, as with padded vocabularies."""
    shutil.copytree(source, target)
    texts = ["<pad>", "<bos>", "<eos>", *map(chr, range(33, 127)), "Ġ", "Ċ", *LONGER]
    assert len(texts) < VOCAB_SIZE - 32
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(target)
    return target
