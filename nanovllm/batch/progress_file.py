"""Progress of a batch job, kept in its output files so that the job can be killed at any time.

A row is done when its complete line is in the output file or the error file. Each line is appended
in one write, so a kill leaves at most one partial last line, which the next start removes.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError, NanovllmError, file_errors

ROW_ID = "batch_req_"  # an output's id is this and the row's index (OpenAI's batch format)


class ProgressFile:
    """The output, error and settings files of a job; only one process at a time can open them."""

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
        """Append the line of a row; raise ValueError or RecursionError if it is not valid JSON."""
        self._append(self.output, index, line)

    def write_error(self, index: int, custom_id: Any, code: str, message: str) -> None:
        error = {"code": code, "message": message}
        self._append(self.errors, index, {"custom_id": custom_id, "index": index, "error": error})
        self.num_errors += 1

    def close(self) -> None:
        """Flush everything to disk, and release the lock."""
        while self._files:
            path, file = self._files.popitem()
            with file, file_errors("write", path, NanovllmError):
                os.fsync(file)

    def _append(self, path: Path, index: int, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False, default=str)
        # UTF-8 cannot encode a lone surrogate, but JSON can escape it.
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        file = self._file(path)
        with file_errors("write", path, NanovllmError):
            num_written = file.write(data)
            if num_written != len(data):  # remove the partial line: no other line may follow it
                file.truncate(os.fstat(file.fileno()).st_size - num_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.is_done[index] = True

    def _file(self, path: Path) -> io.FileIO:
        if path not in self._files:
            if path.exists() and not path.is_file():
                raise ConfigError(f"cannot write {path}: a batch job needs a regular file")
            with file_errors("write", path):
                self._files[path] = io.FileIO(path, "a")
        return self._files[path]

    def _lock(self) -> None:
        """Lock the output file; the lock ends with the process."""
        try:
            fcntl.flock(self._file(self.output), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is working on {self.output}") from error

    def _check(self, settings: dict[str, Any]) -> None:
        """Write the settings of a new job; raise ConfigError if those of an existing one differ."""
        again = "; use --overwrite to start again"
        settings = json.loads(json.dumps(settings))  # tuples become lists
        if not self._settings_path.exists():
            if self.output.stat().st_size or self.errors.exists():
                raise ConfigError(f"{self.output} exists and does not belong to a job{again}")
            temporary = self._settings_path.with_suffix(".tmp")
            with file_errors("write", self._settings_path, NanovllmError):
                temporary.write_text(json.dumps(settings), encoding="utf-8")
                temporary.replace(self._settings_path)
            return
        try:
            before = dict(json.loads(self._settings_path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self._settings_path} is damaged{again}") from error
        changed = [key for key in settings | before if settings.get(key) != before.get(key)]
        if changed:
            names = " and a different ".join(changed)
            raise ConfigError(f"{self.output} was started with a different {names}{again}")

    def _read(self, path: Path) -> int:
        """Mark the rows in a file as done, and return their number; drop a partial last line."""
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
                    text = f"{path}: line {count} does not belong to this job"
                    raise ConfigError(text) from error
        return count


def _row_index(line: bytes) -> int:
    fields = json.loads(line)
    index = fields["index"] if "index" in fields else fields["id"].removeprefix(ROW_ID)
    if int(index) < 0:
        raise IndexError
    return int(index)
