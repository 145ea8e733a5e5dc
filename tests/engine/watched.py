"""Requests whose sequences a test can inspect while a core runs them, and afterwards."""

from __future__ import annotations

from array import array
from typing import Any

from nanovllm.engine.core import EngineCore
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class Watched:
    """A request with all attributes of its sequence, once it has been added to a core."""

    def __init__(
        self, seq_id: int, prompt: list[int], params: SamplingParams, **options: Any
    ) -> None:
        self.seq_id = seq_id
        self.request = Request(seq_id, array("i", prompt), params, **options)
        self.sequence: Sequence | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sequence, name)


def add(core: EngineCore, watched: Watched) -> None:
    core.add(watched.request)
    watched.sequence = core._sequences[watched.seq_id]
