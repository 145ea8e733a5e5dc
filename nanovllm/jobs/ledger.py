"""What a job has done so far, as its files tell: it may be killed at any moment.

A row counts as done when its whole line is in the output or among the errors. A line is one write
at the end of a file, so a kill leaves at most one half line, at the end, which the next start cuts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError, NanovllmError

CUT_BYTES = 2**16
ROW_ID = "batch_req_{}"  # of a row of a batch


class Ledger:
    """The output, the errors, and the settings of a job; one process at a time may hold it."""

    def __init__(
        self, output: Path, settings: dict[str, Any], num_rows: int, overwrite: bool
    ) -> None:
        self.output, self.errors = output, Path(f"{output}.errors.jsonl")
        self._settings_path = Path(f"{output}.job.json")
        self.is_done = bytearray(num_rows)
        self.num_errors = 0
        self._files: dict[Path, int] = {}
        try:
            self._lock()
            if overwrite:
                self._clear()
            self._check(settings)
            self.num_errors = self._read(self.errors)
            self._read(self.output)
        except BaseException:
            self.close()
            raise

    @property
    def num_done(self) -> int:
        return sum(self.is_done)

    def write(self, index: int, line: dict[str, Any]) -> None:
        self._append(self.output, index, line)

    def write_error(self, index: int, custom_id: Any, code: str, message: str) -> None:
        error = {"code": code, "message": message}
        line = {"custom_id": custom_id, "index": index, "error": error}
        self._append(self.errors, index, line)
        self.num_errors += 1

    def close(self) -> None:
        """Give it back; what was written stays even if the machine then fails."""
        while self._files:
            path, file = self._files.popitem()
            try:
                with _writing(path):
                    os.fsync(file)
            finally:
                os.close(file)

    def _append(self, path: Path, index: int, line: dict[str, Any]) -> None:
        # A lone surrogate, which UTF-8 cannot have, is written as the escape that JSON has for it.
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        file = self._file(path)
        with _writing(path):
            num_written = os.write(file, data)
            if num_written != len(data):  # and no other line may come after a half one
                os.ftruncate(file, os.fstat(file).st_size - num_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.is_done[index] = True

    def _file(self, path: Path) -> int:
        if path not in self._files:
            if path.exists() and not path.is_file():
                raise ConfigError(f"cannot write {path}: a job needs a file, which it reads again")
            try:
                self._files[path] = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        return self._files[path]

    def _lock(self) -> None:
        """The lock is of the file that is open here, and ends with the process."""
        try:
            fcntl.flock(self._file(self.output), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is working on {self.output}") from error

    def _clear(self) -> None:
        for path in (self._settings_path, self.errors):
            path.unlink(missing_ok=True)
        os.ftruncate(self._file(self.output), 0)

    def _check(self, settings: dict[str, Any]) -> None:
        """Go on only with the job that was begun."""
        again = "; give --overwrite to begin anew"
        if self._settings_path.exists():
            before = _settings_in(self._settings_path)
            if before is None:
                raise ConfigError(f"{self._settings_path} does not say what was begun{again}")
            changed = [key for key in settings | before if settings.get(key) != before.get(key)]
            if changed:
                raise ConfigError(
                    f"{self.output} was begun with another {' and another '.join(changed)}{again}"
                )
            return
        if self.output.stat().st_size or self.errors.exists():
            raise ConfigError(f"{self.output} is there already and not of a job{again}")
        whole = self._settings_path.with_suffix(".tmp")
        with _writing(self._settings_path):
            whole.write_text(json.dumps(settings), encoding="utf-8")
            whole.replace(self._settings_path)

    def _read(self, path: Path) -> int:
        """Note which rows are done; return how many."""
        if not path.exists():
            return 0
        _cut_half_line(self._file(path))
        count = 0
        for number, line in enumerate(_lines(path), 1):
            index = _index_of(line)
            if index is None or not 0 <= index < len(self.is_done):
                raise ConfigError(f"{path}: line {number} is not of this job")
            self.is_done[index] = True
            count += 1
        return count


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say which file could not be written, as where the disk is full."""
    try:
        yield
    except OSError as error:
        raise NanovllmError(f"cannot write {path}: {error.strerror}") from error


def _settings_in(path: Path) -> dict[str, Any] | None:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return settings if isinstance(settings, dict) else None


def _index_of(line: bytes) -> int | None:
    """Which row a line answers: its index, or the number in the id of a row of a batch."""
    try:
        fields = json.loads(line)
        if "index" in fields:
            return int(fields["index"])
        found = re.fullmatch(ROW_ID.format("([0-9]+)"), fields["id"])
        return int(found[1]) if found else None
    except (ValueError, TypeError, KeyError):
        return None


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def _cut_half_line(file: int) -> None:
    end = os.fstat(file).st_size
    while end > 0:
        start = max(end - CUT_BYTES, 0)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            os.ftruncate(file, start + newline + 1)
            return
        end = start
    os.ftruncate(file, 0)
