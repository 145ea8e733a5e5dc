"""The bytes of tokens: several together may make one character, and none of them alone a text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanovllm.engine.detokenizer import REPLACEMENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))  # in GPT-2's way, as they are
_OTHERS = (byte for byte in range(256) if byte not in _PRINTED)
_BYTE_LEVEL = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(256 + number): byte for number, byte in enumerate(_OTHERS)},
}


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int, text: str) -> bytes:
    """What a token adds to a text; its own text shows parts of characters as replaced."""
    if REPLACEMENT in text:
        (written,) = tokenizer.convert_ids_to_tokens([token_id])
        if found := _FALLBACK.fullmatch(written):
            return bytes.fromhex(found.group(1))
        if all(char in _BYTE_LEVEL for char in written):
            return bytes(_BYTE_LEVEL[char] for char in written)
    return text.encode("utf-8", "replace")
