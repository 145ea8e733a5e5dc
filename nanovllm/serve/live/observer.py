"""The core's end of the page: snapshots while a client is subscribed, and step mode."""

from __future__ import annotations

import time

from nanovllm.engine.core import EngineCore
from nanovllm.engine.timing import StepLog
from nanovllm.serve.core_messages import Control, ControlAction, CoreStats, SendSnapshots
from nanovllm.serve.live.engine_state import EngineState
from nanovllm.serve.live.snapshots import take_snapshot
from nanovllm.serve.live.step_mode import StepMode

SNAPSHOT_SECONDS = 0.1  # minimum time between snapshots of a core that is not paused


class Observer:
    """Handles the commands of clients that watch, pause and step an engine core.

    The core has a log while a client is subscribed.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._stats: CoreStats | None = None  # statistics in the last snapshot
        self._earliest = 0.0  # earliest time of the next snapshot
        self._paused: StepMode | None = None  # set while the engine is paused

    @property
    def interval(self) -> float | None:
        """Time between snapshots in seconds; None while no client is subscribed."""
        return None if self._core.log is None else SNAPSHOT_SECONDS

    @property
    def may_step(self) -> bool:
        return self._paused is None or self._paused.num_steps > 0

    def handle(self, command: SendSnapshots | Control) -> None:
        if isinstance(command, Control):
            self._control(command.action)
        else:
            self._core.log = (self._core.log or StepLog()) if command.is_on else None
        self._stats = None  # a snapshot is due: a client that just subscribed has none

    def after_step(self, stats: CoreStats) -> EngineState | None:
        """Count a step of a paused engine, and return a snapshot if one is due.

        None is due if nothing changed or the last one is too recent; every step of a paused engine
        gets one.
        """
        log, paused, now = self._core.log, self._paused, time.perf_counter()
        if paused is not None:
            paused.num_steps = max(paused.num_steps - 1, 0)
        if log is None or not (stats != self._stats or log.timings or log.ended):
            return None
        if now < self._earliest and paused is None:
            return None
        self._stats, self._earliest = stats, now + SNAPSHOT_SECONDS
        state = take_snapshot(self._core, log, stats, now)
        return state if paused is None else paused.explain(state)

    def _control(self, action: ControlAction) -> None:
        if action == "resume" and self._paused is not None:
            self._paused.end()
            self._paused = None
        elif action != "resume":
            self._paused = self._paused or StepMode(self._core)
            self._paused.num_steps += action == "step"
