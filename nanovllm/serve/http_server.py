"""The HTTP server: sockets, TLS, logging of throughput, and graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import socket
import ssl
import time
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.errors import ConfigError, EngineError
from nanovllm.serve.app import make_app
from nanovllm.serve.core_messages import CoreStats
from nanovllm.serve.model_interface import Model, OwnedModel
from nanovllm.serve.server_options import ServerOptions
from nanovllm.serve.service import Service

LISTEN_BACKLOG = 2048
LAST_SECONDS = 5  # time to send errors for the requests that the shutdown ends
CANCEL_SECONDS = 2  # time for handlers to be canceled once their connections are closed
RECEIVE_SECONDS = 60  # time limit for receiving the headers and the body of a request
LOG_SECONDS = 10.0  # time between log lines with the throughput
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger(__name__)


class Connection(H11Protocol):
    """An HTTP connection that is closed if a request does not arrive within RECEIVE_SECONDS."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _watch(self) -> None:
        """Run the timer only while a request is incomplete; uvicorn closes idle connections."""
        is_incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_incomplete and self._deadline is None:
            self._deadline = self.loop.call_later(RECEIVE_SECONDS, self.transport.abort)
        elif not is_incomplete and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class ThroughputLog:
    """Logs throughput every LOG_SECONDS while an engine is busy, in vLLM's format."""

    def __init__(self, llm: Model, now: float) -> None:
        self._llm = llm
        self._last: dict[int, CoreStats] = {}  # keyed by replica number
        self._last_time = now

    def tick(self, now: float) -> None:
        """Log a line for each busy engine if LOG_SECONDS have passed since the previous lines."""
        seconds = now - self._last_time
        if seconds < LOG_SECONDS:
            return
        self._last_time += seconds
        for replica in self._llm.replicas:
            stats, before = replica.stats, self._last.get(replica.number, CoreStats())
            self._last[replica.number] = stats
            if stats.num_prefill_tokens < before.num_prefill_tokens:  # the core was restarted
                before = CoreStats()
            num_prompt = stats.num_prefill_tokens - before.num_prefill_tokens
            num_generated = stats.num_decode_tokens - before.num_decode_tokens
            if num_prompt or num_generated or stats.num_running or stats.num_waiting:
                logger.info(
                    "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: "
                    "%.1f tokens/s, Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, "
                    "Prefix cache hit rate: %.1f%%",
                    replica.number,
                    num_prompt / seconds,
                    num_generated / seconds,
                    stats.num_running,
                    stats.num_waiting,
                    100 * (stats.num_blocks - stats.num_free_blocks) / max(stats.num_blocks, 1),
                    100 * stats.num_cache_hits / max(stats.num_cache_queries, 1),
                )


class Server(uvicorn.Server):
    """A uvicorn server with graceful shutdown.

    After the first signal, requests have `shutdown_timeout` seconds to finish. After that, or at a
    second signal, they end with an error.
    """

    def __init__(self, config: uvicorn.Config, llm: OwnedModel, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._llm, self._shutdown_timeout = llm, shutdown_timeout
        self._is_urgent = False
        self._last_accept_error = -math.inf
        self._throughput = ThroughputLog(llm, time.monotonic())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._log_error)
        await super().startup(sockets)

    def _log_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log failed accepts at most once per second: they repeat until resources are free."""
        error, now = context.get("exception"), time.monotonic()
        if not isinstance(error, OSError) or error.errno not in OUT_OF_RESOURCES:
            loop.default_exception_handler(context)
        elif now - self._last_accept_error >= 1:
            self._last_accept_error = now
            logger.error("cannot accept connections: %s", error)

    async def on_tick(self, counter: int) -> bool:
        self._throughput.tick(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for replica in self._llm.replicas:
            replica.end_snapshots()  # event streams would otherwise never finish
            replica.control("resume")  # a paused engine would never finish its requests
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self._is_urgent
        self._is_urgent = self.should_exit
        self.should_exit = True

    async def _end_requests(self) -> None:
        """Wait for the shutdown timeout, then fail the unfinished requests."""
        end = time.monotonic() + self._shutdown_timeout
        while time.monotonic() < end and not self._is_urgent:
            await asyncio.sleep(0.1)
        await asyncio.to_thread(self._llm.close, EngineError("the server is shutting down"))
        await asyncio.sleep(LAST_SECONDS)
        for connection in list(self.server_state.connections):
            # These clients neither read their response nor complete their request.
            connection.transport.abort()


def make_server(llm: OwnedModel, options: ServerOptions) -> Server:
    config = uvicorn.Config(
        make_app(Service(llm, options)),
        # httptools would lose the body of a request that offers an upgrade to HTTP/2 (Java's client
        # sends such requests), and would send chunked responses to HTTP/1.0 clients.
        http=Connection,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout)
        + LAST_SECONDS
        + CANCEL_SECONDS,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
    )
    return Server(config, llm, options.shutdown_timeout)


def check_certificate(keyfile: str | None, certfile: str | None) -> None:
    """Raise ConfigError if the TLS files are unusable; call this before the model is loaded."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except OSError as error:
        files = certfile if keyfile is None else f"{certfile} with {keyfile}"
        raise ConfigError(f"cannot serve HTTPS with the certificate {files}: {error}") from error


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; call this before the model is loaded, to report errors early."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port),
            family=family,
            backlog=LISTEN_BACKLOG,
            dualstack_ipv6=family == socket.AF_INET6,
        )
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
