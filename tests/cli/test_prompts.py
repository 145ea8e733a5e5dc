"""Prompts from arguments, files and pipes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm.cli.generate import read_prompts
from nanovllm.errors import ConfigError

Pipe = Callable[[str], None]


def test_a_pipe_is_one_prompt(pipe: Pipe) -> None:
    pipe("one\n\n  two é\n\n")
    assert read_prompts([], None, by_lines=False) == ["one\n\n  two é"]


def test_lines_are_prompts_if_asked_for(pipe: Pipe) -> None:
    pipe("one\r\n\n  two\n \n")
    assert read_prompts([], None, by_lines=True) == [
        "one",
        "  two",
    ]


def test_a_dash_is_stdin(pipe: Pipe) -> None:
    pipe("b\nc")
    assert read_prompts(["a", "-", "d"], None, by_lines=False) == ["a", "b\nc", "d"]
    pipe("b\nc")
    prompts = read_prompts(["a", "-", "d"], None, by_lines=True)
    assert prompts == ["a", "b", "c", "d"]


def test_piped_text_is_appended(pipe: Pipe) -> None:
    pipe("the text\n")
    assert read_prompts(["Sum:", "Say:"], None, by_lines=False) == [
        "Sum:\n\nthe text",
        "Say:\n\nthe text",
    ]
    pipe("")
    assert read_prompts(["Sum:"], None, by_lines=False) == ["Sum:"]
    pipe("one\n\ntwo\n")
    assert read_prompts(["Say:"], None, by_lines=True) == [
        "Say:\n\none",
        "Say:\n\ntwo",
    ]


def test_a_redirected_file_is_appended(pipe: Pipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("the text\n")
    file = os.open(tmp_path / "file", os.O_RDONLY)
    os.dup2(file, 0)
    os.close(file)
    assert read_prompts(["Sum:"], None, by_lines=False) == ["Sum:\n\nthe text"]


@pytest.mark.usefixtures("nothing")
def test_files_are_one_prompt_or_one_for_each_line(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    Path(file).write_bytes(b"\xef\xbb\xbfone\n\xff\n")
    assert read_prompts(["a"], file, by_lines=False) == ["a", "one\n\ufffd"]
    assert read_prompts([], file, by_lines=True) == ["one", "\ufffd"]


@pytest.mark.usefixtures("nothing")
def test_other_kinds_of_stdin_are_not_read() -> None:
    assert read_prompts(["a"], None, by_lines=False) == ["a"]


@pytest.mark.usefixtures("nothing")
def test_lines_need_a_file_or_stdin() -> None:
    with pytest.raises(ConfigError, match="--lines needs --file PATH or text on stdin"):
        read_prompts(["a"], None, by_lines=True)


@pytest.mark.usefixtures("nothing")
def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    for arguments, file in (([], None), (["-"], None), ([], str(tmp_path / "empty"))):
        with pytest.raises(ConfigError, match=r"no prompt: .* is empty"):
            read_prompts(arguments, file, by_lines=True)
    for arguments in ([""], ["a", " "]):
        with pytest.raises(ConfigError, match="no prompt: an argument is empty"):
            read_prompts(arguments, None, by_lines=False)


def test_a_closed_stdin(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(0)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError, match="no prompt: pass one or more"):
        read_prompts([], None, by_lines=False)
    with pytest.raises(ConfigError, match="cannot read prompts from stdin"):
        read_prompts(["-"], None, by_lines=False)
    assert read_prompts(["a"], None, by_lines=False) == ["a"]


@pytest.mark.usefixtures("nothing")
def test_arguments_that_are_not_unicode() -> None:
    arguments = [os.fsdecode(b"a\xff"), "é"]
    assert read_prompts(arguments, None, by_lines=False) == ["a\ufffd", "é"]
