"""An engine core in a child process: it receives requests and sends step results over a socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from nanovllm.assembly import create_grammars, resolve_model, start_core
from nanovllm.config import EngineConfig
from nanovllm.devices.replica_share import take_share
from nanovllm.engine.core import EngineCore
from nanovllm.engine.request import EngineCoreOutputs, FinishedSequence, Request
from nanovllm.errors import RequestError
from nanovllm.parallel.child import Kind, Link, StepTimer, run_child
from nanovllm.serve.core_messages import (
    AddRequests,
    Control,
    CoreReady,
    CoreStats,
    CoreUpdate,
    FinishSequences,
    SendSnapshots,
)
from nanovllm.worker.host_memory import trim_malloc

if TYPE_CHECKING:
    from nanovllm.serve.live.observer import Observer

IDLE_SECONDS = 1.0  # time between updates while the core is idle and no client is subscribed

Command = AddRequests | FinishSequences | SendSnapshots | Control
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
    inbox: SimpleQueue[Command | None] = SimpleQueue()
    threading.Thread(target=_receive_all, args=(link, inbox), daemon=True).start()
    resolved = resolve_model(config)
    send(resolved)  # the parent process loads the tokenizer while this one loads the model
    vocab_size = resolved.model_config.vocab_size
    get_grammars = cache(partial(create_grammars, vocab_size, resolved.load_vocabulary))
    started = start_core(resolved, get_grammars)
    core = started.core
    try:
        send(CoreReady(started.info, core.max_len))
        CoreLoop(core, inbox, send, timer).run()
    finally:
        core.executor.close()


def _receive_all(link: Link, inbox: SimpleQueue[Command | None]) -> None:
    while (command := link.receive()) is not None:
        inbox.put(command)
    inbox.put(None)


class CoreLoop:
    """The main loop: handles commands, and runs steps while requests are unfinished."""

    def __init__(
        self,
        core: EngineCore,
        inbox: SimpleQueue[Command | None],
        send: Send,
        timer: StepTimer,  # context manager that is entered for every step
    ) -> None:
        self.core, self.inbox, self.send, self.timer = core, inbox, send, timer
        self._num_prefill_tokens = self._num_decode_tokens = 0
        self._observer: Observer | None = None  # set once a client subscribes or pauses
        self._is_at_rest = self._is_over = False

    def run(self) -> None:
        while not self._is_over:
            finished = self._handle_commands()
            step = EngineCoreOutputs([], [], [])
            if self._may_step:
                with self.timer:
                    step = self.core.step()
            self._num_prefill_tokens += step.num_prefill_tokens
            self._num_decode_tokens += step.num_decode_tokens
            step, stats = replace(step, finished=[*finished, *step.finished]), self._stats()
            state = None if self._observer is None else self._observer.after_step(stats)
            self.send(CoreUpdate(step, stats, state))

    @property
    def _may_step(self) -> bool:
        return self.core.has_unfinished and (self._observer is None or self._observer.may_step)

    def _handle_commands(self) -> list[FinishedSequence]:
        """Handle all queued commands; wait for one if there is nothing else to do.

        Return the sequences that were finished early or rejected.
        """
        finished: list[FinishedSequence] = []  # sent with the next update
        while not self._is_over:
            is_idle = not self._may_step and not finished
            try:
                interval = None if self._observer is None else self._observer.interval
                command = self.inbox.get(block=is_idle, timeout=interval or IDLE_SECONDS)
            except Empty:
                if is_idle and not self.core.has_unfinished:
                    self._rest()
                return finished
            match command:
                case None:  # the parent closed its end
                    self._is_over = True
                case AddRequests(requests):
                    self._is_at_rest = False
                    finished += self._add(requests)
                case SendSnapshots() | Control():
                    self._observe(command)
                case FinishSequences(seq_ids, reason):
                    found = (self.core.finish(seq_id, reason) for seq_id in seq_ids)
                    finished += [each for each in found if each is not None]
        return finished

    def _add(self, requests: list[Request]) -> list[FinishedSequence]:
        """Queue requests; those that can never run are returned, finished with an error."""
        rejected = []
        for request in requests:
            try:
                self.core.add(request)
            except RequestError as error:
                now = time.perf_counter()
                finished_seq = FinishedSequence(
                    request.seq_id, [], "error", 0, 0.0, 0.0, now, [], error=str(error)
                )
                rejected.append(finished_seq)
        return rejected

    def _rest(self) -> None:
        """Use idle time to capture missing graphs; then return free host memory to the OS, once."""
        while not self._is_at_rest and self.inbox.empty():
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
        )
