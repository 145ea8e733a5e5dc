"""A tiny random model whose tokens are bytes; its chat template supports tools and reasoning."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config

from tests.checkpoints import SIZES, make_checkpoint
from tests.serve.templates import read_template

SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = read_template("bytes")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_byte_model(folder: Path, max_len: int = 1024) -> Path:
    make_checkpoint(folder, byte_config(max_len))
    byte_tokenizer().save_pretrained(folder)
    return folder


def make_byte_file(folder: Path, max_len: int = 1024) -> Path:
    """Write the same model to a GGUF file, whose tokenizer does not need transformers.

    A process that does not import transformers starts seconds earlier.
    """
    from tests.checkpoint.tiny_gguf import write_gguf

    config = byte_config(max_len)
    weights = make_checkpoint(folder, config).model.state_dict()
    # A file needs at least one merge: use two bytes that occur in no text.
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL[::-1], "õö"]
    num_unused = config.vocab_size - len(tokens)
    values: dict[str, object] = {
        "context_length": max_len,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": 10000.0,
    }
    vocabulary = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*tokens, *(f"[unused{i}]" for i in range(num_unused))],
        "token_type": [1] * 256 + [3] * len(SPECIAL) + [1] + [5] * num_unused,
        "merges": ["õ ö"],
        "bos_token_id": None,
        "eos_token_id": tokens.index(SPECIAL[1]),
    }
    metadata = {f"qwen3.{name}": value for name, value in values.items()}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}
    metadata["tokenizer.chat_template"] = TEMPLATE
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    return write_gguf(folder / "bytes.gguf", "qwen3", arrays, metadata=metadata)


def byte_config(max_len: int) -> Qwen3Config:
    sizes = {**SIZES, "vocab_size": 288, "max_position_embeddings": max_len}
    return Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False)
