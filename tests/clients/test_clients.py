"""Third-party clients, each in its own environment, with our server."""

from __future__ import annotations

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


# Runs the checks and then the example of the docs in one process: importing a client takes seconds.
RUN = """\
import os, sys, pytest
code = pytest.main(sys.argv[1:])
print("the program prints:", flush=True)
exec(os.environ["NANOVLLM_EXAMPLE"], {"__name__": "__main__"})
sys.exit(code)
"""


@pytest.mark.parametrize("name", ["openai", "anthropic", "langchain", "litellm"])
def test_python_clients(name: str, servers: Servers) -> None:
    python, checks = environment(name) / "python", CHECKS / f"{name}_checks.py"
    program = examples()[name].replace("http://127.0.0.1:8000", servers.url)
    program = program.replace('"secret"', repr(KEY)).replace("smollm2", "tiny")
    command = [str(python), "-P", "-c", RUN, *PYTEST, "--import-mode=importlib", str(checks)]
    shown = run(command, servers, {"NANOVLLM_EXAMPLE": program})
    assert shown.partition("the program prints:")[2].strip()


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
