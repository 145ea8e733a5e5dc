"""Errors as HTTP responses: a status code, and a body in the format of the requested API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from nanovllm.errors import NanovllmError, RequestError

MESSAGES_PATH = "/v1/messages"  # Anthropic's API
OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES = OPENAI_TYPES | {
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
RETRY = {"Retry-After": "1"}
_FIELD = re.compile("[a-z_]+")
TYPE_NAMES = ("bool", "dict", "float", "int", "list", "none", "str")


def openai_body(error: NanovllmError) -> dict[str, Any]:
    kind = OPENAI_TYPES.get(error.status, "invalid_request_error")
    body = {"message": message_of(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": body}


def anthropic_body(error: NanovllmError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": message_of(error)}
    if error.code is not None:
        body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body}


def message_of(error: NanovllmError) -> str:
    """Return an error's message, without the traceback that follows it in engine errors."""
    return str(error).partition("\n")[0] if error.status >= 500 else str(error)


def timeout_error() -> RequestError:
    return RequestError("the request exceeded this server's --request-timeout", status=504)


def to_json(body: Any) -> bytes:
    """Encode a body as JSON in UTF-8; see `json_pieces`."""
    return b"".join(json_pieces(body))


def json_pieces(body: Any) -> Iterator[bytes]:
    """Yield the JSON of a body in UTF-8, in pieces.

    The body may contain functions in place of large values; each is called only when its piece is
    next, so that a thread that encodes a large body releases the GIL between the pieces. Unpaired
    surrogates, which a request may contain, become question marks.
    """
    functions: list[Callable[[], Any]] = []
    placeholder = ""

    def postpone(function: Callable[[], Any]) -> str:
        nonlocal placeholder
        placeholder = placeholder or uuid4().hex  # no text in the body can contain it
        functions.append(function)
        return placeholder

    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=postpone)
    parts = text.split(f'"{placeholder}"') if functions else [text]
    yield parts[0].encode("utf-8", "replace")
    for function, part in zip(functions, parts[1:], strict=True):
        yield from json_pieces(function())
        yield part.encode("utf-8", "replace")


def json_response(body: Any) -> Response:
    return Response(to_json(body), media_type="application/json")


def error_response(
    path: str, error: NanovllmError, headers: Mapping[str, str] | None = None
) -> Response:
    body = anthropic_body(error) if path.startswith(MESSAGES_PATH) else openai_body(error)
    headers = dict(headers or (RETRY if error.status in (429, 503) else {}))
    return Response(to_json(body), error.status, headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    async def handle(request: Request, error: Any) -> Response:
        headers = None
        if isinstance(error, RequestValidationError):
            error = invalid(error.errors())
        elif isinstance(error, HTTPException):
            headers = error.headers
            error = RequestError(str(error.detail), status=error.status_code)
        elif isinstance(error, TimeoutError):
            error = timeout_error()
        elif not isinstance(error, NanovllmError):  # a bug; uvicorn logs the traceback
            error = NanovllmError("internal server error")
        path: str = request.scope["path"]
        return error_response(path.removeprefix(request.scope["root_path"]), error, headers)

    for kind in (RequestValidationError, HTTPException, NanovllmError, TimeoutError, Exception):
        app.add_exception_handler(kind, handle)


def invalid(problems: Sequence[Any]) -> RequestError:
    """Convert pydantic's errors to a RequestError that names the first invalid field."""
    first = problems[0]
    param, cause = _place(first), first.get("ctx", {}).get("error")
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {cause}")
    if isinstance(cause, RequestError):  # raised by a validator; its message begins with the field
        place = f"{param}." if param else ""
        return RequestError(f"{place}{cause}", param=f"{place}{cause.param}", code=cause.code)
    if not param:
        return RequestError('the body must be a JSON object, sent as "application/json"')
    # A field that accepts several types has one error per type.
    messages = dict.fromkeys(each["msg"] for each in problems if _place(each) == param)
    return RequestError(f"{param}: {', or: '.join(messages)}", param=param)


def _place(problem: Any) -> str:
    """Return the field's path in the request, without the type names that pydantic adds to it."""
    place, parts = "", problem["loc"]
    if parts[:1] == ("body",) or (len(parts) > 1 and parts[0] in ("query", "path")):
        parts = parts[1:]
    for part in parts:
        if isinstance(part, int):
            place += f"[{part}]"
        elif not _FIELD.fullmatch(part) or part in TYPE_NAMES:
            break
        else:
            place += f".{part}" if place else part
    return place
