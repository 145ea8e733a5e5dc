"""The core's end of the page: snapshots while a client is subscribed, and step mode."""

from __future__ import annotations

from nanovllm.engine.core import EngineCore
from nanovllm.serve.core_messages import Control, ControlAction, CoreStats, SendSnapshots
from nanovllm.serve.live.engine_state import EngineState
from nanovllm.serve.live.snapshots import SNAPSHOT_SECONDS, SnapshotThrottle
from nanovllm.serve.live.step_mode import StepMode


class Observer:
    """Handles the commands of clients that watch, pause and step an engine core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._snapshots: SnapshotThrottle | None = None  # set while a client is subscribed
        self._paused: StepMode | None = None  # set while the engine is paused

    @property
    def interval(self) -> float | None:
        """Time between snapshots in seconds; None while no client is subscribed."""
        return None if self._snapshots is None else SNAPSHOT_SECONDS

    @property
    def may_step(self) -> bool:
        return self._paused is None or self._paused.num_steps > 0

    def handle(self, command: SendSnapshots | Control) -> None:
        if isinstance(command, SendSnapshots):
            self._send_snapshots(command.is_on)
        else:
            self._control(command.action)

    def after_step(self, stats: CoreStats) -> EngineState | None:
        """Count a step of a paused engine, and return a snapshot if one is due."""
        if self._paused is not None:
            self._paused.num_steps = max(self._paused.num_steps - 1, 0)
        return None if self._snapshots is None else self._snapshots.snapshot(stats, self._paused)

    def _send_snapshots(self, is_on: bool) -> None:
        if not is_on:
            if self._snapshots is not None:
                self._snapshots.stop()
            self._snapshots = None
        elif self._snapshots is None:
            self._snapshots = SnapshotThrottle(self._core)
        else:
            self._snapshots.restart()

    def _control(self, action: ControlAction) -> None:
        if action == "resume" and self._paused is not None:
            self._paused.end()
            self._paused = None
        elif action != "resume":
            self._paused = self._paused or StepMode(self._core)
            self._paused.num_steps += action == "step"
        if self._snapshots is not None:
            self._snapshots.restart()
