"""Batch jobs continue where they were stopped, whatever stopped them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import resource
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanovllm.batch import batch_engine as engine
from nanovllm.batch.batch_engine import RowEngine, RowError, RowOptions, row_seed
from nanovllm.batch.progress_file import ProgressFile
from nanovllm.batch.rows import Row, read_rows, scan, windows
from nanovllm.batch.run_batch import run_job
from nanovllm.cli import main
from nanovllm.errors import ConfigError, EngineError, NanovllmError
from nanovllm.outputs import StreamPiece
from nanovllm.serve.server_options import ServerOptions
from tests.serve.fake_llm import FakeLLM


async def echo(row: Row) -> dict[str, Any]:
    await asyncio.sleep(0)
    if row.error is not None:
        raise RowError("invalid_row", row.error)
    if row.is_batch:
        return {"id": f"batch_req_{row.index}", "custom_id": row.custom_id, "response": {}}
    return {**row.fields, "index": row.index, "text": row.fields["prompt"][::-1]}


def row_engine(llm: FakeLLM, **options: Any) -> RowEngine:
    server = ServerOptions(("tiny",), generation_config="vllm")
    return RowEngine(RowOptions(llm.config, server, **options), llm)  # type: ignore[arg-type]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(path: Path, output: Path, answer: Any = echo, overwrite: bool = False) -> ProgressFile:
    found = scan(path)
    progress_file = ProgressFile(output, {"input": found.digest}, found.num_rows, overwrite)
    try:
        asyncio.run(run_job(path, progress_file, answer, max_concurrency=8))
    finally:
        progress_file.close()
    return progress_file


def plain_rows(count: int) -> list[Any]:
    return [{"prompt": f"prompt {i * 7919 % count}", "kept": i} for i in range(count)]


def test_rows_are_answered_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [*plain_rows(100), "no object"])
    with path.open("a") as file:
        file.write("{broken\n\n")
    progress_file = run(path, tmp_path / "out.jsonl")
    lines = read_lines(progress_file.output)
    assert sorted(line["index"] for line in lines) == list(range(100))
    assert all(line["kept"] == line["index"] for line in lines)
    errors = {line["index"]: line["error"] for line in read_lines(progress_file.errors)}
    assert errors[100]["message"] == "the row is not a JSON object"
    assert errors[101]["message"].startswith("the row is not valid JSON")
    before = progress_file.output.read_bytes(), progress_file.errors.read_bytes()
    again = run(path, tmp_path / "out.jsonl", answer=None)  # no row is left
    assert (again.output.read_bytes(), again.errors.read_bytes()) == before


@pytest.mark.parametrize("cut", [0, 1, 17])
def test_a_half_line_is_cut_and_its_row_answered_again(tmp_path: Path, cut: int) -> None:
    path = write_rows(tmp_path / "in.jsonl", plain_rows(50))
    progress_file = run(path, tmp_path / "out.jsonl")
    whole = progress_file.output.read_bytes()
    half = whole.rfind(b"\n", 0, len(whole) // 2) + 1 + cut
    progress_file.output.write_bytes(whole[:half])
    again = run(path, tmp_path / "out.jsonl")
    assert sorted(again.output.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_an_engine_that_dies_ends_the_job_and_costs_no_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", plain_rows(200))

    async def dying(row: Row) -> dict[str, Any]:
        if row.index == 77:
            raise EngineError("it died")
        return await echo(row)

    with pytest.raises(EngineError, match="it died"):
        run(path, tmp_path / "out.jsonl", dying)
    progress_file = run(path, tmp_path / "out.jsonl")
    assert sorted(line["index"] for line in read_lines(progress_file.output)) == list(range(200))


def test_only_the_job_that_was_begun_goes_on(tmp_path: Path) -> None:
    path, output = write_rows(tmp_path / "in.jsonl", plain_rows(5)), tmp_path / "out.jsonl"
    run(path, output)
    write_rows(path, plain_rows(6))
    with pytest.raises(ConfigError, match="started with a different input"):
        run(path, output)
    assert len(read_lines(run(path, output, overwrite=True).output)) == 6
    stranger = tmp_path / "notes.jsonl"
    stranger.write_text("something else\n")
    with pytest.raises(ConfigError, match="does not belong to a job"):
        run(path, stranger)
    assert stranger.read_text() == "something else\n"


def test_lines_of_another_job_are_noticed(tmp_path: Path) -> None:
    path, output = write_rows(tmp_path / "in.jsonl", plain_rows(5)), tmp_path / "out.jsonl"
    run(path, output)
    with output.open("a") as file:
        file.write('{"index": 5}\n')
    with pytest.raises(ConfigError, match="line 6 does not belong to this job"):
        run(path, output)


def test_duplicate_ids_are_refused(tmp_path: Path) -> None:
    rows = [{"custom_id": f"row {i % 9}", "url": "/v1/completions", "body": {}} for i in range(10)]
    with pytest.raises(ConfigError, match="several rows have the custom_id 'row 0'"):
        scan(write_rows(tmp_path / "in.jsonl", rows))
    progress_file = run(write_rows(tmp_path / "in.jsonl", rows[:9]), tmp_path / "out.jsonl")
    assert {line["custom_id"] for line in read_lines(progress_file.output)} == {
        row["custom_id"] for row in rows
    }


@pytest.mark.parametrize("text", ["", "{", "null", "\xff"])
def test_settings_that_cannot_be_read_are_said_so(tmp_path: Path, text: str) -> None:
    path, output = write_rows(tmp_path / "in.jsonl", plain_rows(5)), tmp_path / "out.jsonl"
    run(path, output)
    Path(f"{output}.job.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="is damaged; use --overwrite"):
        run(path, output)
    assert len(read_lines(run(path, output, overwrite=True).output)) == 5


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """A pipe can be read only once, but a job reads its input twice and its output again."""
    path = write_rows(tmp_path / "in.jsonl", plain_rows(5))
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with pytest.raises(ConfigError, match="twice"):
            scan(Path(f"/dev/fd/{process.stdout.fileno()}"))
    with pytest.raises(ConfigError, match="cannot write /dev/null"):
        run(path, Path("/dev/null"))


def test_the_input_is_never_overwritten(tmp_path: Path, capsys: Any) -> None:
    path = write_rows(tmp_path / "in.jsonl", plain_rows(5))
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    whole = path.read_bytes()
    for output in (path, link):
        assert main(["batch", str(path), "-o", str(output), "--overwrite"]) == 2
        assert "is the input" in capsys.readouterr().err
    for name in ("out.jsonl.errors.jsonl", "out.jsonl.job.json"):
        beside = write_rows(tmp_path / name, plain_rows(5))
        assert main(["batch", str(beside), "-o", str(tmp_path / "out.jsonl"), "--overwrite"]) == 2
        assert path.read_bytes() == beside.read_bytes() == whole


def test_an_input_that_shrinks_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", plain_rows(5))
    progress_file = ProgressFile(tmp_path / "out.jsonl", {}, scan(path).num_rows, False)
    write_rows(path, plain_rows(4))
    with pytest.raises(NanovllmError, match="changed"):
        asyncio.run(run_job(path, progress_file, echo, max_concurrency=8))
    progress_file.close()


def test_what_answers_depend_on_may_not_change(tmp_path: Path, capsys: Any) -> None:
    """Model names in responses, and the contents of files; without rows no engine is needed."""
    path, template = write_rows(tmp_path / "in.jsonl", []), tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    defaults = tmp_path / "generation_config.json"
    defaults.write_text('{"temperature": 0.5}')
    files = ["--chat-template", str(template), "--generation-config", str(tmp_path)]
    command = ["batch", str(path), "-o", str(tmp_path / "out.jsonl"), *files]
    assert main(command) == main([*command, "--max-num-seqs", "8"]) == 0
    assert main([*command, "--served-model-name", "other"]) == 2
    assert "started with a different served_model_name" in capsys.readouterr().err
    template.write_text("{{ messages[0] }}")
    defaults.write_text('{"temperature": 0.7}')
    assert main(command) == 2
    assert "a different generation_config and a different chat_template" in capsys.readouterr().err


class EchoEngine:
    """Echoes rows, and fails those that request it."""

    def __init__(self, options: Any) -> None:
        pass

    async def __call__(self, row: Row) -> dict[str, Any]:
        if "bad" in row.fields["prompt"]:
            raise RowError("invalid_row", "it is bad")
        return {**await echo(row), "usage": {"prompt_tokens": 1}}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("prompts", "status"), [(["a", "b"], 0), (["a", "bad"], 1), (["bad", "bad"], 2), ([], 0)]
)
def test_the_exit_status_says_whether_rows_failed(
    prompts: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RowEngine", EchoEngine)
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    command = ["batch", str(path), "-o", str(tmp_path / "out.jsonl")]
    assert main(command) == status
    assert main(command) == status  # the job is already finished


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Limit the size of files: the write that exceeds it is truncated, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_bytes", [300, 301, 1000])
def test_a_full_disk_ends_the_job_and_costs_no_row(tmp_path: Path, num_bytes: int) -> None:
    rows = [{"prompt": f"{i} " * (1 + i * 7919 % 50)} for i in range(100)]
    path, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    message = f"cannot write {re.escape(str(output))}: "
    with full_disk(num_bytes), pytest.raises(NanovllmError, match=message):
        run(path, output)
    assert output.read_bytes().endswith(b"\n")
    lines = read_lines(run(path, output).output)
    assert sorted(line["index"] for line in lines) == list(range(100))


HOLDER = """\
import sys, time
from pathlib import Path
from nanovllm.batch.progress_file import ProgressFile
progress_file = ProgressFile(Path(sys.argv[1]), {}, 1, False)
print("held", flush=True)
time.sleep(600)
"""


def test_one_process_works_on_a_job_and_its_lock_dies_with_it(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", HOLDER, str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another process is working"):
            ProgressFile(output, {}, 1, False)
        holder.kill()
    ProgressFile(output, {}, 1, False).close()


@pytest.mark.parametrize("is_text", [True, False])
def test_rows_that_begin_alike_meet(tmp_path: Path, is_text: bool) -> None:
    rng = random.Random(0)
    prompts: list[Any] = [f"system {rng.randrange(5)}: {i}" for i in range(500)]
    if not is_text:
        prompts = [[*map(ord, prompt)] for prompt in prompts]
    # These prompts are invalid, but that is detected elsewhere.
    strange = [None, 3, ["a", 1], [-1], [2**70], [[1, 2]], "\ud800"]
    rows = [{"prompt": prompt} for prompt in [*prompts, *strange]]
    path = write_rows(tmp_path / "in.jsonl", rows)
    (window,) = windows(read_rows(path))
    systems = [row.fields["prompt"][:8] for row in window if row.index < len(prompts)]
    assert sum(a != b for a, b in itertools.pairwise(systems)) == 4


def test_parquet_needs_pyarrow_or_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(ConfigError, match="pip install pyarrow"):
            scan(path)
        return
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain_rows(10)), path)
    assert [row.fields for row in read_rows(path)] == plain_rows(10)


def test_a_seed_is_the_rows_own() -> None:
    seeds = {row_seed(seed, index) for seed in range(3) for index in range(1000)}
    assert len(seeds) > 2990


# Peak memory of the program itself: `getrusage` includes its parent's memory at the start.
MEASURED = """\
import re, sys
from pathlib import Path
from tests.batch.test_jobs import run
run(Path(sys.argv[1]), Path(sys.argv[2]))
status = Path("/proc/self/status").read_text()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024)
"""


@pytest.mark.slow
@pytest.mark.endurance
@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    megabytes = []
    for number in (2000, 200_000):
        rows = [{"prompt": f"row {i}", "max_tokens": 4} for i in range(number)]
        path = write_rows(tmp_path / f"{number}.jsonl", rows)
        command = [sys.executable, "-c", MEASURED, str(path), str(tmp_path / f"{number}.out")]
        megabytes.append(int(subprocess.run(command, capture_output=True, check=True).stdout))
    print(f"{megabytes} MB")
    assert megabytes[1] < megabytes[0] + 50


@dataclass
class FailingLLM(FakeLLM):
    """An engine that fails every request but stays alive."""

    num_tries: int = 0

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[StreamPiece, None]:
        self.num_tries += 1
        raise EngineError("its numbers are not finite")
        yield


def test_a_row_that_fails_in_every_engine_is_an_error_of_its_own() -> None:
    llm = FailingLLM(others=[FakeLLM()])
    answers = row_engine(llm, is_raw=True)
    with pytest.raises(RowError, match="not finite"):
        asyncio.run(answers(Row(0, {"prompt": "x"})))
    assert llm.num_tries == 2
    llm.error = EngineError("all are lost")
    with pytest.raises(EngineError, match="not finite"):
        asyncio.run(answers(Row(0, {"prompt": "x"})))
    assert llm.num_tries == 3
