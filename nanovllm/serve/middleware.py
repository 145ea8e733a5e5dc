"""ASGI middleware for all routes: root path, authentication, body limits, request ids, logging."""

from __future__ import annotations

import hmac
import logging
import re
import time
from urllib.parse import quote, urlsplit
from uuid import uuid4

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.errors import RequestError
from nanovllm.serve.http_errors import error_response
from nanovllm.serve.server_options import ServerOptions

# Limit on the JSON values of a body, estimated by its commas: parsing a million takes a second.
MAX_VALUES = 500_000
OPEN_PATHS = ("/health", "/ping")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # the other methods change the server's state
PAGE_PREFIX = "/page/"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_LOCAL_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d*)?", re.IGNORECASE)

logger = logging.getLogger(__name__)


class Middleware:
    """Wraps an ASGI application; rejected requests get their error response here."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options
        self._keys = [key.encode() for key in options.api_key]
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = self._options.root_path or scope.get("root_path", "")
        path = _below(root, scope["path"])
        scope = {**scope, "root_path": root, "path": root + path}
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else uuid4().hex
        start, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                for name in ("X-Request-Id", "Request-Id"):  # OpenAI's and Anthropic's names
                    response_headers[name] = request_id
            await send(message)

        rejection = self._rejection(path, scope["method"], headers)
        self._num_open += 1
        try:
            if rejection is None:
                await self._app(scope, self._bounded(receive), send_with_id)
            else:
                await error_response(path, rejection)(scope, receive, send_with_id)
        finally:
            self._num_open -= 1
            seconds = time.perf_counter() - start
            request = _client(scope), request_id, scope["method"], quote(path)
            outcome = status or "client disconnected"
            if not is_page(path):
                logger.info("%s %s %s %s: %s after %.3f s", *request, outcome, seconds)

    def _rejection(self, path: str, method: str, headers: Headers) -> RequestError | None:
        """Return an error if the request is rejected before its body is read, else None."""
        if path in OPEN_PATHS:
            return None
        limit = self._options.limit_concurrency
        if limit is not None and self._num_open >= limit:
            text = f"{limit} requests are already in progress; try again later"
            return RequestError(text, status=503)
        host = headers.get("host")
        if self._options.is_local and host is not None and not _LOCAL_HOST.fullmatch(host):
            # A malicious site's host name may resolve to this machine (DNS rebinding).
            text = "the Host header must be localhost or a loopback address unless --api-key is set"
            return RequestError(text, status=403)
        if not is_page(path) and not self._has_key(headers):
            return RequestError("a valid API key is required", status=401, code="invalid_api_key")
        # A page cannot know the API key, so a request with a valid one is not forged.
        if method not in SAFE_METHODS and not self._keys and self._is_cross_origin(headers):
            origin = headers.get("origin", "unknown")
            text = f"cross-origin request from {origin:.80}; --allowed-origins can allow the origin"
            return RequestError(text, status=403)
        return None

    def _is_cross_origin(self, headers: Headers) -> bool:
        """Return whether a browser sends the request for a page of an origin that is not allowed.

        Other clients send neither header.
        """
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if not {"*", origin}.isdisjoint(self._options.allowed_origins):
            return False
        if site is not None:  # known to the browser even if a proxy replaced the Host header
            return site not in ("same-origin", "none")
        if origin is None:
            return False
        host = _host(origin)  # empty for "null"
        return not host or host != headers.get("host", "").lower()

    def _has_key(self, headers: Headers) -> bool:
        """Return whether the request has a valid key or needs none; compare in constant time."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        tokens = [text.encode("latin-1") for text in (bearer, headers.get("x-api-key", ""))]
        matches = [hmac.compare_digest(each, key) for each in tokens for key in self._keys]
        return not self._keys or any(matches)

    def _bounded(self, receive: Receive) -> Receive:
        num_bytes = num_commas = 0
        max_bytes = self._options.max_body_bytes

        async def bounded() -> Message:
            nonlocal num_bytes, num_commas
            message = await receive()
            body = message.get("body", b"")
            num_bytes += len(body)
            num_commas += body.count(b",")
            if num_bytes > max_bytes:
                raise HTTPException(413, f"the body is larger than {max_bytes} bytes")
            if num_commas > MAX_VALUES:
                raise HTTPException(413, f"the body has more than {MAX_VALUES:,} values (commas)")
            return message

        return bounded


def is_page(path: str) -> bool:
    """Return whether a path belongs to the web page, which loads without an API key."""
    return path == "/" or path.startswith(PAGE_PREFIX)


def _below(root: str, path: str) -> str:
    """Strip the root path; some proxies forward it and some strip it themselves."""
    return path.removeprefix(root) if f"{path}/".startswith(f"{root}/") else path


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # such as an invalid IPv6 address
        return ""


def _client(scope: Scope) -> str:
    host, port = scope.get("client") or ("-", 0)
    return f"{quote(host, safe=':')}:{port}"
