"""Run a server: from the sockets to the last answer."""

from __future__ import annotations

import socket
from types import FrameType

import uvicorn

from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import ConfigError
from nanovllm.server.app import make_app
from nanovllm.server.options import ServerOptions
from nanovllm.server.service import Service

LISTEN_BACKLOG = 2048


class Server(uvicorn.Server):
    """The first signal lets answers end, within bounds; the second one ends them."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM) -> None:
        super().__init__(config)
        self._llm = llm

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for replica in self._llm.replicas:
            replica.viewers.close()  # who watches has nothing to wait for
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def make_server(
    llm: AsyncLLM,
    options: ServerOptions,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
) -> Server:
    config = uvicorn.Config(
        make_app(Service(llm, options)),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(options.shutdown_timeout)),
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
    )
    return Server(config, llm)


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
