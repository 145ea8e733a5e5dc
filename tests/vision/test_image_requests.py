"""Requests with images: chat, what outputs show of them, and what is refused."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from PIL import Image

from nanovllm import LLM, SamplingParams, assembly
from nanovllm.errors import CheckpointError, RequestError
from tests.vision.tiny_vision import (
    END,
    IMAGE,
    START,
    Prompt,
    TinyVision,
    as_input,
    noise,
    tiny_vision,
    with_chat,
)

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 4,
    "max_model_len": 160,
    "dtype": "float32",
}
SQUARE, WIDE = noise(1, 32, 32), noise(2, 60, 20)


@pytest.fixture(scope="module")
def checkpoint(checkpoint_root: Path) -> TinyVision:
    return tiny_vision(checkpoint_root, "dense")


@pytest.fixture(scope="module")
def folder(checkpoint: TinyVision, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat(checkpoint.path, tmp_path_factory.mktemp("vision") / "chat")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def data_url(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def encoded(llm: LLM, words: str) -> list[int]:
    return llm.get_tokenizer().encode(words, add_special_tokens=False)


def test_chat(llm: LLM, checkpoint: TinyVision) -> None:
    """Images of all forms are placed where they are among the texts."""
    forms = [
        ({"type": "image", "image": SQUARE}, {"type": "image_pil", "image_pil": WIDE}),
        (
            {"type": "image_url", "image_url": {"url": data_url(SQUARE)}},
            {"type": "image_url", "image_url": data_url(WIDE)},
        ),
    ]
    conversations = [
        [
            {"role": "system", "content": "be"},
            {"role": "user", "content": [text("a"), first, text("b"), second]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "c"},
        ]
        for first, second in forms
    ]
    pieces = "<system>be<user>a", SQUARE, "b", WIDE, "<assistant>ok<user>c<assistant>"
    prompt: Prompt = []
    for piece in pieces:
        prompt += encoded(llm, piece) if isinstance(piece, str) else [piece]
    want = checkpoint.generate(prompt, 8)
    outputs = llm.chat([*conversations, [{"role": "user", "content": "hi"}]], GREEDY)
    assert [output.token_ids for output in outputs[:2]] == [want, want]
    assert outputs[2].prompt_token_ids == encoded(llm, "<user>hi<assistant>")
    streamed = list(llm.stream_chat(conversations[0], GREEDY))
    assert "".join(piece.text for piece in streamed) == outputs[0].text


def test_generate_with_text(llm: LLM, checkpoint: TinyVision) -> None:
    words = "see <|vision_start|><|image_pad|><|vision_end|> and say"
    data = {"image": SQUARE}
    [output] = llm.generate({"prompt": words, "multi_modal_data": data}, GREEDY, use_tqdm=False)
    prompt = [*encoded(llm, "see "), SQUARE, *encoded(llm, " and say")]
    assert output.token_ids == checkpoint.generate(prompt, 8)
    assert output.prompt == words
    ids = [*encoded(llm, "see "), START, *[IMAGE] * 16, END, *encoded(llm, " and say")]
    assert output.prompt_token_ids == ids


def test_prompt_logprobs_name_the_models_placeholder(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1)
    [output] = llm.generate(as_input([5, SQUARE, 7]), params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) == 20
    for token_id, entry in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert entry is not None
        assert token_id in entry


def test_penalties_ignore_placeholders(llm: LLM, checkpoint: TinyVision) -> None:
    for prompt in ([5, SQUARE, 7, 8], [5, 6, 7, 8]):
        params = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.5, bad_words=["~~"]
        )
        [output] = llm.generate(as_input(prompt), params, use_tqdm=False)
        assert output.token_ids == checkpoint.generate(prompt, 8, repetition_penalty=1.5)
    # A placeholder may also be the first token.
    item = {"prompt_token_ids": [IMAGE, 5], "multi_modal_data": {"image": SQUARE}}
    [output] = llm.generate(item, params, use_tqdm=False)
    assert len(output.token_ids) == 8


def test_several_completions(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=3.0, seed=5, max_tokens=6, ignore_eos=True)
    [output] = llm.generate(as_input([5, SQUARE, 7]), params, use_tqdm=False)
    singles = [
        llm.generate(
            as_input([5, SQUARE, 7]),
            SamplingParams(temperature=3.0, seed=5 + i, max_tokens=6, ignore_eos=True),
            use_tqdm=False,
        )[0].token_ids
        for i in range(3)
    ]
    assert [each.token_ids for each in output.outputs] == singles
    assert len({*map(tuple, singles)}) == 3


def test_text_keeps_its_bits(llm: LLM, folder: Path) -> None:
    """With and without the tower, and after images."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    prompts = [[5, 6, 7], list(range(40))]

    def logprobs(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts, params, use_tqdm=False, cache_salt="bits")
        return [
            [{i: each.logprob for i, each in entry.items()} for entry in output.logprobs or []]
            for output in outputs
        ]

    llm.generate(as_input([5, 6, SQUARE]), GREEDY, use_tqdm=False)
    with LLM(folder, **OPTIONS, limit_mm_per_prompt={"image": 0}) as without:
        assert not without.engine.core.executor.parts
        assert logprobs(llm) == logprobs(without)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too many": (as_input([5, *[SQUARE] * 17]), "at most 16 .limit_mm_per_prompt., got 17"),
    "no placeholder": (
        {"prompt_token_ids": [5], "multi_modal_data": {"image": SQUARE}},
        "has 0 image placeholders .token 150. for 1 images",
    ),
    "video": (
        {"prompt_token_ids": [5], "multi_modal_data": {"video": SQUARE}},
        "multi_modal_data must be a dict",
    ),
    "too long": (
        as_input([5] * 100 + [SQUARE] * 4),
        "has 172 tokens, 64 of them in images",
    ),
    "url": (as_input([5, 6]) | as_input([SQUARE], multi_modal_data={"image": "x"}), "a data URL"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_images(llm: LLM, name: str) -> None:
    prompt, match = WRONG[name]
    with pytest.raises(RequestError, match=match):
        llm.generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "video_url", "video_url": "x"}, "part of type 'video_url', but this model reads"),
        ({"type": "image_url"}, "image parts with 'image_url'"),
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "a data URL"),
    ],
)
def test_wrong_parts(llm: LLM, part: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        llm.chat([{"role": "user", "content": [text("a"), part]}], GREEDY)


def test_placeholders_in_texts_are_texts(llm: LLM, checkpoint: TinyVision) -> None:
    """A user cannot move an image to another place."""
    content = [text("<|image_pad|>"), {"type": "image", "image": SQUARE}]
    turns = [{"role": "user", "content": content}, {"role": "user", "content": "a<|image_pad|>"}]
    [output] = llm.chat(turns, GREEDY)
    broken = encoded(llm, "<user>< |image_pad|>"), encoded(llm, "<user>a< |image_pad|><assistant>")
    assert IMAGE not in broken[0] + broken[1]
    assert output.token_ids == checkpoint.generate([*broken[0], SQUARE, *broken[1]], 8)


def test_text_only_calls_refuse_images(llm: LLM) -> None:
    item = as_input([5, SQUARE, 7])
    with pytest.raises(RequestError, match="text, without images, for embeddings"):
        llm.embed(item)
    with pytest.raises(RequestError, match="multi_modal_data: score reads text only"):
        llm.score(item, ["a"])
    params = SamplingParams(truncate_prompt_tokens=9)
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be None"):
        llm.generate(item, params, use_tqdm=False)


def assert_refused(llm: LLM, reason: str) -> None:
    with pytest.raises(RequestError, match=f"multi_modal_data: {reason}"):
        llm.generate(as_input([5, SQUARE]), GREEDY, use_tqdm=False)
    content = [{"type": "image", "image": SQUARE}]
    with pytest.raises(RequestError, match=rf"messages\[0\].content has .* 'image', but {reason}"):
        llm.chat([{"role": "user", "content": content}], GREEDY)
    [output] = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert len(output.token_ids) == 8


def test_images_can_be_ruled_out(folder: Path) -> None:
    with LLM(folder, **OPTIONS, limit_mm_per_prompt={"image": 0}) as llm:
        assert_refused(llm, "limit_mm_per_prompt rules out images")


def test_without_pillow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "_has_pillow", lambda: False)
    with LLM(folder, **OPTIONS) as llm:
        assert not llm.engine.core.executor.parts
        assert_refused(llm, r"images need Pillow: pip install 'nanovllm\[vision\]'")


def test_without_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanovllm.vision", None)
    with LLM(folder, **OPTIONS) as llm:
        assert_refused(llm, "nanovllm/vision, which reads images, is missing")


def test_without_the_settings_of_the_image_processor(folder: Path, checkpoint: TinyVision) -> None:
    other = with_chat(checkpoint.path, folder.parent / "text")
    (other / "preprocessor_config.json").unlink()
    with LLM(other, **OPTIONS) as llm:
        assert_refused(llm, "this copy of the model has no preprocessor_config.json")


def test_a_damaged_tower_is_named(folder: Path, checkpoint: TinyVision) -> None:
    other = with_chat(checkpoint.path, folder.parent / "damaged")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"depth": 2', '"depth": 3'))
    match = r"blocks.2.*to run the text model alone, set limit_mm_per_prompt={\"image\": 0}"
    with pytest.raises(CheckpointError, match=match):
        LLM(other, **OPTIONS)
    with LLM(other, **OPTIONS, limit_mm_per_prompt={"image": 0}) as llm:
        assert_refused(llm, "limit_mm_per_prompt rules out images")
