"""Byte-level BPE and SentencePiece BPE by their definitions: slow, short and independent."""

import itertools
from collections.abc import Callable

import regex

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MODERN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,COUNT}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's default: each pattern splits the pieces that the previous one left.
DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT.removesuffix(r"|\s+"), r"\p{N}+", "[0-9]{3}")
Split = Callable[[str], list[str]]


def split_like(pre: str) -> Split:
    """Return the documented split of one `tokenizer.ggml.pre`."""
    if pre == "smollm":
        pieces = regex.compile(r"\p{N}|\P{N}+")
        return lambda text: [
            word for piece in pieces.findall(text) for word in regex.findall(GPT2_SPLIT, piece)
        ]
    if pre == "default":
        return split_by_turns
    if pre == "gpt-2":
        return lambda text: regex.findall(GPT2_SPLIT, text)
    pattern = MODERN_SPLIT.replace("COUNT", "1" if pre.startswith("qwen") else "3")
    if pre == "qwen35":  # combining marks are parts of words
        pattern = pattern.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
        pattern = pattern.replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
    return lambda text: regex.findall(pattern, text)


def split_by_turns(text: str) -> list[str]:
    pieces = [text]
    for pattern in DEFAULT_SPLITS:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


def byte_letters() -> dict[int, str]:
    """Map bytes to characters: printable Latin-1 to itself, the others to U+0100 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


LETTERS = byte_letters()


def byte_bpe(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Apply the best-ranked merge, leftmost first, until none is left."""
    parts = [LETTERS[byte] for byte in word.encode()]
    while len(parts) > 1:
        pairs = list(itertools.pairwise(parts))
        best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        if pairs[best] not in ranks:
            break
        parts[best : best + 2] = ["".join(pairs[best])]
    return parts


def split_marked(text: str, marked: list[str]) -> list[str]:
    """Split a text at the added tokens, which are matched first."""
    if not marked:
        return [text]
    longest_first = sorted(marked, key=len, reverse=True)
    return regex.split("(" + "|".join(map(regex.escape, longest_first)) + ")", text)


def encode_bytes(
    text: str,
    split: Split,
    tokens: list[str],
    merges: list[str],
    marked: list[str],
    whole_words: bool = False,
) -> list[int]:
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    left_right = (merge.split(" ") for merge in merges)
    ranks = {(left, right): rank for rank, (left, right) in enumerate(left_right)}
    result: list[int] = []
    for part in split_marked(text, marked):
        if part in marked:
            result.append(ids[part])
            continue
        for word in split(part):
            letters = "".join(LETTERS[byte] for byte in word.encode())
            whole = whole_words and letters in ids
            result += [ids[piece] for piece in ([letters] if whole else byte_bpe(word, ranks))]
    return result


def encode_pieces(text: str, scores: dict[str, float], tokens: list[str]) -> list[int]:
    """SentencePiece BPE by its definition: join the best-scored neighbors, leftmost on ties."""
    parts = list(text.replace(" ", "▁"))
    while True:
        joined = ["".join(pair) for pair in itertools.pairwise(parts)]
        known = [i for i, piece in enumerate(joined) if piece in scores]
        if not known:
            break
        best = max(known, key=lambda i: (scores[joined[i]], -i))
        parts[best : best + 2] = [joined[best]]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    fallback = ([ids[f"<0x{byte:02X}>"] for byte in part.encode()] for part in parts)
    return [
        token_id
        for part, as_bytes in zip(parts, fallback, strict=True)
        for token_id in ([ids[part]] if part in ids else as_bytes)
    ]
