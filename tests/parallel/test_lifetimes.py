"""Programs with workers end in every way: normally, by Ctrl-C, killed, or garbage-collected."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams, assembly
from nanovllm.errors import EngineError, WorkerError
from tests.checkpoints import TinyCheckpoint
from tests.parallel import programs
from tests.parallel.leftovers import descendants, is_alive, wait_until
from tests.parallel.programs import program
from tests.parallel.workers import process_ids

SECONDS = 60.0  # deadline for the end of all processes, even on a busy machine
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 96,
    "skip_tokenizer_init": True,
}
START_EXECUTOR = """
import os, signal, sys, time
from tests.parallel.workers import *
executor = make_executor({build_worker})
executor.start()
print(*process_ids(executor), flush=True)
"""
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(tiny: Callable[[str], TinyCheckpoint]) -> Path:
    return tiny("qwen3").path


@pytest.fixture(scope="module")
def answers(path: Path) -> list[list[int]]:
    """Return the output of one worker in this process."""
    with LLM(path, **OPTIONS) as llm:
        return generate(llm)


def generate(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def assert_gone(pids: list[int]) -> None:
    """Check that processes are gone; our own children must be reaped, too."""

    def left() -> list[int]:
        ours = descendants(os.getpid())
        return [pid for pid in pids if is_alive(pid) or str(pid) in ours]

    wait_until(lambda: not left(), SECONDS, lambda: f"still there: {left()}")


@pytest.mark.slow
def test_two_engines_side_by_side(path: Path, answers: list[list[int]]) -> None:
    """They start concurrently, step in turn, and the death of one does not affect the other."""
    options = {**OPTIONS, "tensor_parallel_size": 2, "depth": 1}
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: LLM(path, **options), range(2))
    with first, second:
        for llm in (first, second):
            for prompt in PROMPTS:
                llm.add_request(prompt, PARAMS)
        outputs: dict[int, list[list[int]]] = {0: [], 1: []}
        while not (first.is_finished() and second.is_finished()):
            for number, llm in enumerate((first, second)):
                outputs[number] += [o.token_ids for o in llm.step().finished]
        assert outputs == {0: answers, 1: answers}
        pids, others = (process_ids(llm.engine.core.executor) for llm in (first, second))
        assert len({*pids, *others}) == 4
        os.kill(pids[1], signal.SIGKILL)
        assert_gone(pids)  # the other rank was stopped
        cause = rf"worker 1 of 2 \(process {pids[1]}\) was killed by signal 9"
        with pytest.raises(WorkerError, match=cause):
            generate(first)
        with pytest.raises(EngineError, match=cause):
            first.add_request([1, 2])
        assert generate(second) == answers
    assert_gone(others)


@pytest.mark.slow
def test_ctrl_c_while_workers_start(path: Path) -> None:
    source = f"""
import sys
from nanovllm import LLM
LLM(sys.argv[1], tensor_parallel_size=2, **{OPTIONS})
"""
    with program("-c", source, str(path)) as running:
        wait_until(lambda: len(descendants(running.pid)) == 2, programs.SECONDS, running.errors)
        pids = [int(pid) for pid in descendants(running.pid)]
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(SECONDS) == -signal.SIGINT
        assert running.errors().endswith("\nKeyboardInterrupt\n")
        assert_gone(pids)


@pytest.mark.slow
def test_ctrl_c_when_the_workers_are_ready(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interactive prompt keeps the traceback, and with it all objects in its frames."""

    def interrupted() -> None:
        pids.extend(int(pid) for pid in descendants(os.getpid()) - before)
        raise KeyboardInterrupt

    before, pids = descendants(os.getpid()), []
    monkeypatch.setattr(assembly.gc, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        LLM(path, tensor_parallel_size=2, **OPTIONS)
    assert len(pids) == 2
    assert_gone(pids)
    assert caught.tb is not None


@pytest.mark.slow
def test_an_engine_outlives_ctrl_c(path: Path, answers: list[list[int]], tmp_path: Path) -> None:
    """The script has no `if __name__ == "__main__"`; workers do not run it again."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys
from nanovllm import LLM, SamplingParams
from tests.parallel.workers import process_ids
llm = LLM(sys.argv[1], tensor_parallel_size=2, **{OPTIONS})
print(*process_ids(llm.engine.core.executor), flush=True)
for _ in range(3):
    try:
        print("running", flush=True)
        while True:
            llm.generate({PROMPTS}, SamplingParams(max_tokens=80, ignore_eos=True), use_tqdm=False)
    except KeyboardInterrupt:
        outputs = llm.generate({PROMPTS}, {PARAMS}, use_tqdm=False)
        print([output.token_ids for output in outputs], flush=True)
""")
    with program(str(script), str(path)) as running:
        pids = running.read_pids()
        for _ in range(3):
            assert running.read_line() == "running\n"
            os.killpg(running.pid, signal.SIGINT)
            assert json.loads(running.read_line()) == answers
        assert (running.wait(), running.output.read(), running.errors()) == (0, "", "")
    assert_gone(pids)


@pytest.mark.parametrize(
    ("number", "build_worker", "order"),
    [
        (signal.SIGTERM, "obedient", "Order.SLEEP, 0"),  # in a long step; SIGKILL is tested below
        (signal.SIGINT, "obedient", "Order.SLEEP, 0"),
        pytest.param(signal.SIGKILL, "meeting", "Order.MEET, 1", marks=pytest.mark.slow),
    ],
)
def test_workers_go_with_the_program(number: signal.Signals, build_worker: str, order: str) -> None:
    source = START_EXECUTOR.format(build_worker=build_worker)
    source += f"pending = executor.submit(orders({order}))\nprint(0, flush=True)\npending.result()"
    with program("-c", source) as running:
        pids = running.read_pids()
        running.read_pids()
        os.kill(running.pid, number)
        running.wait(SECONDS)
        assert_gone(pids)


def test_workers_stay_with_the_program_and_not_with_its_children() -> None:
    """A forked child that exits does not stop the workers. One that stays and inherits the sockets
    does not keep them alive: they check the parent's pid, here during a long step."""
    source = START_EXECUTOR.format(build_worker="obedient")
    source += "if (child := os.fork()) == 0:\n    sys.exit()\nos.waitpid(child, 0)\n"
    source += "print(executor.submit(orders(41)).result().tokens[0], flush=True)\n"
    source += "if (child := os.fork()) == 0:\n    time.sleep(60)\n    os._exit(0)\n"
    source += "pending = executor.submit(orders(Order.SLEEP, 0))\n"
    source += "print(child, flush=True)\npending.result()"
    with program("-c", source) as running:
        pids = running.read_pids()
        assert running.read_pids() == [41]
        (child,) = running.read_pids()
        running.process.kill()
        running.wait(SECONDS)
        try:
            assert_gone(pids)
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_workers_go_when_a_program_dies_as_they_start() -> None:
    source = """
import threading
from tests.parallel.workers import *
executor = make_executor(sleeping)
threading.Thread(target=executor.start, daemon=True).start()
while len(process_ids(executor)) < 2:
    time.sleep(0.001)
print(*process_ids(executor), flush=True)
time.sleep(60)
"""
    with program("-c", source) as running:
        pids = running.read_pids()
        running.process.kill()
        running.wait(SECONDS)
        assert_gone(pids)
