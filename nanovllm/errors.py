"""Every error nanovllm raises on purpose: each says what was wrong, the value, and what to do."""


class NanovllmError(Exception):
    """Base of all errors raised by nanovllm, with their machine-readable parts."""

    status = 500  # of an HTTP response

    def __init__(
        self,
        *args: object,
        param: str | None = None,  # the option, or the field of a request, that is wrong
        code: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(*args)
        self.param, self.code = param, code
        if status is not None:
            self.status = status


class ConfigError(NanovllmError, ValueError):
    """An engine or sampling option has a value that cannot work."""

    status = 400


class RequestError(NanovllmError, ValueError):
    """A prompt cannot be served; other requests are unaffected."""

    status = 400


class PromptTooLongError(RequestError):
    """A prompt does not fit into the context."""

    def __init__(
        self, *args: object, param: str = "prompt", code: str = "context_length_exceeded"
    ) -> None:
        super().__init__(*args, param=param, code=code)


class GrammarError(RequestError):
    """A grammar cannot be enforced; `param` is the field that holds it."""

    def __init__(self, *args: object, param: str = "structured_outputs") -> None:
        super().__init__(*args, param=param)

    def __str__(self) -> str:
        return f"{self.param}: {super().__str__()}"


class CheckpointError(NanovllmError):
    """A model folder, file or hub id cannot be loaded."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is readable but its architecture or a variant of it is not supported."""


class UnsupportedQuantisationError(UnsupportedModelError, ConfigError):
    """The checkpoint's weights are quantized in a way that cannot be read."""


class EngineError(NanovllmError, RuntimeError):
    """The engine is closed or has failed and can serve nothing more."""

    status = 503


class WorkerError(EngineError):
    """A worker process raised or died, and took its engine with it."""
