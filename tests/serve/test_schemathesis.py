"""Valid and invalid requests that schemathesis generates from our OpenAPI schema: no 5xx."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.running import Running
from tests.serve.test_generated_requests import settle

pytestmark = [
    pytest.mark.endurance,
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("schemathesis"), reason="needs Python 3.11"),
]
OPTIONS = (
    *("--checks", "not_a_server_error", "--continue-on-failure", "--seed", "1", "--no-color"),
    *("--request-timeout", "120", "--suppress-health-check", "all", "--mode", "all"),
    # The first one never ends, and the second one may take a minute.
    *("--exclude-path", "/engine/events", "--exclude-path", "/trace"),
)


def test_no_generated_request_is_a_server_error(
    server: Running, count: Callable[[int], int], tmp_path: Path
) -> None:
    num_free = server.llm.stats.num_free_blocks
    num_paths = len(server.http.get("/openapi.json").json()["paths"])
    # The coverage phase of the fields that all routes share takes 2,000 requests.
    phases = ("coverage,fuzzing", 8000) if count(10) == 10 else ("fuzzing", 200)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += [*OPTIONS, "--phases", phases[0], "-n", str(phases[1] // num_paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    number = re.search(r"([\d,]+) generated, ([\d,]+) passed", done.stdout)
    assert number is not None, done.stdout[-5000:]
    assert int(number.group(2).replace(",", "")) > phases[1] / 2
    settle(server, num_free)
