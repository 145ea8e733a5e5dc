"""Coding agents: two user turns, each with a tool call that the agent executes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.outputs import StreamPiece
from tests.clients.environments import environment
from tests.clients.scripted_model import call_of, make_scripted_model
from tests.serve.running import running

pytestmark = pytest.mark.slow

BLOCK = 64
ANSWER = "The command ran, all is well."
COMMAND = "echo executed >> executed.txt"
PATH_NAMES = ("PATH", "LANG", "TERM", "TMPDIR")


@dataclass(frozen=True)
class Agent:
    program: str
    call: str
    first: tuple[str, ...]  # arguments before the first prompt
    next: tuple[str, ...]
    variables: Callable[[str], dict[str, str]]  # given the server's URL
    files: Callable[[str], dict[str, str]]  # in the home folder or the project


CODEX_CONFIG = """\
model = "scripted"
model_provider = "nanovllm"

[model_providers.nanovllm]
name = "nanovllm"
base_url = "{}/v1"
env_key = "NANOVLLM_API_KEY"
wire_api = "responses"
"""
CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
CLAUDE = ("--dangerously-skip-permissions", "-p")


def opencode_config(url: str) -> str:
    model = {"name": "scripted", "limit": {"context": 131072, "output": 8192}}
    options = {"baseURL": f"{url}/v1", "apiKey": "x"}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": options,
        "models": {"scripted": model},
    }
    return json.dumps({"model": "nanovllm/scripted", "provider": {"nanovllm": provider}})


AGENTS = {
    "codex": Agent(
        "codex",
        "Let me look.\n" + call_of("exec_command", {"cmd": COMMAND}),
        CODEX,
        (*CODEX, "resume", "--last"),
        lambda url: {"NANOVLLM_API_KEY": "x"},
        lambda url: {".codex/config.toml": CODEX_CONFIG.format(url)},
    ),
    "claude": Agent(
        "claude",
        call_of("Bash", {"command": COMMAND, "description": "Append a line"}),
        CLAUDE,
        (*CLAUDE, "--continue"),
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "x",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # allows the first option for root
        },
        lambda url: {},
    ),
    "opencode": Agent(
        "opencode",
        call_of("bash", {"command": COMMAND, "description": "Append a line"}),
        ("run",),
        ("run", "--continue"),
        lambda url: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        lambda url: {"project/opencode.json": opencode_config(url)},
    ),
}


class RecordingLLM:
    """Records the tokens of each request and of its reply, and how many were cached."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.requests: list[tuple[list[int], list[int], int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(
        self, prompt: list[int], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[StreamPiece, None]:
        async with contextlib.aclosing(self._llm.generate(prompt, params, **options)) as pieces:
            async for piece in pieces:
                if piece.output is not None:
                    cached = piece.output.num_cached_tokens
                    self.requests.append((prompt, piece.output.token_ids, cached))
                yield piece


def run(agent: Agent, url: str, home: Path, arguments: tuple[str, ...], prompt: str) -> str:
    node = environment("node")
    programs = node.parent / "node_modules" / ".bin"
    variables = {name: os.environ[name] for name in PATH_NAMES if name in os.environ}
    variables |= {"HOME": str(home), "NO_PROXY": "127.0.0.1", **agent.variables(url)}
    variables["PATH"] = f"{node}{os.pathsep}{variables.get('PATH', '')}"
    done = subprocess.run(
        [str(programs / agent.program), *arguments, prompt],
        cwd=home / "project",
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", AGENTS)
def test_agents_execute_calls_and_keep_the_prefix(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent, project = AGENTS[name], tmp_path / "project"
    environment("node")  # skips the test if npm cannot be reached
    project.mkdir()
    model = make_scripted_model(tmp_path / "model", agent.call, ANSWER)
    caplog.set_level(logging.INFO, "nanovllm.serve.middleware")
    llm = AsyncLLM(
        model, device="cpu", dtype="float32", max_model_len=65536, kvcache_block_size=BLOCK,
        num_kvcache_blocks=2048, max_num_seqs=4,
    )  # fmt: skip
    try:
        with running(RecordingLLM(llm), served_model_name=("scripted",)) as server:
            for path, text in agent.files(server.url).items():
                (tmp_path / path).parent.mkdir(exist_ok=True)
                (tmp_path / path).write_text(text)
            for arguments, prompt in ((agent.first, "Say hello"), (agent.next, "Once more")):
                assert ANSWER in run(agent, server.url, tmp_path, arguments, prompt)
            requests = server.llm.requests
    finally:
        llm.close()
    assert (project / "executed.txt").read_text() == "executed\n" * 2
    statuses = re.findall(r" POST \S+: (\d+)", caplog.text)
    assert set(statuses) == {"200"}
    assert count_continued(requests) >= 3


def count_continued(requests: list[tuple[list[int], list[int], int]]) -> int:
    """Return how many requests continue an earlier one; only their new text may be computed."""
    num_continued = 0
    for i, (prompt, _, num_cached) in enumerate(requests):
        befores = [[*before, *reply[:-1]] for before, reply, _ in requests[:i]]
        known = max((len(each) for each in befores if prompt[: len(each)] == each), default=0)
        num_continued += known > 0
        assert num_cached >= known // BLOCK * BLOCK
    return num_continued
