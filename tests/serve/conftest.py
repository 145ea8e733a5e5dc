"""One server for all tests of a process: a tiny random model on the real engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nanovllm import AsyncLLM
from tests.serve.byte_model import make_byte_model
from tests.serve.running import Running, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_byte_model(tmp_path_factory.mktemp("byte-model"))
    llm = AsyncLLM(
        folder,
        device="cpu",
        dtype="float32",
        max_model_len=1024,
        kvcache_block_size=16,
        num_kvcache_blocks=256,
        max_num_seqs=16,
    )
    try:
        with running(llm) as server:
            yield server
    finally:
        llm.close()
