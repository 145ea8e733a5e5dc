"""Load a checkpoint's tokenizer: from its folder, or from the metadata of a GGUF file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.gguf_tokenizer import build_tokenizer
from nanovllm.errors import CheckpointError, NanovllmError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# This text is encoded and decoded as a test: some defects show only in use. The last character is
# in no vocabulary.
PROBE = "Hello, 1 \U0010fffd"
# Fields of tokenizer.json other than the vocabulary: PARTS are at the top level, FLAGS are
# options of the field `model`.
PARTS = ("normalizer", "pre_tokenizer", "decoder")
FLAGS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Return the checkpoint's tokenizer, after testing that it works."""
    try:
        tokenizer = _load(checkpoint)
        tokenizer.decode(tokenizer.encode(PROBE))
        return tokenizer
    except (NanovllmError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # broken files raise any type of error, or panic in Rust
        if str(error) == _config_problem(checkpoint):
            raise CheckpointError(
                f"transformers, which loads the tokenizer, rejects {checkpoint.path}/config.json "
                f"({error}); correct it, or pass token-id prompts with skip_tokenizer_init=True"
            ) from error
        raise CheckpointError(
            f"the tokenizer in {checkpoint.path} cannot be loaded ({error}). Fetch it again "
            "(tokenizer.model alone needs `pip install sentencepiece`; code from a repository is "
            "never run), or pass token-id prompts with skip_tokenizer_init=True"
        ) from error


def _config_problem(checkpoint: Checkpoint) -> str | None:
    """Return transformers' message if it rejects config.json, which it reads for a tokenizer."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(
            str(checkpoint.path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers validates each config class in its own way
        return str(error)
    return None


def _load(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    if checkpoint.path.suffix == ".gguf":
        return build_tokenizer(checkpoint.path)
    if any((checkpoint.path / name).is_file() for name in VOCABULARY_FILES):
        from transformers import AutoTokenizer

        file = checkpoint.path / "tokenizer.json"
        written = json.loads(file.read_bytes()) if file.is_file() else {}
        # By default, transformers would ask on the terminal whether to run the repository's code.
        tokenizer = AutoTokenizer.from_pretrained(
            str(checkpoint.path), local_files_only=True, trust_remote_code=False
        )
        _restore_parts(tokenizer, written)
        return tokenizer
    if checkpoint.is_gguf:
        return build_tokenizer(checkpoint.weight_files[0])
    raise CheckpointError(
        f"{checkpoint.path} has no tokenizer: looked for {', '.join(VOCABULARY_FILES)}. "
        "Fetch tokenizer.json, or pass token-id prompts with skip_tokenizer_init=True"
    )


def _restore_parts(tokenizer: PreTrainedTokenizerBase, written: dict[str, Any]) -> None:
    """Restore `PARTS` and `FLAGS` of tokenizer.json, which transformers may have replaced.

    Transformers reads only the vocabulary from the file if tokenizer_config.json names a class that
    builds these parts itself, such as Llama's class for DeepSeek's byte-level tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or "model" not in written:
        return
    from tokenizers import Tokenizer

    model = written["model"]
    is_bpe = model.get("type") == "BPE" == type(backend.model).__name__
    if is_bpe:
        model = {**model, "vocab": {}, "merges": []}  # faster to parse
    bare = {**written, "model": model, "added_tokens": [], "post_processor": None}
    source = Tokenizer.from_str(json.dumps(bare))
    for name in PARTS:
        setattr(backend, name, getattr(source, name))
    if not is_bpe:  # the class may have converted another kind of model to BPE
        backend.model = source.model
        return
    for name in FLAGS:
        setattr(backend.model, name, getattr(source.model, name))
