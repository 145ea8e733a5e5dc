"""A line of throughput in the log every ten seconds, while an engine is busy; worded as vLLM's."""

from __future__ import annotations

import logging
from time import monotonic

from nanovllm.server.model import Model
from nanovllm.serving.core_records import CoreStats

LOG_SECONDS = 10.0

logger = logging.getLogger(__name__)


class ThroughputLog:
    def __init__(self, llm: Model) -> None:
        self._llm = llm
        self._last: dict[int, CoreStats] = {}  # by the number of the engine
        self._last_time = monotonic()

    def tick(self) -> None:
        """Log a line for each busy engine if it is time; call this often."""
        seconds = monotonic() - self._last_time
        if seconds < LOG_SECONDS:
            return
        self._last_time += seconds
        for replica in self._llm.replicas:
            stats, before = replica.stats, self._last.get(replica.number, CoreStats())
            self._last[replica.number] = stats
            num_prompt = stats.num_prefill_tokens - before.num_prefill_tokens
            num_generated = stats.num_decode_tokens - before.num_decode_tokens
            if num_prompt < 0:  # another process took its place
                num_prompt, num_generated = stats.num_prefill_tokens, stats.num_decode_tokens
            if num_prompt or num_generated or stats.num_running or stats.num_waiting:
                logger.info(
                    "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: "
                    "%.1f tokens/s, Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, "
                    "Prefix cache hit rate: %.1f%%",
                    replica.number,
                    num_prompt / seconds,
                    num_generated / seconds,
                    stats.num_running,
                    stats.num_waiting,
                    100 * (stats.num_blocks - stats.num_free_blocks) / max(stats.num_blocks, 1),
                    100 * stats.num_cache_hits / max(stats.num_cache_queries, 1),
                )
