"""What a client is told when it cannot be served: a status, and a body in its API's own form."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from nanovllm.errors import ConfigError, GrammarError, NanovllmError, RequestError

MESSAGES_PATH = "/v1/messages"  # Anthropic's
OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIELD = re.compile("[a-z_]+")
TYPE_NAMES = ("bool", "dict", "float", "int", "list", "none", "str")
# What an error of the engine is about, as its message says: `temperature must be ...`.
_PARAM = re.compile(r"(\w+)(?:\[[^\]]*\])?(?::| must| has| is) ")


class ApiError(Exception):
    """The answer to a request that cannot be served."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = headers

    def openai(self) -> dict[str, Any]:
        kind = OPENAI_TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code is not None:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}


class TooLong(ApiError):
    """A prompt that does not fit the context, alone or with the answer that it asks for."""

    def __init__(self, num_prompt: int, num_answer: int, max_len: int, param: str) -> None:
        # Clients know it by these words of OpenAI's and, for Anthropic's API, "prompt is too long".
        asked = f" and max_tokens is {num_answer}, together {num_prompt + num_answer}"
        super().__init__(
            f"the prompt is too long: this model's maximum context length is {max_len} tokens, but "
            f"the prompt has {num_prompt} tokens{asked if num_answer else ''}; shorten the prompt "
            "or ask for fewer tokens",
            param=param,
            code="context_length_exceeded",
        )


def as_api_error(error: NanovllmError | ApiError | TimeoutError) -> ApiError:
    """Say whose fault it was: the request's, or the engine's."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError("the answer took longer than this server allows", 504)
    if isinstance(error, GrammarError):
        return about("structured_outputs", error)
    if isinstance(error, (RequestError, ConfigError)):
        named = _PARAM.match(str(error))
        return ApiError(str(error), param=named.group(1) if named else None)
    return ApiError(first_line(error), 503)


def about(param: str, error: GrammarError) -> ApiError:
    """Name the field of the request that the grammar came from."""
    return ApiError(str(error).replace("structured_outputs", param, 1), param=param)


def first_line(error: NanovllmError) -> str:
    """What happened to an engine; the traceback below it is for the log alone."""
    return str(error).partition("\n")[0]


def to_json(body: Any) -> bytes:
    """Encode a body; values that are functions, as large ones may be, are computed only here.

    Halves of surrogate pairs, which a request may hold, have no encoding.
    """
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=_computed)
    return text.encode("utf-8", "replace")


def _computed(value: Any) -> Any:
    if callable(value):
        return value()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def json_response(body: Any) -> Response:
    return Response(to_json(body), media_type="application/json")


def error_response(path: str, error: ApiError) -> Response:
    body = error.anthropic() if path.startswith(MESSAGES_PATH) else error.openai()
    headers = dict(error.headers or {})
    return Response(to_json(body), error.status, headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Any) -> Response:
        if isinstance(error, RequestValidationError):
            error = invalid(error.errors())
        elif isinstance(error, StarletteHTTPException):
            detail = str(error.detail)
            error = ApiError(detail, error.status_code, headers=error.headers)
        return error_response(_path(request), as_api_error(error))

    for kind in (RequestValidationError, StarletteHTTPException, HTTPException):
        app.add_exception_handler(kind, answer)

    async def fail(request: Request, error: Exception) -> Response:
        """Not the client's fault; uvicorn logs the traceback."""
        return error_response(_path(request), ApiError("an internal error", 500))

    app.add_exception_handler(Exception, fail)
    for own in (ApiError, NanovllmError, TimeoutError):
        app.add_exception_handler(own, answer)


def _path(request: Request) -> str:
    """Without the part that a proxy adds."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope["root_path"])


def invalid(problems: Any) -> ApiError:
    """Name the field and what is wrong with it; of several fields, the first."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not valid JSON: {first['ctx']['error']}")
    param = _place(first)
    if first["type"] == "unknown_field":
        name, hint = first["ctx"]["name"], first["ctx"]["hint"]
        param = f"{param}.{name}" if param else name
        return ApiError(f"{param} is not supported{hint}", param=param)
    if not param and first["type"] != "value_error":
        return ApiError('the body must be a JSON object, sent as "application/json"')
    # A field that may be of several types has a problem with each of them.
    messages = dict.fromkeys(each["msg"] for each in problems if _place(each) == param)
    text = ", or: ".join(messages).replace("Value error, ", "")
    return ApiError(f"{param}: {text}" if param else text, param=param or None)


def _place(problem: Any) -> str:
    """Where it is in the body, without the names of the types that were tried."""
    parts = itertools.takewhile(
        lambda part: isinstance(part, int) or (_FIELD.fullmatch(part) and part not in TYPE_NAMES),
        problem["loc"][1:],
    )
    return ".".join(map(str, parts))
