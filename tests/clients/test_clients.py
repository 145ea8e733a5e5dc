"""Third-party clients, in environments of their own, with our server."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping

import pytest

from tests.clients.conftest import KEY, Servers
from tests.clients.environments import HERE, environment

pytestmark = pytest.mark.slow
CHECKS = HERE / "checks"
# The checks do not use this suite's settings and fixtures.
PYTEST = ("-q", "-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider")


# Runs the checks and then the examples of the docs in one process: importing clients takes seconds.
RUN = """\
import json, os, sys, pytest
code = pytest.main(sys.argv[1:])
for program in json.loads(os.environ["NANOVLLM_EXAMPLES"]):
    print("a program prints:", flush=True)
    exec(program, {"__name__": "__main__"})
sys.exit(code)
"""
# LiteLLM needs an older version of OpenAI's client.
CLIENTS = {"python": ("openai", "anthropic", "langchain"), "litellm": ("litellm",)}


@pytest.mark.parametrize("name", CLIENTS)
def test_python_clients(name: str, servers: Servers) -> None:
    checks = [str(CHECKS / f"{client}_checks.py") for client in CLIENTS[name]]
    programs = [
        examples()[client]
        .replace("http://127.0.0.1:8000", servers.url)
        .replace('"secret"', repr(KEY))
        .replace("smollm2", "tiny")
        for client in CLIENTS[name]
    ]
    python = str(environment(name) / "python")
    command = [python, "-P", "-c", RUN, *PYTEST, "--import-mode=importlib", *checks]
    shown = run(command, servers, {"NANOVLLM_EXAMPLES": json.dumps(programs)})
    printed = shown.split("a program prints:")[1:]
    assert len(printed) == len(programs)
    assert all(text.strip() for text in printed)


def test_node(servers: Servers) -> None:
    programs = environment("node")
    variables = {"NODE_PACKAGES": f"{programs.parent}/"}
    checks = CHECKS / "node_checks.test.mjs"
    run([str(programs / "node"), "--test", "--test-reporter=spec", str(checks)], servers, variables)


def examples() -> dict[str, str]:
    """Return the example programs of the section on clients, keyed by package."""
    text = (HERE.parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    section = text.partition("## Clients")[2].partition("\n## ")[0]
    programs = re.findall(r"```python\n(.*?)```", section, re.S)
    return {re.split(r"[ _]", program.split(maxsplit=2)[1])[0]: program for program in programs}


def run(command: list[str], servers: Servers, variables: Mapping[str, str] = {}) -> str:
    done = subprocess.run(
        command,
        env={**servers.environ(), **variables},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
