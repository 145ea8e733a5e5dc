"""When the engine's process dies, every stream ends with an error event."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from nanovllm import AsyncLLM
from tests.serve.byte_model import make_byte_model
from tests.serve.running import running

NUM_STREAMS = 16


async def read(client: httpx.AsyncClient, begun: list[int]) -> list[str]:
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    lines = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            begun += [1] * (not lines)
            lines.append(line)
    return [line for line in lines if line]


@pytest.mark.slow
def test_every_stream_is_told(tmp_path: Path) -> None:
    """Hangs are reported in the same way; tests/serve/test_async_llm.py tests their detection."""
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64}
    llm = AsyncLLM(make_byte_model(tmp_path), **options)

    async def fail_under_load(url: str) -> list[list[str]]:
        begun: list[int] = []
        async with httpx.AsyncClient(base_url=url, timeout=240) as client:
            tasks = [asyncio.create_task(read(client, begun)) for _ in range(NUM_STREAMS)]
            while len(begun) < NUM_STREAMS:
                await asyncio.sleep(0.01)
            os.kill(llm.replicas[0].pid, signal.SIGKILL)
            streams = await asyncio.gather(*tasks)
            assert (await client.get("/health")).status_code == 503
        return streams

    try:
        with running(llm) as server:
            for lines in asyncio.run(fail_under_load(server.url)):
                error = json.loads(lines[-2].removeprefix("data: "))["error"]
                assert error["type"] == "service_unavailable_error"
                assert lines[-1] == "data: [DONE]"
    finally:
        llm.close()
