"""Measure the resident memory of an idle server with the default model, after some requests.

    python -m benchmarks.engine.resident_memory [--model smollm2] [--requests 8] [--limit 700]

Starts `nanovllm serve` and sends it chat requests of growing length. Two processes count: the API
server, which handles HTTP, and the core, which runs the model. Prints the resident memory of each
("own" is not backed by files) and of both together, counting file pages that both have mapped once.
The keys and values of requests stay in the cache, so the number of tokens is printed too. Fails
if the total exceeds --limit megabytes. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

MB = 1e6
START_SECONDS, REST_SECONDS = 300, 3.0
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)")


@dataclass(frozen=True, slots=True)
class Resident:
    own_bytes: int  # anonymous memory
    file_bytes: Counter[str]  # keyed by file name

    @property
    def num_bytes(self) -> int:
        return self.own_bytes + self.file_bytes.total()


def main() -> int:
    args = parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanovllm", "serve", args.model, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_up(server, f"http://127.0.0.1:{port}/health")
        total = report("started", server.pid)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        num_tokens = sum(chat(url, f"{i}" + " and more" * 8 * i) for i in range(args.requests))
        time.sleep(REST_SECONDS)
        total = report(f"after {args.requests} requests, {num_tokens} tokens", server.pid)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    return 0 if total < args.limit * MB else 1


def wait_until_up(server: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(START_SECONDS):
        try:
            urllib.request.urlopen(url).close()
            return
        except urllib.error.URLError:
            if server.poll() is not None:
                raise SystemExit(f"the server ended: exit code {server.returncode}") from None
            time.sleep(1)
    raise SystemExit(f"the server did not start within {START_SECONDS} s")


def chat(url: str, content: str) -> int:
    """Return the number of prompt and output tokens."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 64}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return int(json.load(response)["usage"]["total_tokens"])


def report(when: str, pid: int) -> float:
    """Print the resident memory of the processes; return the sum in bytes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    server, *cores = [read_resident(process) for process in (pid, *map(int, children))]
    files: Counter[str] = Counter()
    for process in (server, *cores):
        files |= process.file_bytes  # the maximum per file
    total = sum(process.own_bytes for process in (server, *cores)) + files.total()
    print(f"{when}: API server {describe(server)}", end="")
    print("".join(f", core {describe(core)}" for core in cores), end="")
    print(f", together {total / MB:.0f} MB", flush=True)
    return total


def describe(process: Resident) -> str:
    return f"{process.num_bytes / MB:.0f} MB ({process.own_bytes / MB:.0f} its own)"


def read_resident(pid: int) -> Resident:
    own, files, name, resident = 0, Counter[str](), "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if mapping := MAPPING.fullmatch(line):
            name = mapping[1]
        elif line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
        elif line.startswith("Anonymous:"):
            own_here = int(line.split()[1]) * 1024
            own += own_here
            files[name] += resident - own_here
    return Resident(own, files)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--limit", type=float, default=700, help="in megabytes (default: 700)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
