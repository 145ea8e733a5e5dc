"""Options of the HTTP server, and the files they name; EngineConfig has the engine's options."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nanovllm.errors import ConfigError, RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import check_choices, check_types, has_folder, option, require

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the HTTP server; batch jobs also use the first six."""

    served_model_name: tuple[str, ...] = option((), "model names in the API", unset="MODEL")
    chat_template: str | None = option(None, "Jinja template, or its file", unset="the model's")
    generation_config: str = option(
        "auto",
        "source of sampling defaults: auto (the model), vllm (none), or a folder with a "
        "generation_config.json",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None, "JSON object of sampling defaults; overrides generation_config", parse=json.loads
    )
    tool_call_parser: str | None = option(None, "format of tool calls", unset="the template's")
    reasoning_parser: str | None = option(None, "format of reasoning", unset="the template's")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all", env="NANOVLLM_HOST")
    port: int = option(8000, "port to listen on; 0 for any free one", env="NANOVLLM_PORT")
    api_key: tuple[str, ...] = option(
        (), "API keys; clients must send one of them", env="NANOVLLM_API_KEY"
    )
    allowed_origins: tuple[str, ...] = option((), "origins allowed by CORS; * for all")
    root_path: str = option("", "path prefix of this server behind a proxy", unset="/")
    ssl_keyfile: str | None = option(None, "private key file of the certificate")
    ssl_certfile: str | None = option(None, "certificate file for HTTPS", unset="none: HTTP")
    max_body_bytes: int = option(
        32 * 2**20, "maximum size of a request body; larger requests get a 413"
    )
    allowed_media_domains: tuple[str, ...] = option(
        (), "hosts from which images are fetched; others must be sent as data URLs", unset="none"
    )
    max_queued_requests: int = option(
        2048, "maximum number of waiting requests; excess ones get a 429"
    )
    limit_concurrency: int | None = option(
        None, "maximum number of open requests; excess ones get a 503"
    )
    request_timeout: float | None = option(None, "maximum duration of a request in seconds")
    shutdown_timeout: float = option(10.0, "seconds that requests have to finish after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] | None = option(
        None, "info logs requests and throughput", unset="info at a terminal, else warning"
    )
    restart_engine: bool = option(False, "start a new engine when its process dies or hangs")
    in_process: bool = option(False, "run the engine in this process, where breakpoint() works")
    metrics_prefix: str = option("vllm:", "prefix of metric names")
    demo: bool = option(
        False,
        "use a small KV cache that is easy to watch: 192 blocks of 32 tokens; 256 tokens per step",
    )
    allow_pause: bool = option(
        False, "let clients pause and step the engine, and read other clients' prompts"
    )
    # The next two are not command-line options: they are set when the server starts.
    is_local: bool = False  # reject requests whose Host header does not name this machine
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        keys = "non-empty keys (from --api-key or $NANOVLLM_API_KEY)"
        self._require("api_key", all(self.api_key), keys)
        for name in ("max_body_bytes", "max_queued_requests", "limit_concurrency"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1")
        timeout, shutdown = self.request_timeout, self.shutdown_timeout
        is_time = timeout is None or 0 < timeout < math.inf
        self._require("request_timeout", is_time, "above 0 seconds")
        self._require("shutdown_timeout", 0 <= shutdown < math.inf, "0 or more seconds")
        override = self.override_generation_config
        if override is not None:
            is_known = isinstance(override, dict) and override.keys() <= set(SAMPLING_NAMES)
            expected = f"a JSON object with some of {', '.join(SAMPLING_NAMES)}"
            self._require("override_generation_config", is_known, expected)
            SamplingParams(**override)
        if self.allow_pause and not has_folder("nanovllm.serve.live"):
            raise ConfigError("the engine cannot be paused: nanovllm/serve/live is missing")

    def _require(self, name: str, is_valid: bool, expected: str) -> None:
        require(is_valid, name, expected, getattr(self, name), ConfigError)


def resolve(
    options: ServerOptions, model: str, generation_config: Mapping[str, Any]
) -> ServerOptions:
    """Read the files that the options name, and fill in defaults that depend on the model."""
    defaults = read_sampling_defaults(options.generation_config, generation_config)
    root_path = options.root_path.strip("/")
    return replace(
        options,
        served_model_name=options.served_model_name or (model,),
        # Accept separate values, or one JSON list as in vLLM.
        allowed_origins=tuple(re.findall(r'[^\s,"\[\]]+', " ".join(options.allowed_origins))),
        root_path=f"/{root_path}" if root_path else "",
        chat_template=read_chat_template(options.chat_template),
        sampling_defaults=defaults | dict(options.override_generation_config or {}),
    )


def read_chat_template(template: str | None) -> str | None:
    """Return the text of a chat template, given as text or as a file name."""
    if template is None:
        return None
    from nanovllm.engine.chat_template import ChatTemplate

    text = template if "{" in template else read_text(template)
    try:
        ChatTemplate(text)
    except RequestError as error:
        raise ConfigError(f"--chat-template: {error}") from error
    return text


def read_sampling_defaults(where: str, of_model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults that --generation-config selects.

    `where` is "vllm" (no defaults), "auto" (those in `of_model`), or a folder.
    """
    if where == "vllm":
        return {}
    if where != "auto":
        path = str(Path(where, "generation_config.json"))
        try:
            of_model = dict(json.loads(read_text(path)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    values = {name: of_model.get(name) for name in SAMPLING_NAMES}
    defaults = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except ConfigError as error:
        raise ConfigError(
            f"generation_config.json: {error}; --generation-config vllm ignores the file"
        ) from error
    return defaults


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
