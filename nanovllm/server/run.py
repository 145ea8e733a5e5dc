"""Run a server: from the sockets to the last answer."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import time
from types import FrameType

import uvicorn

from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import ConfigError, EngineError
from nanovllm.server.app import make_app
from nanovllm.server.options import ServerOptions
from nanovllm.server.service import Service

LISTEN_BACKLOG = 2048
LAST_SECONDS = 5  # to tell those who wait that their answers end here
CANCEL_SECONDS = 2  # after that, for what no longer has a connection


class Server(uvicorn.Server):
    """The first signal lets answers end, within bounds; the second one ends them with an error."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._llm, self._shutdown_timeout = llm, shutdown_timeout
        self._is_urgent = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for replica in self._llm.replicas:
            replica.viewers.close()  # who watches has nothing to wait for
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self._is_urgent
        self._is_urgent = self.should_exit
        self.should_exit = True

    async def _end_answers(self) -> None:
        """Once there is no more time, tell whoever still waits for an answer."""
        end = time.monotonic() + self._shutdown_timeout
        while time.monotonic() < end and not self._is_urgent:
            await asyncio.sleep(0.1)
        await asyncio.to_thread(self._llm.close, EngineError("the server is shutting down"))
        await asyncio.sleep(LAST_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # of who neither reads an answer nor ends a request


def make_server(
    llm: AsyncLLM,
    options: ServerOptions,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
) -> Server:
    config = uvicorn.Config(
        make_app(Service(llm, options)),
        # httptools, where it is installed, loses the body of a request that offers HTTP/2, as
        # Java's clients do, and sends chunks to clients of HTTP/1.0.
        http="h11",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout)
        + LAST_SECONDS
        + CANCEL_SECONDS,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
    )
    return Server(config, llm, options.shutdown_timeout)


def check_certificate(keyfile: str | None, certfile: str | None) -> None:
    """Refuse files that TLS cannot be served with, before a model is loaded for nothing."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except OSError as error:
        files = certfile if keyfile is None else f"{certfile} with {keyfile}"
        raise ConfigError(f"cannot serve HTTPS with the certificate {files}: {error}") from error


def listen(host: str, port: int) -> socket.socket:
    """Take the port before a model is loaded for nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error
    return listener
