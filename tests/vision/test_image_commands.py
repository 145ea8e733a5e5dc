"""Images of the command line: `generate --image`, `/image` in chats, and rows of batch jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from nanovllm import cli
from nanovllm.cli.chat import Conversation, run_command
from nanovllm.cli.images import data_url
from nanovllm.errors import RequestError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from tests.vision.tiny_vision import Prompt, TinyVision, noise, tiny_vision, with_chat

pytestmark = pytest.mark.usefixtures("one_thread")
SQUARE, OTHER = noise(1, 32, 32), noise(2, 32, 32)
SIZES = ["--dtype", "float32", "--device", "cpu", "--max-num-seqs", "2", "--max-model-len", "160"]


@pytest.fixture(scope="module")
def checkpoint(checkpoint_root: Path) -> TinyVision:
    return tiny_vision(checkpoint_root, "dense")


@pytest.fixture(scope="module")
def folder(checkpoint: TinyVision, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model beside two image files."""
    folder = tmp_path_factory.mktemp("commands")
    SQUARE.save(folder / "square.png")
    OTHER.save(folder / "other.png")
    return with_chat(checkpoint.path, folder / "model")


def expected(checkpoint: TinyVision, tokenizer: Any, *pieces: Any) -> str:
    prompt: Prompt = []
    for piece in pieces:
        is_text = isinstance(piece, str)
        prompt += tokenizer.encode(piece, add_special_tokens=False) if is_text else [piece]
    text: str = tokenizer.decode(checkpoint.generate(prompt, 8), skip_special_tokens=True)
    return text


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def test_generate(
    folder: Path, checkpoint: TinyVision, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--image", str(folder.parent / "square.png"), "--image", f"{folder.parent}/other.png"]
    given = ["--max-tokens", "8", "--ignore-eos", "--json", *SIZES]
    assert cli.main(["generate", str(folder), "what?", "who?", *files, *given]) == 0
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["text"] for line in lines] == [
        expected(checkpoint, tokenizer, "<user>", SQUARE, OTHER, f"{question}<assistant>")
        for question in ("what?", "who?")
    ]


def test_generate_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        ("--image", "none.png"): "cannot read none.png: No such file",
        ("--image", str(folder / "config.json")): "image must be one of PNG",
        ("--image", str(folder.parent / "square.png"), "--raw"): "--image needs a chat template",
    }
    for options, reason in wrong.items():
        assert cli.main(["generate", str(folder), "what?", *options, *SIZES]) != 0
        assert reason in capsys.readouterr().err


def test_chat(
    folder: Path,
    checkpoint: TinyVision,
    tokenizer: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An image belongs to the next message, and stays in the conversation."""
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 2}
    with LLM(folder, **options, max_model_len=160) as llm:
        conversation = Conversation(llm, greedy)
        run_command(f"/image {folder.parent / 'square.png'}", conversation)
        assert capsys.readouterr().err == "Images of the next message: 1\n"
        first = conversation.ask("what?", lambda text: None).text
        assert first == expected(checkpoint, tokenizer, "<user>", SQUARE, "what?<assistant>")
        run_command(f"/save {tmp_path / 'chat.json'}", conversation)
        run_command(f"/load {tmp_path / 'chat.json'}", conversation)
        second = conversation.ask("more?", lambda text: None).text
        pieces = "<user>", SQUARE, f"what?<assistant>{first}<user>more?<assistant>"
        assert second == expected(checkpoint, tokenizer, *pieces)
        assert conversation.retry(lambda text: None).text == second
        # The images of a question that fails belong to the next one.
        run_command(f"/image {folder / 'config.json'}", conversation)
        for _ in range(2):
            with pytest.raises(RequestError, match="one of PNG"):
                conversation.ask("more?", lambda text: None)
        run_command("/image", conversation)
        assert conversation.ask("more?", lambda text: None).token_ids
    run_command("/image none.png", conversation)
    assert "cannot read none.png" in capsys.readouterr().err


def test_batch(folder: Path, checkpoint: TinyVision, tokenizer: Any, tmp_path: Path) -> None:
    url = data_url(str(folder.parent / "other.png"))
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    rows = [
        {"messages": [{"role": "user", "content": each}], "temperature": 0, "ignore_eos": True}
        for each in (content, "plain")
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["-o", str(tmp_path / "out.jsonl"), "--max-tokens", "8", *SIZES]
    assert cli.main(["batch", str(folder), str(tmp_path / "in.jsonl"), *given]) == 0
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    texts = {line["index"]: line["text"] for line in lines}
    assert texts[0] == expected(checkpoint, tokenizer, "<user>a", OTHER, "<assistant>")
    assert texts[1] == expected(checkpoint, tokenizer, "<user>plain<assistant>")
