"""An engine that answers rows, wherever it runs: what it needs to begin travels as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.config import EngineConfig
from nanovllm.jobs.answers import Answers
from nanovllm.jobs.rows import Row
from nanovllm.server.options import ServerOptions, sampling_in
from nanovllm.server.service import Service


@dataclass(frozen=True, slots=True)
class RowOptions:
    config: EngineConfig
    server: ServerOptions
    sampling_defaults: Mapping[str, Any] | None = None  # None: the model's own
    sampling_override: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None  # of answers to rows that do not say
    is_raw: bool = False  # whether the text of a "prompt" is continued without the chat template

    @property
    def num_at_once(self) -> int:
        """Rows to hand to one engine: as many wait as run."""
        return 2 * self.config.max_num_seqs * self.config.data_parallel_size


class RowEngine:
    """Raises RowError for a bad row; any other error of ours says that the engine is dead."""

    def __init__(self, options: RowOptions) -> None:
        self.llm = AsyncLLM(**asdict(options.config))
        defaults = options.sampling_defaults
        if defaults is None:
            defaults = sampling_in(self.llm.generation_config)
        defaults = {**defaults, **options.sampling_override}
        service = Service(self.llm, replace(options.server, sampling_defaults=defaults))
        seed, max_tokens = options.config.seed, options.max_tokens
        self._answers = Answers(service, seed, max_tokens, options.is_raw)

    async def __call__(self, row: Row) -> dict[str, Any]:
        return await self._answers(row)

    def close(self) -> None:
        self.llm.close()
