"""Several threads, interrupts, forks and failures: each caller gets its own outputs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.engine_thread import EngineThread
from nanovllm.errors import EngineError
from tests.checkpoints import TinyCheckpoint
from tests.devices import runner_of
from tests.engine.test_llm_engine import assert_idle

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[1, 2, 3], [4, 5], [*range(40)], [7], [*range(30, 60)]]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tiny: Callable[[str], TinyCheckpoint]) -> Path:
    return tiny("qwen3").path


def make_llm(path: Path, **options: Any) -> LLM:
    defaults = {"max_num_seqs": 4, "max_model_len": 96, "kvcache_block_size": 16}
    sizes = {"num_kvcache_blocks": 24, "dtype": "float32", "skip_tokenizer_init": True}
    return LLM(path, **{**defaults, **sizes, **options})


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with make_llm(path) as llm:
        yield llm


def generate(llm: LLM, prompts: Any = PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


# Threads


def random_calls(count: int) -> list[tuple[list[list[int]], SamplingParams]]:
    """Return calls with one or several prompts that share prefixes, greedy and seeded."""
    rng = random.Random(5)
    base = [rng.randrange(100) for _ in range(40)]

    def prompt() -> list[int]:
        tail = [rng.randrange(100) for _ in range(rng.randrange(1, 20))]
        return base[: rng.randrange(40)] + tail

    def params(seed: int) -> SamplingParams:
        temperature, max_tokens = rng.choice([0.0, 1.0]), rng.randrange(1, 9)
        return SamplingParams(temperature, max_tokens, ignore_eos=True, seed=seed)

    return [([prompt() for _ in range(rng.choice([1, 1, 1, 3]))], params(i)) for i in range(count)]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True, "depth": 1}], ids=str)
def test_threads_get_what_one_after_the_other_gets(path: Path, options: dict[str, Any]) -> None:
    """All threads' requests run in one batch."""
    calls = random_calls(40)
    with make_llm(path, max_num_seqs=8, **options) as llm:
        want = [generate(llm, *call) for call in calls]
    with make_llm(path, max_num_seqs=8, **options) as llm, ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda call: generate(llm, *call), calls))
        assert_idle(llm)
    assert got == want


def test_all_kinds_of_calls_from_threads(path: Path) -> None:
    """Streams, steps, aborts and generate run at once; `step` returns add_request's outputs."""
    with make_llm(path) as llm:
        want = generate(llm)
        finished: list[RequestOutput] = []
        added: dict[int, int] = {}

        def step() -> None:
            for index, prompt in enumerate(PROMPTS * 3):
                added[llm.add_request(prompt, GREEDY)] = index % len(PROMPTS)
            while not llm.is_finished():
                finished.extend(llm.step().finished)

        def stream() -> None:
            for _ in range(5):
                got: list[list[int]] = [[] for _ in PROMPTS]
                for piece in llm.stream(PROMPTS, GREEDY):
                    got[piece.index] += piece.token_ids
                assert got == want

        def leave_early() -> None:
            for _ in range(5):
                with contextlib.closing(llm.stream(PROMPTS, GREEDY)) as pieces:
                    next(pieces)

        def abort() -> None:
            for _ in range(5):
                output = llm.abort(llm.add_request([9] * 30, GREEDY))
                assert output is None or output.finish_reason == "abort"

        def ask() -> None:
            for _ in range(5):
                assert generate(llm) == want

        kinds = (step, stream, leave_early, abort, ask)
        with ThreadPoolExecutor(len(kinds)) as threads:
            for future in [threads.submit(kind) for kind in kinds]:
                future.result()
        while not llm.is_finished():
            finished += llm.step().finished
        ours = [output for output in finished if output.seq_id in added]
        assert sorted(output.seq_id for output in ours) == sorted(added)
        assert all(output.token_ids == want[added[output.seq_id]] for output in ours)
        assert_idle(llm)


def test_a_failure_reaches_every_thread_that_waits(path: Path) -> None:
    with make_llm(path) as llm:
        stream = llm.stream(PROMPTS, GREEDY)
        next(stream)
        runner_of(llm).forward = None  # not callable
        with ThreadPoolExecutor(3) as threads:
            futures = [threads.submit(generate, llm) for _ in range(2)]
            futures += [threads.submit(list, stream), threads.submit(llm.step)]
            errors = [future.exception(timeout=240) for future in futures]
        assert all(isinstance(error, (TypeError, EngineError)) for error in errors)
        assert all("not callable" in str(error) for error in errors)
        assert sum(isinstance(error, TypeError) for error in errors) == 1


def test_closing_ends_the_waits_of_other_threads(path: Path) -> None:
    llm = make_llm(path, max_model_len=2048, num_kvcache_blocks=200)
    params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(generate, llm, [1, 2], params) for _ in range(2)]
        while len(llm.engine.client.streams) < 2:
            time.sleep(0.001)
        llm.close()
        for future in futures:
            with pytest.raises(EngineError, match="closed"):
                future.result(timeout=240)


def test_abort_all_ends_every_call(path: Path) -> None:
    with make_llm(path, max_model_len=2048, num_kvcache_blocks=200) as llm:
        params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
        llm.add_request([5, 6], params)
        stream = llm.stream([3, 4], params)
        pieces = [next(stream)]
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(llm.generate, [1, 2], params, use_tqdm=False)
            while len(llm.engine.client.streams) < 2:
                time.sleep(0.001)
            assert len(llm.abort_all()) == 3
            [output] = future.result(timeout=240)
        assert output.finish_reason == "abort"
        pieces += stream
        assert pieces[-1].output is not None
        assert pieces[-1].output.finish_reason == "abort"
        got = [token_id for piece in pieces for token_id in piece.token_ids]
        assert got == pieces[-1].output.token_ids
        assert_idle(llm)


def test_a_stream_that_nobody_reads_waits(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    stream = llm.stream([1, 2, 3], params)
    next(stream)
    llm.engine.call(lambda: None)
    time.sleep(0.05)
    [seq] = llm.engine.call(lambda: list(llm.engine.core._sequences.values()))
    assert len(seq.output_token_ids) < 10
    assert sum(len(piece.token_ids) for piece in stream) == 49
    assert_idle(llm)


def test_a_paused_stream_may_be_collected_by_the_engine_itself(path: Path) -> None:
    """Garbage collection may run in any thread, including the engine's."""
    with make_llm(path) as llm:
        want = generate(llm)

        def leave_a_cycle() -> None:
            cycle: list[Any] = [llm.stream(PROMPTS, GREEDY)]
            next(cycle[0])
            cycle.append(cycle)

        leave_a_cycle()
        llm.engine.call(gc.collect)
        assert generate(llm) == want
        assert_idle(llm)


def test_an_engine_may_be_collected_in_its_own_thread(path: Path) -> None:
    def leave_a_cycle() -> tuple[threading.Thread, threading.Event]:
        llm, may_collect = make_llm(path), threading.Event()
        cycle: list[Any] = [llm]
        cycle.append(cycle)
        llm.engine._commands.put(lambda: (may_collect.wait(), gc.collect()))
        return llm.engine._thread, may_collect

    gc.disable()
    try:
        thread, may_collect = leave_a_cycle()
        may_collect.set()
        thread.join(30)
    finally:
        gc.enable()
    assert not thread.is_alive()


def test_an_error_of_the_tokenizer_fails_the_calls_and_not_the_engine(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(path) as llm:
        want = generate(llm)
        real, calls = llm.engine.client.collect, itertools.count()

        def collect(*step: Any) -> Any:
            if next(calls) == 3:
                raise IndexError("no such piece")
            return real(*step)

        monkeypatch.setattr(llm.engine.client, "collect", collect)
        with pytest.raises(IndexError, match="no such piece"):
            list(llm.stream(PROMPTS, GREEDY))
        assert generate(llm) == want
        assert_idle(llm)


def test_an_error_in_the_step_of_another_call_reaches_added_requests(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that failed may have lost their tokens, so they end, and `step` raises."""
    with make_llm(path) as llm:
        want = generate(llm)
        llm.add_request([1, 2, 3], GREEDY)
        monkeypatch.setattr(llm.engine.client, "collect", None)
        with pytest.raises(
            TypeError, match="not callable"
        ):  # it waits, so it gets the error itself
            list(llm.stream(PROMPTS, GREEDY))
        monkeypatch.undo()
        assert not llm.is_finished()
        with pytest.raises(EngineError, match="not callable"):
            llm.step()
        assert_idle(llm)
        assert generate(llm) == want


def test_outputs_before_an_error_are_returned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with make_llm(path) as llm:
        seq_id = llm.add_request([1, 2, 3], GREEDY)
        stream = llm.stream([4, 5, 6], long)
        llm.add_request([7, 8], long)
        for _ in range(10):
            next(stream)
        monkeypatch.setattr(llm.engine.client, "collect", None)
        with pytest.raises(TypeError):
            list(stream)
        monkeypatch.undo()
        assert [output.seq_id for output in llm.step().finished] == [seq_id]
        assert not llm.is_finished()
        with pytest.raises(EngineError, match="not callable"):
            llm.step()
        assert_idle(llm)


def test_aborting_everything_also_ends_what_has_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(path) as llm:
        llm.add_request([1, 2, 3], GREEDY)
        monkeypatch.setattr(llm.engine.client, "collect", None)
        with pytest.raises(TypeError):
            generate(llm)
        monkeypatch.undo()
        assert llm.abort_all() == []
        assert_idle(llm)


def test_an_error_in_a_step_of_one_caller_ends_the_wait_of_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with make_llm(path) as llm:
        stream = llm.stream([4, 5, 6], long)
        next(stream)
        # From now on, no step has pieces. Either caller may step first.
        monkeypatch.setattr(llm.engine.client, "collect", None)
        llm.add_request([1, 2, 3], GREEDY)
        with pytest.raises((TypeError, EngineError)):
            llm.step()
        monkeypatch.undo()
        with pytest.raises((TypeError, EngineError)):
            list(stream)
        assert_idle(llm)


LAST_WORDS = """
import sys, threading, time
from nanovllm import LLM, SamplingParams
from nanovllm.engine import engine_thread
from nanovllm.engine.engine_thread import EngineThread
from nanovllm.errors import EngineError
engine_thread.CLOSE_SECONDS = 0.1
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=96, max_num_seqs=4)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
def slow(plan, real=llm.engine.core.executor.submit):
    time.sleep({seconds})
    return real(plan)
llm.engine.core.executor.submit = slow
def ask():
    try:
        outputs = llm.generate([[1, 2, 3], [4], [5, 6]], params, use_tqdm=False)
    except EngineError as error:
        return print(str(error) + chr(10), end="", flush=True)  # in a single write
    print([len(output.token_ids) for output in outputs], flush=True)
threading.Thread(target=ask, daemon={is_daemon}).start()
time.sleep(0.3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("is_daemon", "seconds"), [(False, 0.1), (True, 1.0)])
def test_a_program_may_end_while_an_engine_steps(
    path: Path, is_daemon: bool, seconds: float
) -> None:
    """A non-daemon thread gets its outputs, even if they need a new batch size."""
    source = LAST_WORDS.format(is_daemon=is_daemon, seconds=seconds)
    command = [sys.executable, "-c", source, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    closed = ("", "the engine is closed; create a new one\n")  # if it is still able to print
    assert result.stdout in (closed if is_daemon else ("[4, 4, 4]\n",))


def test_an_interrupt_at_the_end_of_a_construction_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, num_threads = [], threading.active_count()
    real = EngineThread.start

    def start(self: EngineThread) -> None:
        engines.append(weakref.ref(self))
        real(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineThread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        make_llm(path)
    gc.collect()
    assert [engine() for engine in engines] == [None]
    assert threading.active_count() == num_threads


# Forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_so_at_once(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    calls: list[Callable[[], object]] = [
        lambda: generate(llm),
        lambda: next(llm.stream(PROMPTS, GREEDY)),
        lambda: llm.add_request([1], GREEDY),
        llm.step,
        llm.is_finished,
        lambda: llm.abort(0),
        llm.abort_all,
        lambda: list(stream),
    ]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            for call in calls:
                with pytest.raises(EngineError, match="forked"):
                    call()
            llm.close()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    stream.close()
    assert len(generate(llm)) == len(PROMPTS)  # the parent is unaffected


# Interrupts


NUM_INTERRUPTS = 200


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT even if a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals between threads here")
def test_real_interrupts_at_random_times_do_no_harm(llm: LLM) -> None:
    """A thread sends SIGINT to this one during `generate` and `stream` calls, 200 times."""
    want = generate(llm)
    rng, num_struck = random.Random(3), 0
    is_running, is_over = threading.Event(), threading.Event()
    main = threading.get_ident()

    def interrupt() -> None:
        while is_running.wait() and not is_over.is_set():
            time.sleep(rng.uniform(0, 0.01))
            if is_running.is_set():
                is_running.clear()  # one signal per call
                signal.pthread_kill(main, signal.SIGINT)

    def call(number: int) -> None:
        is_running.set()
        assert (generate(llm) if number % 2 else streamed(llm)) == want
        while is_running.is_set():  # the call ended too early: the signal arrives here
            time.sleep(0.001)
        assert is_lost.wait(60)
        is_lost.clear()
        raise KeyboardInterrupt

    thread = threading.Thread(target=interrupt, daemon=True)
    # An interrupt in a finalizer is lost, and pytest would keep its traceback.
    is_lost = threading.Event()
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: is_lost.set()
    thread.start()
    try:
        for number in range(NUM_INTERRUPTS):
            with pytest.raises(KeyboardInterrupt):
                call(number)
            num_struck += 1
            if number % 20 == 0:
                assert generate(llm) == want
    finally:
        is_over.set()
        is_running.set()
        thread.join()
        sys.unraisablehook = hook
    assert num_struck == NUM_INTERRUPTS
    assert generate(llm) == want
    assert_idle(llm)


def streamed(llm: LLM) -> list[list[int]]:
    token_ids: list[list[int]] = [[] for _ in PROMPTS]
    for piece in llm.stream(PROMPTS, GREEDY):
        token_ids[piece.index] += piece.token_ids
    return token_ids


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_does_not_wait_for_a_long_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(path) as llm:
        want = generate(llm)
        real, is_released = llm.engine.core.executor.submit, threading.Event()
        main, calls = threading.get_ident(), itertools.count()

        def slow(plan: Any) -> Any:
            if next(calls) == 0:
                signal.pthread_kill(main, signal.SIGINT)
                assert is_released.wait(60)
            return real(plan)

        monkeypatch.setattr(llm.engine.core.executor, "submit", slow)
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
        is_released.set()
        assert generate(llm) == want
        assert_idle(llm)


# Invalid logits


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_end_their_request_alone(path: Path, depth: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, seed=1)
    with make_llm(path, depth=depth) as llm:
        want = generate(llm, params=params)
        break_logits(llm, position=PROMPTS[2].__len__() + 3)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        reasons = [output.finish_reason for output in outputs]
        assert reasons == ["length", "length", "error", "length", "length"]
        assert [output.token_ids for output in outputs] == [
            ids[:3] if reason == "error" else ids for ids, reason in zip(want, reasons, strict=True)
        ]
        assert "NaN" in str(outputs[2].error)
        assert outputs[0].error is None
        assert_idle(llm)
        [*_, last] = llm.stream(PROMPTS[2], params)
        assert last.output is not None
        assert last.output.finish_reason == "error"


def test_overflowing_keys_and_values_are_an_error(path: Path) -> None:
    with make_llm(path, dtype="float16", enforce_eager=True) as llm:
        with torch.inference_mode():
            for layer in runner_of(llm).forward.model.model.layers:
                layer.input_layernorm.weight.mul_(1e6)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert {output.finish_reason for output in outputs} == {"error"}


def break_logits(llm: LLM, position: int) -> None:
    """Replace the logits at a position with NaN in every sequence that reaches it."""
    runner = runner_of(llm)
    real = runner.forward

    def forward(plan: Any) -> Any:
        logits = real(plan)
        logits.values[logits.positions == position] = float("nan")
        return logits

    runner.forward = forward
