"""Use all threads while cores are idle, one while other processes use them; switch back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from nanovllm.devices.cpu.contention import MAX_PAUSE, ThreadChooser, read_idle_seconds


@dataclass
class Machine:
    """A simulated machine: a run takes one second with one thread.

    `share` is the fraction of time in which threads have a core.
    """

    chooser: ThreadChooser
    num_threads: int
    slowdown: float = 1.0  # factor for all threads, which wait for each other
    share: float = 1.0
    share_alone: float | None = None  # `share` of a single thread, if different
    chosen: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, num_runs: int) -> float:
        """Return the average duration of a run."""
        before = self.seconds
        for _ in range(num_runs):
            self.chosen.append(self.chooser.num_threads)
            is_alone = self.chooser.num_threads == 1
            took = 1.0 if is_alone else self.slowdown / self.num_threads
            self.seconds += took
            share = self.share if self.share_alone is None or not is_alone else self.share_alone
            self.chooser.note(took, took * share * self.chooser.num_threads)
        return (self.seconds - before) / num_runs


def make_chooser(num_threads: int) -> ThreadChooser:
    return ThreadChooser(num_threads, idle_seconds=lambda: None)


@pytest.mark.parametrize("num_threads", [2, 8, 64])
def test_idle_cores_are_all_used(num_threads: int) -> None:
    machine = Machine(make_chooser(num_threads), num_threads)
    machine.run(1000)
    assert set(machine.chosen) == {num_threads}


@pytest.mark.parametrize("num_threads", [2, 8])
@pytest.mark.parametrize("slowdown", [6.0, 12.0, 40.0])
def test_busy_cores_cost_little_more_than_one_thread_does(
    num_threads: int, slowdown: float
) -> None:
    machine = Machine(make_chooser(num_threads), num_threads, slowdown * num_threads / 2, share=0.4)
    machine.run(200)
    machine.chosen.clear()
    assert machine.run(1000) == 1.0
    assert set(machine.chosen) == {1}  # no check: a single thread loses its core as well
    machine.slowdown = machine.share = 1.0  # the other processes are gone
    machine.run(MAX_PAUSE + 2)
    assert machine.chooser.num_threads == num_threads
    machine.chosen.clear()
    machine.run(1000)
    assert set(machine.chosen) == {num_threads}


@pytest.mark.parametrize("slowdown", [6.0, 12.0, 40.0])
def test_looks_cost_little_where_one_thread_has_a_core(slowdown: float) -> None:
    machine = Machine(make_chooser(2), 2, slowdown, share=0.4, share_alone=1.0)
    machine.run(200)
    assert 1.0 < machine.run(1000) < 1.5


def test_all_threads_are_not_tried_while_no_other_core_is_idle() -> None:
    """One thread has a core of its own; another program uses the second core."""
    seconds = idle = 0.0
    chooser = ThreadChooser(2, idle_seconds=lambda: idle)
    machine = Machine(chooser, 2, slowdown=40.0, share=0.4, share_alone=1.0)
    machine.run(2)  # all threads, then one
    machine.chosen.clear()
    assert machine.run(1000) == 1.0
    assert set(machine.chosen) == {1}
    machine.slowdown = machine.share = 1.0  # the other program is gone
    for _ in range(2 * MAX_PAUSE):
        idle, seconds = idle + machine.seconds - seconds, machine.seconds
        machine.run(1)
    assert chooser.num_threads == 2


def test_the_idle_time_is_read() -> None:
    before = read_idle_seconds()
    assert before is None or 0 <= before <= (read_idle_seconds() or 0.0)


def test_threads_that_sleep_while_they_wait_are_not_taken_for_robbed_ones() -> None:
    """With OMP_WAIT_POLICY=passive a small share is normal, and all threads are still faster."""
    machine = Machine(make_chooser(2), 2, slowdown=1.2, share=0.6)
    machine.run(200)
    assert machine.run(1000) < 0.61


def test_one_thread_needs_no_clock() -> None:
    chooser = ThreadChooser(1)
    with chooser.limit(1):
        assert torch.get_num_threads() == 1
    assert chooser.num_threads == 1


def test_a_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser, noted = ThreadChooser(2), []
    monkeypatch.setattr(chooser, "note", lambda *args: noted.append(args))
    with chooser.limit(0):
        pass
    assert not noted
    with chooser.limit(7):
        pass
    [(seconds, cpu_seconds, num_tokens)] = noted
    assert seconds > 0
    assert cpu_seconds >= 0
    assert num_tokens == 7


def test_steps_of_different_sizes_are_compared_per_token() -> None:
    """A single thread that runs a small step is not taken for the faster choice."""
    chooser = ThreadChooser(2)
    chooser.note(1.0, 1.0, 256)  # two threads get half of their cores: try one
    assert chooser.num_threads == 1
    chooser.note(0.9, 0.9, 64)  # 0.9 s for 64 tokens is slower than 1 s for 256
    assert chooser.num_threads == 2


def test_torch_runs_on_the_chosen_threads_during_a_step() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        chooser = ThreadChooser(2)
        for chooser.num_threads in (2, 1):
            with chooser.limit(1):
                assert torch.get_num_threads() == chooser.num_threads
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
