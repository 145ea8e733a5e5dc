"""The servers for the tests of clients."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanovllm.outputs import StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.core_messages import CoreStats
from tests.serve.byte_model import make_byte_model
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import running

KEY = "a key"
CONTEXT = 4096


class ObedientLLM(FakeLLM):
    """Generates the text after the last `Say: ` of its prompt, up to the end of the message."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[StreamPiece, None]:
        orders = re.findall(
            r"Say: (.*?)<\|im_end\|>", self.input_processor.tokenizer.decode(prompt), re.S
        )
        told = copy.copy(self)
        told.text = orders[-1] if orders else "Hello!"
        async with contextlib.aclosing(FakeLLM.generate(told, prompt, params, **options)) as pieces:
            async for piece in pieces:
                yield piece


@dataclass(frozen=True)
class Servers:
    model: Path  # the tiny random model of `nanovllm serve`
    url: str  # URL of `nanovllm serve`
    obedient: str  # URL of a server that generates the requested text
    busy: str  # URL of a server with a full queue

    def environ(self) -> dict[str, str]:
        urls = {"URL": self.url, "OBEDIENT_URL": self.obedient, "BUSY_URL": self.busy}
        ours = {f"NANOVLLM_{name}": value for name, value in urls.items()}
        names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP")
        offline = dict.fromkeys(names, "True")
        keys = {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY}
        return {**os.environ, **offline, **keys, **ours, "NANOVLLM_MODEL": str(self.model)}


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model = make_byte_model(tmp_path_factory.mktemp("clients") / "model", CONTEXT)
    busy = FakeLLM(stats=CoreStats(num_waiting=9))
    with (
        _served(model) as url,
        running(ObedientLLM(max_len=CONTEXT)) as obedient,
        running(busy, max_queued_requests=9) as full,
    ):
        yield Servers(model, url, obedient.url, full.url)


@contextlib.contextmanager
def _served(model: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "nanovllm", "serve", str(model), "--port", "0"]
    options = ["--served-model-name", "tiny", "--api-key", KEY, "--dtype", "float32"]
    options += ["--device", "cpu", "--block-size", "16", "--num-kvcache-blocks", "1024"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield _address(process)
        finally:
            process.terminate()
            process.wait(240)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r" is at (http://[\d.:]+) ", line):
            return found.group(1)
    raise AssertionError("the server did not start:\n" + "".join(lines))
