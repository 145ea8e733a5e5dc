"""What HTTP costs, and being watched: tokens a second of streams, and of `AsyncLLM` alone.

    python -m benchmarks.engine.http_streams [--model smollm2] [--streams 64] [--rounds 3]

All use one engine and take turns; the HTTP clients are processes of their own, and so is who reads
the engine's events. The bars are 95% on a CPU, and 98% while watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from benchmarks.engine.async_streams import stream_all, stream_parser
from nanovllm import AsyncLLM, SamplingParams
from nanovllm.bench.models import model_path
from nanovllm.server.options import ServerOptions
from nanovllm.server.run import listen, make_server


def main() -> None:
    args = stream_parser(__doc__).parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(10_000) for _ in range(64)] for _ in range(args.streams)]
    params = SamplingParams(temperature=0.6, max_tokens=args.max_tokens, ignore_eos=True)
    llm = AsyncLLM(model_path(args.model), max_model_len=1024, max_num_seqs=args.streams)
    server = make_server(llm, ServerOptions(("model",)))
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    client = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.engine.http_streams", "--client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    shares, watched_shares = [], []
    for _ in range(args.rounds + 1):
        start = time.perf_counter()
        asyncio.run(stream_all(llm, prompts, params))
        alone = time.perf_counter() - start
        port = listener.getsockname()[1]
        task = json.dumps([port, prompts, args.max_tokens])
        print(task, file=client.stdin, flush=True)
        unwatched = float(client.stdout.readline())
        with watcher(port):
            print(task, file=client.stdin, flush=True)
            watched = float(client.stdout.readline())
        shares.append(alone / unwatched)
        watched_shares.append(unwatched / watched)
        num_tokens = args.streams * args.max_tokens
        print(
            f"AsyncLLM {num_tokens / alone:,.0f} tok/s, HTTP {shares[-1]:.3f} of that, watched "
            f"{watched_shares[-1]:.3f} of the latter"
        )
    print(f"HTTP / AsyncLLM: {statistics.median(shares[1:]):.3f}, without the first round")
    print(f"watched / not: {statistics.median(watched_shares[1:]):.3f}, likewise")
    client.stdin.close()
    server.should_exit = True
    thread.join()
    llm.close()


@contextlib.contextmanager
def watcher(port: int) -> Iterator[None]:
    """Another process that reads the engine's events."""
    script = f"import urllib.request as u; list(u.urlopen('http://127.0.0.1:{port}/engine/events'))"
    process = subprocess.Popen([sys.executable, "-c", script])
    time.sleep(1.0)  # until it is there
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_client() -> None:
    """Read a port, prompts and a length from each line; answer with the seconds they took."""
    for line in sys.stdin:
        port, prompts, max_tokens = json.loads(line)
        start = time.perf_counter()
        asyncio.run(_post_all(port, prompts, max_tokens))
        print(time.perf_counter() - start, flush=True)


async def _post_all(port: int, prompts: list[list[int]], max_tokens: int) -> None:
    await asyncio.gather(*(_post(port, prompt, max_tokens) for prompt in prompts))


async def _post(port: int, prompt: list[int], max_tokens: int) -> None:
    """Read one stream to its end, with as little work as can be."""
    fields = {"temperature": 0.6, "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    end = b""
    while piece := await reader.read(2**16):
        end = (end + piece)[-100:]
    assert b"[DONE]" in end, end
    writer.close()


if __name__ == "__main__":
    run_client() if sys.argv[1:] == ["--client"] else main()
