"""Load a checkpoint's tokenizer: from its folder, or from the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.folder import VOCABULARY_FILES
from nanovllm.checkpoint.gguf_tokenizer import build_tokenizer
from nanovllm.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Return a transformers tokenizer; a GGUF file needs nothing beside it."""
    if checkpoint.path.suffix == ".gguf":
        return build_tokenizer(checkpoint.path)
    if any((checkpoint.path / name).is_file() for name in VOCABULARY_FILES):
        return _from_folder(checkpoint.path)
    if checkpoint.weight_format == "gguf":
        return build_tokenizer(checkpoint.weight_files[0])
    raise CheckpointError(
        f"{checkpoint.path} has no tokenizer: looked for {', '.join(VOCABULARY_FILES)}. "
        "Fetch tokenizer.json, or pass token-id prompts with skip_tokenizer_init=True"
    )


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        # Left out, a repository's code would run after a question on the terminal.
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a broken tokenizer.json raises no narrower type
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"the tokenizer in {folder} needs code from its repository, which is never run "
                "here; pass token-id prompts with skip_tokenizer_init=True"
            ) from error
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be loaded ({error}). Fetch it again, or pass "
            "token-id prompts with skip_tokenizer_init=True"
        ) from error
