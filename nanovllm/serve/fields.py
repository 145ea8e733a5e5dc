"""What each API does with the fields that it does not use: ignore hints, refuse the rest.

A request schema declares the fields that are used; its `policy` lists the others. docs/serving.md
shows both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nanovllm.errors import RequestError
from nanovllm.validation import suggestion

NOT_HOSTED = "this server has no hosted tools"
MAX_MESSAGES = 4096  # a client could fill the log
MAX_LOGGED = 16  # unknown names of one object that are logged

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """The fields of an object that its schema does not declare."""

    where: str = "requests"  # names the object in the log
    ignored: frozenset[str] = frozenset()  # hints that do not affect the output
    refused: Mapping[str, str] = field(default_factory=dict)  # name -> what to do instead
    codes: Mapping[str, str] = field(default_factory=dict)  # error codes of refused fields
    ignores_unknown: bool = False  # False: unknown fields are refused

    def check(self, names: Iterable[str], used: Iterable[str]) -> None:
        """Log which of the given undeclared names are ignored; raise RequestError for others."""
        unknown = []
        for name in names:
            shown = str(name).encode(errors="replace").decode()  # unpaired surrogates become "?"
            if name in self.refused:
                message = f"{shown} is not supported: {self.refused[name]}"
                raise RequestError(message, param=shown, code=self.codes.get(name))
            if name in self.ignored:
                log_ignored(logging.INFO, self.where, shown, "it has no effect on the output")
            elif self.ignores_unknown:
                unknown.append(shown)
            else:
                message = f"{shown} is not supported{suggestion(shown, used)}"
                raise RequestError(message, param=shown)
        for shown in unknown[:MAX_LOGGED]:
            log_ignored(logging.WARNING, self.where, f"{shown!r:.80}", "it is unknown")


class LogOnce(logging.Filter):
    """Drops messages that were logged before, and all new ones after the first thousands."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._logged and len(self._logged) < MAX_MESSAGES
        if is_new:
            self._logged.add(message)
        return is_new


def log_ignored_once() -> None:
    """Log each ignored name only once in this process."""
    if not any(isinstance(each, LogOnce) for each in logger.filters):
        logger.addFilter(LogOnce())


def log_ignored(level: int, where: str, name: str, why: str) -> None:
    logger.log(level, "%s: ignored %s, because %s", where, name, why)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HINTS = _names(
    "store metadata service_tier prompt_cache_key prompt_cache_retention safety_identifier "
    "include cache_control user"
)
COMMON = FieldPolicy(ignored=HINTS)
CHAT = FieldPolicy(
    "/v1/chat/completions",
    # The last three lines are from OpenRouter, llama.cpp, and clients of several services.
    HINTS | {"verbosity", "prediction", "modalities", "usage", "provider", "cache_prompt"},
    {
        "functions": "send tools",
        "function_call": "send tool_choice",
        "audio": "this model writes text only",
        "web_search_options": "this server has no hosted tools; send a function in tools",
        "chat_template": "set --chat-template when starting the server",
        "logits_processors": "clients cannot run code on the server",
    },
)
CHAT_MESSAGE = FieldPolicy(
    "messages of /v1/chat/completions",
    _names(
        "annotations cache_control parsed provider_specific_fields reasoning_details refusal audio"
    ),
)
CALLED_FUNCTION = FieldPolicy("calls of /v1/chat/completions", _names("parsed_arguments"))
STREAM_OPTIONS = FieldPolicy("stream_options", _names("include_obfuscation"))
# Sampling fields of the chat API, which the two APIs below do not have.
SAMPLING_ELSEWHERE = dict.fromkeys(
    _names(
        "n stop stop_token_ids min_p min_tokens ignore_eos presence_penalty frequency_penalty "
        "repetition_penalty logit_bias allowed_token_ids bad_words response_format "
        "structured_outputs truncate_prompt_tokens prompt_logprobs logprobs cache_salt "
        "chat_template_kwargs max_completion_tokens"
    ),
    "use /v1/chat/completions",
)
RESPONSES = FieldPolicy(
    "/v1/responses",
    (HINTS - {"metadata", "include", "user"})
    | {"client_metadata", "context_management", "max_tool_calls", "stream_options"},
    {
        **SAMPLING_ELSEWHERE,
        "top_k": "use /v1/chat/completions",
        "max_tokens": "send max_output_tokens",
        "previous_response_id": "responses are not stored; send the whole input",
        "conversation": "responses are not stored; send the whole input",
        "prompt": "send input",
    },
    ignores_unknown=True,
)
RESPONSES_TEXT = FieldPolicy("text of /v1/responses", _names("verbosity"), ignores_unknown=True)
REASONING = FieldPolicy(
    "reasoning",
    _names("summary generate_summary context max_tokens exclude"),
    ignores_unknown=True,
)
MESSAGES = FieldPolicy(
    "/v1/messages",
    HINTS | {"context_management", "container", "inference_geo", "mcp_servers", "speed", "betas"},
    {
        **SAMPLING_ELSEWHERE,
        "stop": "send stop_sequences",
        "seed": "use /v1/chat/completions",
        "output_format": "send output_config.format",
        "thread": "threads are not stored; send all messages",
    },
    {"thread": "thread_unsupported_request"},  # makes clients retry without a thread
    ignores_unknown=True,
)
MESSAGES_TURN = FieldPolicy(
    "turns of /v1/messages",
    _names("output_config id cache_control"),
    ignores_unknown=True,
)
MESSAGES_TOOL = FieldPolicy(
    "tools of /v1/messages",
    _names("cache_control eager_input_streaming input_examples allowed_callers"),
    ignores_unknown=True,
)
MESSAGES_OPTIONS = FieldPolicy(
    "options of /v1/messages",
    _names("display"),
    {"task_budget": "send max_tokens"},
    ignores_unknown=True,
)
