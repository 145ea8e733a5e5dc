"""Functions that callers bring to change the logits of their own requests: docs/requests.md.

A function needs the newest token on the host, so the scheduler plans such a row only when the step
before it is committed: `ProcessedRows.note` has seen its token by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.distributed.group import TPGroup
from nanovllm.engine.step import NewRow, StepPlan
from nanovllm.worker.batch import sampled_rows
from nanovllm.worker.tables import BySlot

Processor = Callable[[list[int], Tensor], Tensor]


@dataclass(slots=True, eq=False)
class ProcessedSequence:
    processors: list[Processor | str]
    output_ids: list[int]

    def process(self, logits: Tensor) -> Tensor:
        """Return new logits [vocab_size], which every processor changed in turn."""
        new = logits.to(torch.float32, copy=True)
        for index, processor in enumerate(self.processors):
            try:
                if isinstance(processor, str):
                    processor = self.processors[index] = import_processor(processor)
                new = check_logits(processor(list(self.output_ids), new), logits)
            except (Exception, SystemExit) as error:
                message = f"logits_processors[{index}] ({_name(processor)}) failed: {_shown(error)}"
                raise ProcessorError(message) from error
        return new


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """Of one step: rows of its logits, and what went wrong with some."""

    sequences: dict[int, ProcessedSequence]
    failures: dict[int, str] = field(default_factory=dict)

    def note(self, tokens: np.ndarray) -> None:
        """Learn what was sampled."""
        for row, sequence in self.sequences.items():
            sequence.output_ids.append(int(tokens[row]))


class LogitsProcessors:
    """The first rank runs them, as it alone samples."""

    def __init__(self, group: TPGroup) -> None:
        self._is_first = group.rank == 0
        self._sequences: BySlot[ProcessedSequence] = BySlot()

    def update(self, plan: StepPlan) -> None:
        if self._is_first:
            self._sequences.follow(plan, _processed_sequence)

    def apply(self, logits: Tensor, plan: StepPlan) -> ProcessedRows | None:
        """Change the logits [sampled rows, vocab_size] in place; a failure leaves a row none."""
        if not self._sequences:
            return None
        slots = enumerate(sampled_rows(plan)[0].tolist())
        rows = {row: self._sequences[slot] for row, slot in slots if slot in self._sequences}
        processed = ProcessedRows(rows)
        for row, sequence in rows.items():
            try:
                logits[row] = sequence.process(logits[row])
            except ProcessorError as error:
                processed.failures[row] = str(error)
                logits[row] = torch.nan
        return processed


class ProcessorError(Exception):
    """One request's own."""


def import_processor(path: str) -> Processor:
    module, _, names = path.partition(":")
    processor = reduce(getattr, names.split("."), import_module(module))
    if not callable(processor):
        raise TypeError(f"{path} is not a function")
    return processor


def check_logits(new: Any, old: Tensor) -> Tensor:
    """Return what a processor returned, if it can take the place of what it was given."""
    if not isinstance(new, Tensor):
        raise TypeError(f"it must return the logits, a tensor, not {type(new).__name__}")
    if new.shape != old.shape or new.dtype != torch.float32:
        found, wanted = list(new.shape), list(old.shape)
        raise ValueError(f"it must return float32 logits {wanted}, not {new.dtype} {found}")
    return new


def _processed_sequence(row: NewRow) -> ProcessedSequence | None:
    processors = list(row.params.logits_processors)
    if not processors or row.params.max_tokens == 0:
        return None
    return ProcessedSequence(processors, row.token_ids[row.num_prompt_tokens :].tolist())


def _name(processor: object) -> str:
    name = getattr(processor, "__name__", processor)
    return name if isinstance(name, str) else _shown(name)


def _shown(value: object) -> str:
    """Its own repr is a caller's code too, and may fail."""
    try:
        return repr(value)
    except Exception:
        return type(value).__name__
