"""AsyncLLM returns what LLM does, for many concurrent callers; all get the error of a lost core."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.async_llm import merged
from nanovllm.errors import CheckpointError, EngineError, NanovllmError, RequestError
from nanovllm.outputs import RequestOutput, StreamPiece
from nanovllm.serve.output_queue import AsyncOutputQueue
from tests.checkpoints import TinyCheckpoint
from tests.serve.byte_model import make_byte_model

PROMPTS = [[1, 2, 3], [4, 5], [*range(40)], [7], [*range(30, 60)]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_model_len": 512,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 256,
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
}
SECONDS = 60.0  # deadline for reports of dead or hung cores, even on a busy machine


@pytest.fixture(scope="module")
def path(tiny: Callable[[str], TinyCheckpoint]) -> Path:
    return tiny("qwen3").path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(path, **OPTIONS)
    yield llm
    llm.close()


async def collect(llm: AsyncLLM, prompt: Any, params: Any = GREEDY, **options: Any) -> Any:
    """Return all pieces of a completion, and the output in the last one."""
    pieces = [piece async for piece in llm.generate(prompt, params, **options)]
    assert [piece.output is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return pieces, pieces[-1].output


def tokens_of(pieces: list[StreamPiece], sample: int = 0) -> list[int]:
    return [token for piece in pieces if piece.sample == sample for token in piece.token_ids]


async def until_running(llm: AsyncLLM, num_requests: int) -> None:
    while llm.stats.num_running < num_requests:
        await asyncio.sleep(0.01)


async def until_idle(llm: AsyncLLM, seconds: float = 240.0) -> None:
    """Wait until all sequences and blocks are freed."""
    deadline = time.monotonic() + seconds
    stats = llm.stats
    while time.monotonic() < deadline:
        stats = llm.stats
        is_idle = stats.num_running == stats.num_waiting == 0
        if is_idle and stats.num_free_blocks == stats.num_blocks and not llm.num_requests:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{llm.num_requests} requests, {stats}")


def test_callers_who_begin_together_reach_the_core_together(llm: AsyncLLM) -> None:
    """Token ids need no tokenizer thread, which would have to wait for the event loop."""
    core = llm.replicas[0]

    async def main() -> list[Any]:
        with (
            patch.object(core, "_send", wraps=core._send) as send,
            patch.object(asyncio, "to_thread", side_effect=AssertionError("a thread")),
        ):
            await asyncio.gather(*(collect(llm, prompt) for prompt in PROMPTS))
            return [call.args[0] for call in send.call_args_list]

    (add,) = asyncio.run(main())
    assert [each.token_ids.tolist() for each in add.requests] == PROMPTS


def test_streams_have_a_target(llm: AsyncLLM) -> None:
    assert llm.config.target_inter_token_ms == 25.0


def test_streams_equal_whole_answers(llm: AsyncLLM, path: Path) -> None:
    params = [GREEDY, SamplingParams(max_tokens=9, seed=3, n=3, logprobs=2, ignore_eos=True)]
    with LLM(path, **OPTIONS) as local:
        wanted = [local.generate(PROMPTS, each, use_tqdm=False) for each in params]

    async def main() -> None:
        for each, answers in zip(params, wanted, strict=True):
            for is_streaming in (True, False):
                calls = [collect(llm, p, each, is_streaming=is_streaming) for p in PROMPTS]
                for (pieces, got), want in zip(await asyncio.gather(*calls), answers, strict=True):
                    assert [one.token_ids for one in got.outputs] == [
                        one.token_ids for one in want.outputs
                    ]
                    if is_streaming:
                        for one in got.outputs:
                            assert tokens_of(pieces, one.index) == one.token_ids
                    else:
                        assert len(pieces) == 1
                    assert [[*d] for d in got.logprobs or []] == [[*d] for d in want.logprobs or []]
        await until_idle(llm)

    asyncio.run(main())


def test_a_bad_request_is_its_callers_error(llm: AsyncLLM) -> None:
    async def main() -> None:
        good = asyncio.create_task(collect(llm, [1, 2, 3]))
        for bad in ("a text", [], [10**9], [1] * 512, {"prompt": 3}):
            with pytest.raises(RequestError):
                await collect(llm, bad)
        with pytest.raises(RequestError, match="pooling"):
            await llm.embed([1, 2], pooling="first")  # type: ignore[arg-type]
        assert (await good)[1].finish_reason == "length"
        await until_idle(llm)

    asyncio.run(main())


def test_embeddings_equal_those_of_llm(llm: AsyncLLM, path: Path) -> None:
    with LLM(path, **OPTIONS) as local:
        wanted = local.embed(PROMPTS, pooling="mean", use_tqdm=False)

    async def main() -> None:
        got = await asyncio.gather(*(llm.embed(p, pooling="mean") for p in PROMPTS))
        for one, other in zip(got, wanted, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-6)

    asyncio.run(main())


def test_abort_ends_a_stream_with_what_it_had(llm: AsyncLLM) -> None:
    async def main() -> None:
        output: RequestOutput | None = None
        async for piece in llm.generate([1, 2, 3], LONG):
            if output is None:
                llm.abort(piece.seq_id)
            output = piece.output
        assert output is not None
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) < 400
        await until_idle(llm)

    asyncio.run(main())


def test_cancelled_tasks_leave_nothing(llm: AsyncLLM) -> None:
    rng = random.Random(60)

    async def main() -> None:
        tasks = []
        for _ in range(60):
            params = LONG if rng.random() < 0.7 else GREEDY
            prompt = [rng.randrange(100) for _ in range(rng.randrange(1, 60))]
            is_streaming = rng.random() < 0.7
            tasks.append(
                asyncio.create_task(collect(llm, prompt, params, is_streaming=is_streaming))
            )
            await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.8:
                rng.choice(tasks).cancel()
        for task in tasks:
            if rng.random() < 0.9:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [each for each in results if isinstance(each, Exception)]
        assert not errors
        await until_idle(llm)
        assert (await collect(llm, [1, 2, 3]))[1].finish_reason == "length"

    asyncio.run(main())


def test_a_reader_who_does_not_read_holds_up_nobody(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.generate([1, 2, 3], LONG)
        first = await anext(stream)
        await collect(llm, [4, 5])
        deadline = time.monotonic() + 60
        while llm.stats.num_running:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        rest = [piece async for piece in stream]
        assert len(rest) <= 2  # tokens that arrived meanwhile are one piece
        assert tokens_of([first, *rest]) == rest[-1].output.token_ids

    asyncio.run(main())


def test_what_a_stalled_reader_missed_is_joined_in_linear_time() -> None:
    """Copying all previous pieces for every token would take far longer."""
    num_tokens = 40_000

    async def main() -> None:
        queue: AsyncOutputQueue[StreamPiece] = AsyncOutputQueue()
        start = time.thread_time()
        for i in range(num_tokens):
            queue.push(StreamPiece(0, "ab", [i], None, [{i: -1.0}], sample=i % 2))
        pieces = merged(await queue.take())
        assert time.thread_time() - start < 4.0
        assert [piece.sample for piece in pieces] == [0, 1]
        for piece in pieces:
            assert piece.text == "ab" * (num_tokens // 2)
            assert piece.token_ids == list(range(piece.sample, num_tokens, 2))
            assert piece.logprobs == [{i: -1.0} for i in piece.token_ids]
        alone = StreamPiece(0, "c", [1], None)
        queue.push(alone)
        assert merged(await queue.take()) == [alone]

    asyncio.run(main())


@pytest.mark.slow
def test_the_front_needs_no_torch(path: Path) -> None:
    script = """
import asyncio, json, sys
from nanovllm import AsyncLLM, SamplingParams

async def main():
    async with AsyncLLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
        async for piece in llm.generate([1, 2, 3], SamplingParams(max_tokens=3)):
            pass
        print(len(piece.output.token_ids), "torch" in sys.modules)

asyncio.run(main())
"""
    command = [sys.executable, "-c", script, str(path), json.dumps(OPTIONS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["3", "False"], result.stderr


@pytest.mark.slow
def test_a_model_that_cannot_run_is_refused_as_by_llm(tmp_path: Path) -> None:
    for make in (LLM, AsyncLLM):
        with pytest.raises(CheckpointError) as caught:
            make(tmp_path / "nowhere")
        message = str(caught.value)
    assert "nowhere" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "killed by signal 9"),
        (signal.SIGSTOP, "sent no heartbeat"),
    ],
)
def test_everybody_is_told_of_a_core_that_is_gone(
    path: Path, number: signal.Signals, message: str
) -> None:
    async def main() -> None:
        llm = AsyncLLM(path, **{**OPTIONS, "max_num_seqs": 2})
        streaming = [True, True, False, True]  # two requests wait in the queue
        await collect(llm, [1, 2, 3])  # the very first step may take longer
        calls = [collect(llm, [1, 2, 3], LONG, is_streaming=each) for each in streaming]
        tasks = [asyncio.create_task(call) for call in calls]
        await until_running(llm, 2)
        os.kill(llm.replicas[0].pid, number)
        gathered = asyncio.gather(*tasks, return_exceptions=True)
        results = await asyncio.wait_for(gathered, SECONDS)
        for error in results:
            assert isinstance(error, NanovllmError)
            assert message in str(error)
        assert message in str(llm.error)
        with pytest.raises(NanovllmError, match=message):
            await collect(llm, [1])
        llm.close()

    asyncio.run(main())


@pytest.mark.slow
def test_a_fault_of_the_front_fails_whoever_waits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        llm = AsyncLLM(path, **OPTIONS)
        tasks = [asyncio.create_task(collect(llm, [1, 2, 3], LONG)) for _ in range(2)]
        await until_running(llm, 2)
        monkeypatch.setattr(llm.client, "collect", None)
        for task in tasks:
            with pytest.raises(EngineError, match="cannot read messages"):
                await asyncio.wait_for(task, SECONDS)
        llm.close()

    asyncio.run(main())


@pytest.mark.slow
def test_closing_fails_whoever_waits(path: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(path, **OPTIONS)
        task = asyncio.create_task(collect(llm, [1, 2, 3], LONG))
        await until_running(llm, 1)
        pid = llm.replicas[0].pid
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineError, match="closed"):
            await task
        llm.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


@pytest.mark.slow
def test_stop_strings(tmp_path: Path) -> None:
    """Text stops at the same place as without a process, though the core runs on for a while."""
    options = {**OPTIONS, "skip_tokenizer_init": False}
    model = make_byte_model(tmp_path)
    with LLM(model, **options) as local:
        texts = [each.text for each in local.generate(["One", "Two,"], GREEDY, use_tqdm=False)]
        stops = [text[len(text) // 2 :][:2] for text in texts]
        params = [SamplingParams(temperature=0, max_tokens=40, stop=[stop]) for stop in stops]
        wanted = local.generate(["One", "Two,"], params, use_tqdm=False)

    async def main() -> None:
        async with AsyncLLM(model, **options) as llm:
            calls = map(collect, [llm] * 2, ["One", "Two,"], params)
            for (pieces, got), want in zip(await asyncio.gather(*calls), wanted, strict=True):
                assert got.text == want.text == "".join(piece.text for piece in pieces)
                assert got.token_ids == want.token_ids
                assert got.finish_reason == want.finish_reason == "stop"
                assert got.outputs[0].stop_reason == want.outputs[0].stop_reason
            await until_idle(llm)

    asyncio.run(main())
