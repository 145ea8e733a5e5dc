"""Every error nanovllm raises on purpose: each says what was wrong, the value, and what to do."""


class NanovllmError(Exception):
    """Base of all errors raised by nanovllm."""


class ConfigError(NanovllmError, ValueError):
    """An engine or sampling option has a value that cannot work."""


class RequestError(NanovllmError, ValueError):
    """A prompt cannot be served; other requests are unaffected."""


class PromptTooLongError(RequestError):
    """A prompt does not fit into the context."""


class GrammarError(RequestError):
    """`structured_outputs`, with which the message begins, cannot be enforced."""


class CheckpointError(NanovllmError):
    """A model folder, file or hub id cannot be loaded."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is readable but its architecture or a variant of it is not supported."""


class UnsupportedQuantisationError(UnsupportedModelError, ConfigError):
    """The checkpoint's weights are quantised in a way that cannot be read."""


class EngineError(NanovllmError, RuntimeError):
    """The engine is closed or has failed and can serve nothing more."""


class WorkerError(EngineError):
    """A worker process raised or died, and took its engine with it."""
