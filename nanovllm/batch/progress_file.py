"""Progress of a batch job, kept in its output files: the job may be killed at any moment.

A row counts as done when its whole line is in the output or among the errors. A line is one write
at the end of a file, so a kill leaves at most one half line, at the end, which the next start cuts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError, NanovllmError

ROW_ID = "batch_req_"  # and the index of a row in OpenAI's batch format


class ProgressFile:
    """The output, the errors, and the settings of a job; one process at a time may hold it."""

    def __init__(
        self, output: Path, settings: dict[str, Any], num_rows: int, overwrite: bool
    ) -> None:
        self.output, self.errors = output, Path(f"{output}.errors.jsonl")
        self._settings_path = Path(f"{output}.job.json")
        self.is_done = bytearray(num_rows)
        self.num_errors = 0
        self._files: dict[Path, io.FileIO] = {}
        try:
            self._lock()
            if overwrite:
                self._settings_path.unlink(missing_ok=True)
                self.errors.unlink(missing_ok=True)
                os.truncate(self.output, 0)
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
        """Append the line of a row; raises ValueError or RecursionError if JSON cannot hold it."""
        self._append(self.output, index, line)

    def write_error(self, index: int, custom_id: Any, code: str, message: str) -> None:
        error = {"code": code, "message": message}
        self._append(self.errors, index, {"custom_id": custom_id, "index": index, "error": error})
        self.num_errors += 1

    def close(self) -> None:
        """Release the lock; what was written survives a failure of the machine."""
        while self._files:
            path, file = self._files.popitem()
            with file, _naming(path):
                os.fsync(file)

    def _append(self, path: Path, index: int, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False, default=str)
        # JSON has an escape for a lone surrogate, which UTF-8 cannot encode.
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        file = self._file(path)
        with _naming(path):
            num_written = file.write(data)
            if num_written != len(data):  # no other line may follow a half one
                file.truncate(os.fstat(file.fileno()).st_size - num_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.is_done[index] = True

    def _file(self, path: Path) -> io.FileIO:
        if path not in self._files:
            if path.exists() and not path.is_file():
                raise ConfigError(f"cannot write {path}: a job needs a file, which it reads again")
            try:
                self._files[path] = io.FileIO(path, "a")
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        return self._files[path]

    def _lock(self) -> None:
        """Lock the output; the lock ends with the process."""
        try:
            fcntl.flock(self._file(self.output), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is working on {self.output}") from error

    def _check(self, settings: dict[str, Any]) -> None:
        """Continue only the job that was begun."""
        again = "; give --overwrite to begin anew"
        settings = json.loads(json.dumps(settings))  # tuples become lists
        if not self._settings_path.exists():
            if self.output.stat().st_size or self.errors.exists():
                raise ConfigError(f"{self.output} is there already and not of a job{again}")
            whole = self._settings_path.with_suffix(".tmp")
            with _naming(self._settings_path):
                whole.write_text(json.dumps(settings), encoding="utf-8")
                whole.replace(self._settings_path)
            return
        try:
            before = dict(json.loads(self._settings_path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self._settings_path} is damaged{again}") from error
        changed = [key for key in settings | before if settings.get(key) != before.get(key)]
        if changed:
            names = " and another ".join(changed)
            raise ConfigError(f"{self.output} was begun with another {names}{again}")

    def _read(self, path: Path) -> int:
        """Note which rows are done, and return their number; a half line at the end is cut."""
        count = end = 0
        if not path.exists():
            return count
        with open(path, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    os.truncate(path, end)
                    break
                count, end = count + 1, end + len(line)
                try:
                    self.is_done[_row_index(line)] = True
                except (ValueError, TypeError, LookupError, AttributeError) as error:
                    raise ConfigError(f"{path}: line {count} is not of this job") from error
        return count


def _row_index(line: bytes) -> int:
    fields = json.loads(line)
    index = fields["index"] if "index" in fields else fields["id"].removeprefix(ROW_ID)
    if int(index) < 0:
        raise IndexError
    return int(index)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file that could not be written, as when the disk is full."""
    try:
        yield
    except OSError as error:
        raise NanovllmError(f"cannot write {path}: {error.strerror}") from error
