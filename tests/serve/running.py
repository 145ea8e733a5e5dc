"""A server in a thread, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from nanovllm.serve.http_server import Server, listen, make_server
from nanovllm.serve.server_options import ServerOptions

OPTIONS: dict[str, Any] = {"served_model_name": ("tiny", "org/tiny")}


@dataclass(frozen=True)
class Running:
    llm: Any  # an AsyncLLM, or a fake one
    url: str
    http: httpx.Client
    openai: OpenAI
    server: Server

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks in the server's event loop."""
        return len(asyncio.all_tasks(self.server.servers[0].get_loop()))

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@contextlib.contextmanager
def running(llm: Any, **options: Any) -> Iterator[Running]:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = make_server(llm, ServerOptions(**{**OPTIONS, "shutdown_timeout": 1.0, **options}))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with (
            httpx.Client(base_url=url, timeout=60) as http,
            OpenAI(base_url=f"{url}/v1", api_key="a key", max_retries=0) as openai,
        ):
            yield Running(llm, url, http, openai, server)
    finally:
        server.should_exit = True
        thread.join(240)
        listener.close()
    assert not thread.is_alive()
