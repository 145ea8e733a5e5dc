"""Clients that others wrote, each in an environment of its own, against our server."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

import pytest

from tests.clients.conftest import Servers
from tests.clients.environments import HERE, environment

pytestmark = pytest.mark.slow
CHECKS = HERE / "checks"
# The checks know nothing of this suite's settings and fixtures.
PYTEST = ("-P", "-m", "pytest", "-q", "-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider")


@pytest.mark.parametrize("name", ["openai", "anthropic", "langchain", "litellm"])
def test_python_clients(name: str, servers: Servers) -> None:
    programs = environment(name)
    checks = CHECKS / f"{name}_checks.py"
    run([str(programs / "python"), *PYTEST, "--import-mode=importlib", str(checks)], servers)


def test_node(servers: Servers) -> None:
    programs = environment("node")
    variables = {"NODE_PACKAGES": f"{programs.parent}/"}
    checks = CHECKS / "node_checks.test.mjs"
    run([str(programs / "node"), "--test", "--test-reporter=spec", str(checks)], servers, variables)


def run(command: list[str], servers: Servers, variables: Mapping[str, str] = {}) -> str:
    done = subprocess.run(
        command,
        env={**servers.environ(), **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
