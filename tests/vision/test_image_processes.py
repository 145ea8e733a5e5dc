"""Images reach engine cores and workers in other processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.outputs import RequestOutput
from tests.vision.test_images_equal_transformers import OPTIONS, make_prompts, text
from tests.vision.tiny_vision import Prompt, as_input, noise, tiny_vision

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CPU: dict[str, Any] = {**OPTIONS, "device": "cpu"}


async def answer(llm: AsyncLLM, prompt: Prompt) -> RequestOutput:
    pieces = [piece async for piece in llm.generate(as_input(prompt), GREEDY)]
    output = pieces[-1].output
    assert output is not None
    return output


async def answer_all(llm: AsyncLLM, prompts: list[Prompt]) -> list[RequestOutput]:
    return await asyncio.gather(*(answer(llm, prompt) for prompt in prompts))


def test_two_engine_cores(checkpoint_root: Path) -> None:
    """Requests with and without images arrive at once, and later requests hit the prefixes."""
    checkpoint, prompts = tiny_vision(checkpoint_root, "dense"), make_prompts()
    want = [checkpoint.generate(prompt, 8) for prompt in prompts]
    llm = AsyncLLM(checkpoint.path, data_parallel_size=2, **CPU)
    try:
        for _ in range(2):
            outputs = asyncio.run(answer_all(llm, prompts))
            assert [output.token_ids for output in outputs] == want
        # 14 tokens of text, 18 of the image, and texts of which the first are prefixes of others.
        image, other = noise(9, 32, 32), noise(10, 32, 32)
        lead, after = text(7, 14), text(8, 50)
        cached = [
            asyncio.run(answer(llm, [*lead, each.copy(), *after[:length]])).num_cached_tokens
            for each, length in ((image, 30), (image, 30), (image, 50), (other, 50), (image, 50))
        ]
        assert cached == [0, 48, 48, 0, 80]
    finally:
        llm.close()


def test_aborted_requests(checkpoint_root: Path) -> None:
    """An abort follows its request, which another thread sends."""
    checkpoint = tiny_vision(checkpoint_root, "dense")
    prompt: Prompt = [*text(1, 5), noise(1, 32, 32)]

    async def abort_at_once(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(answer(llm, prompt)) for _ in range(8)]
        while llm.num_requests == 0:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert llm.num_requests == 0
        output = await answer(llm, prompt)
        assert output.token_ids == checkpoint.generate(prompt, 8)
        while llm.stats.num_running + llm.stats.num_waiting:
            await asyncio.sleep(0.01)

    llm = AsyncLLM(checkpoint.path, **CPU)
    try:
        asyncio.run(asyncio.wait_for(abort_at_once(llm), 60))
    finally:
        llm.close()


def test_worker_processes(checkpoint_root: Path) -> None:
    checkpoint, prompts = tiny_vision(checkpoint_root, "moe"), make_prompts()
    with LLM(checkpoint.path, tensor_parallel_size=2, **CPU) as llm:
        outputs = llm.generate(list(map(as_input, prompts)), GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [
        checkpoint.generate(prompt, 8) for prompt in prompts
    ]
