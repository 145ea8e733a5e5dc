"""An engine core in a child process: it receives requests and sends step results over a socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from nanovllm.assembly import create_grammars, resolve_model, start_core
from nanovllm.config import EngineConfig
from nanovllm.devices.replica_share import take_share
from nanovllm.engine.core import EngineCore
from nanovllm.engine.request import EngineCoreOutputs, FinishedSequence, Request
from nanovllm.engine.run_loop import run_loop
from nanovllm.errors import RequestError
from nanovllm.parallel.child import Kind, Link, StepTimer, run_child
from nanovllm.serve.core_messages import (
    AddRequests,
    Control,
    CoreReady,
    CoreStats,
    CoreUpdate,
    FinishSequence,
    SendSnapshots,
)
from nanovllm.worker.host_memory import trim_malloc

if TYPE_CHECKING:
    from nanovllm.serve.live.observer import Observer

IDLE_SECONDS = 1.0  # time between updates while the core is idle and no client is subscribed

Command = AddRequests | FinishSequence | SendSnapshots | Control
Send = Callable[[CoreUpdate], None]


def main(fd: int, parent_pid: int, log_level: int, replica: int) -> None:
    run_child(fd, parent_pid, log_level, partial(serve, replica=replica))


def serve(link: Link, timer: StepTimer, replica: int = 0) -> None:
    """Start a core and handle commands until the link is closed."""
    config: EngineConfig | None = link.receive()
    if config is None:
        return
    send = partial(link.send, Kind.REPLY)
    take_share(config, replica)
    resolved = resolve_model(config)
    send(resolved)  # the parent process loads the tokenizer while this one loads the model
    vocab_size = resolved.model_config.vocab_size
    get_grammars = cache(partial(create_grammars, vocab_size, resolved.load_vocabulary))
    started = start_core(resolved, get_grammars)
    core = started.core
    try:
        send(CoreReady(started.info, core.max_len))
        loop = CoreLoop(core, send, timer)
        threading.Thread(target=_receive_all, args=(link, loop), daemon=True).start()
        loop.run()
    finally:
        core.executor.close()


def _receive_all(link: Link, loop: CoreLoop) -> None:
    while (command := link.receive()) is not None:
        loop.put(command)
    loop.put(None)


class CoreLoop:
    """Handles commands, and sends an update after every step and from time to time while idle."""

    def __init__(
        self,
        core: EngineCore,
        send: Send,
        timer: StepTimer,  # context manager that is entered for every step
    ) -> None:
        self.core, self.send, self.timer = core, send, timer
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        # Sequences that commands ended, which the next update reports.
        self._finished: list[FinishedSequence] = []
        self._num_prefill_tokens = self._num_decode_tokens = 0
        self._observer: Observer | None = None  # set once a client subscribes or pauses
        self._is_at_rest = False

    def put(self, command: Command | None) -> None:
        """Queue a command, in any thread; None ends the loop."""
        self._commands.put(None if command is None else partial(self._handle, command))

    def run(self) -> None:
        run_loop(self._commands, self._step, self._wait_seconds)

    @property
    def _may_step(self) -> bool:
        return self.core.has_unfinished and (self._observer is None or self._observer.may_step)

    def _wait_seconds(self) -> float:
        if self._finished:
            return 0.0
        if self._may_step:
            return self.core.wait_seconds
        interval = None if self._observer is None else self._observer.interval
        return interval or IDLE_SECONDS

    def _step(self) -> None:
        """Run a step if there is one to run, and send an update."""
        step = EngineCoreOutputs([], [], [])
        if self._may_step:
            with self.timer:
                step = self.core.step()
        elif not self.core.has_unfinished and not self._finished:
            self._rest()
        self._num_prefill_tokens += step.num_prefill_tokens
        self._num_decode_tokens += step.num_decode_tokens
        step, stats = replace(step, finished=[*self._finished, *step.finished]), self._stats()
        self._finished.clear()
        state = None if self._observer is None else self._observer.after_step(stats)
        self.send(CoreUpdate(step, stats, state))

    def _handle(self, command: Command) -> None:
        match command:
            case AddRequests(requests):
                self._is_at_rest = False
                self._add(requests)
            case FinishSequence(seq_id, reason):
                if (finished := self.core.finish(seq_id, reason)) is not None:
                    self._finished.append(finished)
            case SendSnapshots() | Control():
                self._observe(command)

    def _add(self, requests: list[Request]) -> None:
        """Queue requests; those that can never run finish with an error."""
        for request in requests:
            try:
                self.core.add(request)
            except RequestError as error:
                now = time.perf_counter()
                finished_seq = FinishedSequence(
                    request.seq_id, [], "error", 0, 0.0, 0.0, now, [], error=str(error)
                )
                self._finished.append(finished_seq)

    def _rest(self) -> None:
        """Use idle time to capture missing graphs; then return free host memory to the OS, once."""
        while not self._is_at_rest and self._commands.empty():
            if not self.core.executor.capture_one():
                trim_malloc()
                self._is_at_rest = True

    def _observe(self, command: SendSnapshots | Control) -> None:
        if self._observer is None:
            if command == Control("resume"):  # sent by every server that shuts down
                return
            from nanovllm.serve.live.observer import Observer

            self._observer = Observer(self.core)
        self._observer.handle(command)

    def _stats(self) -> CoreStats:
        scheduler = self.core.scheduler
        blocks, counts = scheduler.blocks, scheduler.draft_counts
        return CoreStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.postponed),
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free,
            num_preemptions=scheduler.num_preemptions,
            num_cache_queries=scheduler.num_cache_queries,
            num_cache_hits=scheduler.num_cache_hits,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_drafts=counts.num_drafts,
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
            num_held_blocks=tuple(blocks.num_held),
        )
