"""The exceptions that nanovllm defines; a message states the problem, the value and the fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class NanovllmError(Exception):
    """Base of nanovllm's own exceptions, with machine-readable attributes."""

    status = 500  # HTTP status code

    def __init__(
        self,
        *args: object,
        param: str | None = None,  # the invalid option or request field
        code: str | None = None,  # OpenAI's error code, such as "context_length_exceeded"
        status: int | None = None,
    ) -> None:
        super().__init__(*args)
        self.param, self.code = param, code
        if status is not None:
            self.status = status


class ConfigError(NanovllmError, ValueError):
    """An engine or sampling option has an invalid value."""

    status = 400


class RequestError(NanovllmError, ValueError):
    """A request is invalid or cannot be served; other requests are unaffected."""

    status = 400


class PromptTooLongError(RequestError):
    """A prompt is longer than the context."""

    def __init__(
        self, *args: object, param: str = "prompt", code: str = "context_length_exceeded"
    ) -> None:
        super().__init__(*args, param=param, code=code)


class GrammarError(RequestError):
    """A grammar cannot be enforced; `param` is the field that contains it."""

    def __init__(self, *args: object, param: str = "structured_outputs") -> None:
        super().__init__(*args, param=param)

    def __str__(self) -> str:
        return f"{self.param}: {super().__str__()}"


class CheckpointError(NanovllmError):
    """A model (a folder, a file or a hub id) cannot be loaded."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint's architecture, or a variant of it, is not supported."""


class UnsupportedQuantisationError(UnsupportedModelError, ConfigError):
    """The quantization of the checkpoint is not supported."""


class EngineError(NanovllmError, RuntimeError):
    """The engine cannot serve a call, usually because it is closed or has failed."""

    status = 503


class WorkerError(EngineError):
    """A worker process raised an error or died, so its engine has failed."""


@contextlib.contextmanager
def errors_about(param: str, kind: type[RequestError] = RequestError) -> Iterator[None]:
    """Set `param` on errors of type `kind` that are raised inside the `with` block."""
    try:
        yield
    except kind as error:
        error.param = param
        raise


@contextlib.contextmanager
def file_errors(task: str, path: object, kind: type[NanovllmError] = ConfigError) -> Iterator[None]:
    """Convert an OSError in the `with` block to an error such as "cannot write x: disk full"."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {task} {path}: {error.strerror}") from error


def at_index(error: RequestError, name: str, index: int, count: int | None) -> RequestError:
    """Return the error, with the index of the invalid prompt unless `count` is 1."""
    return (
        error
        if count == 1
        else RequestError(f"{name}[{index}]: {error}", param=name, code=error.code)
    )
