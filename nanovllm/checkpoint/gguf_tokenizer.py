"""Build the tokenizer that a GGUF file describes: byte-level BPE or SentencePiece BPE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nanovllm.checkpoint.gguf_file import field, list_field, open_gguf, special_token_id
from nanovllm.checkpoint.plain_tokenizer import PlainTokenizer
from nanovllm.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
_KEEPING_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3 tokens that keep the space after them
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_WAY_OUT = "token-id prompts with skip_tokenizer_init=True need no tokenizer"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split before byte-level BPE, for one value of `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...] = ()  # applied in order; empty: GPT-2's own split
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a word that is itself a token skips the merges
    add_bos: bool = False  # default if the file does not specify it


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """Return a regex for contractions, words, digits, punctuation, line breaks and other spaces."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}|"
        rf" ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer(_DEFAULT),  # the default of llama.cpp
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "dbrx": PreTokenizer((_words(r"\p{N}{1,3}"),)),  # used by Phi-4 files
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": PreTokenizer((_words(r"\p{N}"),), nfc=True),
    "qwen35": PreTokenizer((_words(r"\p{N}", r"\p{L}\p{M}"),), nfc=True),
}


def build_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return a stand-in for a transformers tokenizer, with special tokens and chat template."""
    reader = open_gguf(path)
    tokens = list_field(reader, "tokenizer.ggml.tokens", str) or []
    vocabulary = _Vocabulary(path, reader, tokens)
    tokenizer, default_add_bos = _build(vocabulary)
    bos, add_bos = vocabulary.token("bos"), vocabulary.get("add_bos_token", default_add_bos, bool)
    if add_bos and bos is None:
        raise CheckpointError(f"{path} has no tokenizer.ggml.bos_token_id for add_bos_token")
    add_eos = vocabulary.get("add_eos_token", False, bool)
    roles = {name: vocabulary.token(role) for name, role in _ROLES.items()}
    special_tokens = {name: token for name, token in roles.items() if token is not None}
    marked = _marked_tokens(vocabulary)
    tokenizer.add_tokens(marked)
    marked_texts = {token.content for token in marked}
    tokenizer.add_special_tokens([t for t in special_tokens.values() if t not in marked_texts])
    before = ["bos_token"] if add_bos else []
    after = ["eos_token"] if add_eos and "eos_token" in special_tokens else []
    tokenizer.post_processor = _surround(tokenizer, special_tokens, before, after)
    chat_template = field(reader, "tokenizer.chat_template", None, str)

    def make_transformers() -> PreTrainedTokenizerBase:
        from transformers import PreTrainedTokenizerFast

        wrap: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
        return wrap(
            tokenizer_object=tokenizer,
            **special_tokens,
            add_bos_token=add_bos,
            add_eos_token=add_eos,
            chat_template=chat_template,
            clean_up_tokenization_spaces=False,
        )

    plain = PlainTokenizer(tokenizer, special_tokens, chat_template, make_transformers)
    return cast("PreTrainedTokenizerBase", plain)


def _surround(
    tokenizer: Tokenizer, special_tokens: Mapping[str, str], before: list[str], after: list[str]
) -> Any:
    """Return a post-processor that adds special tokens, given by role, around every text."""
    from tokenizers import processors

    tokens = {name: special_tokens[name] for name in (*before, *after)}
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[
            {"id": name, "ids": [tokenizer.token_to_id(token)], "tokens": [token]}
            for name, token in tokens.items()
        ],
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokenizer section of a GGUF header; the id of a token is its index in `tokens`."""

    path: Path
    reader: GGUFReader
    tokens: list[str]

    def get(self, key: str, default: Any, kind: type) -> Any:
        return field(self.reader, f"tokenizer.ggml.{key}", default, kind)

    def column(self, key: str, kind: type, default: Sequence[Any] = ()) -> Sequence[Any]:
        """Return a metadata list, which must have one value per token."""
        stored = list_field(self.reader, f"tokenizer.ggml.{key}", kind)
        values = default if stored is None else stored
        if len(values) != len(self.tokens):
            raise CheckpointError(
                f"{self.path} has {len(values)} values in tokenizer.ggml.{key} for "
                f"{len(self.tokens)} tokens; convert it again ({_WAY_OUT})"
            )
        return values

    def types(self) -> Sequence[int]:
        return self.column("token_type", int, [_NORMAL] * len(self.tokens))

    def token(self, role: str) -> str | None:
        """Return the text of the token with a role such as "bos"."""
        token_id = special_token_id(self.reader, role)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise CheckpointError(
                f"{self.path}: {role} token id {token_id} is outside {len(self.tokens)} tokens"
            )
        return None if token_id is None else self.tokens[token_id]

    def ids(self) -> dict[str, int]:
        """Return token -> id, without the unused entries that only pad the embedding matrix."""
        kinds = enumerate(zip(self.tokens, self.types(), strict=True))
        return {token: token_id for token_id, (token, kind) in kinds if kind != _UNUSED}


def _build(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether it adds BOS unless the file says otherwise."""
    if not vocabulary.tokens:
        raise CheckpointError(f"{vocabulary.path} has no tokenizer.ggml.tokens ({_WAY_OUT})")
    model, pre = vocabulary.get("model", None, str), vocabulary.get("pre", None, str)
    if model == "llama":
        return _sentencepiece(vocabulary), True
    if model == "gpt2" and pre in PRE_TOKENIZERS:
        return _byte_level(vocabulary, PRE_TOKENIZERS[pre]), PRE_TOKENIZERS[pre].add_bos
    raise UnsupportedModelError(
        f"{vocabulary.path} has tokenizer model {model!r} with pre-tokenizer {pre!r}; supported "
        f"are 'llama', and 'gpt2' with one of {', '.join(PRE_TOKENIZERS)} ({_WAY_OUT})"
    )


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if (merges := list_field(vocabulary.reader, "tokenizer.ggml.merges", str)) is None:
        raise CheckpointError(f"{vocabulary.path} has no tokenizer.ggml.merges ({_WAY_OUT})")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    model = models.BPE(vocab=vocabulary.ids(), merges=pairs, ignore_merges=pre.whole_words)
    tokenizer = Tokenizer(model)
    steps: list[Any] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=_merges_from_scores(vocabulary),
            unk_token=vocabulary.token("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    normalizer: list[Any] = [normalizers.Replace(" ", "▁")]
    decoder: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True, bool):
        normalizer.insert(0, normalizers.Prepend("▁"))
        decoder.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return merges ordered by score: SentencePiece merges the highest-scoring pair first."""
    scores = vocabulary.column("scores", float)
    rows = zip(vocabulary.tokens, vocabulary.types(), scores, strict=True)
    pieces = {token: score for token, kind, score in rows if kind == _NORMAL}
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=pieces.__getitem__, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _marked_tokens(vocabulary: _Vocabulary) -> list[Any]:
    """Return the added tokens, which are matched before the text is split."""
    from tokenizers import AddedToken

    # Phi-3's added tokens strip the space after them, which the metadata does not state.
    architecture = field(vocabulary.reader, "general.architecture")
    takes_space = (architecture, vocabulary.get("model", None, str)) == ("phi3", "llama")
    return [
        AddedToken(
            token,
            special=kind != _USER_DEFINED,
            normalized=False,
            rstrip=takes_space and token not in _KEEPING_SPACE,
        )
        for token, kind in zip(vocabulary.tokens, vocabulary.types(), strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
