"""Prometheus metrics, under vLLM's names where it has them: of the engine and of requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanovllm.engine.request import FinishReason
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput, StreamPiece
from nanovllm.serve.model_interface import Model, ReplicaInfo

LABELS = ("model_name",)
ENGINE_LABELS = (*LABELS, "engine")  # "engine" is the replica number
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# fmt: off
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from arrival to the first token", SECONDS),
    "inter_token_latency_seconds": ("Time between output tokens", SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to the last token", SECONDS),
    "request_queue_time_seconds": ("Time from arrival to the first step", SECONDS),
    "request_prefill_time_seconds": ("Time from the first step to the first token", SECONDS),
    "request_decode_time_seconds": ("Time from the first token to the last", SECONDS),
    "request_prompt_tokens": ("Number of prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Number of output tokens of a request", TOKENS),
}
ENGINE_METRICS = {
    "num_requests_running": (GaugeMetricFamily, "Number of running sequences"),
    "num_requests_waiting": (GaugeMetricFamily, "Number of waiting sequences"),
    "kv_cache_usage_perc": (GaugeMetricFamily, "Fraction of KV-cache blocks in use, from 0 to 1"),
    "kv_cache_free_blocks": (GaugeMetricFamily, "Number of free KV-cache blocks, cached or not"),
    "engine_up": (GaugeMetricFamily, "1 while the engine is healthy, else 0"),
    "prefix_cache_queries": (CounterMetricFamily, "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": (CounterMetricFamily, "Prompt tokens found in the prefix cache"),
    "num_preemptions": (CounterMetricFamily, "Number of preemptions"),
    "engine_restarts": (CounterMetricFamily, "Number of engine restarts"),
    "spec_decode_num_drafts": (CounterMetricFamily, "Number of rows with draft tokens"),
    "spec_decode_num_draft_tokens": (CounterMetricFamily, "Number of draft tokens"),
    "spec_decode_num_accepted_tokens": (CounterMetricFamily, "Number of accepted draft tokens"),
}
# fmt: on


class Metrics:
    """Observes requests, and reads the engines' own counters at every scrape."""

    def __init__(self, llm: Model, prefix: str, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._llm, self._prefix, self._model_name = llm, prefix, model_name
        self._histograms = {
            name: Histogram(
                prefix + name, text, LABELS, buckets=buckets, registry=self._registry
            ).labels(model_name)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        labels = (*LABELS, "finished_reason")
        text = "Number of finished sequences by finish reason"
        self._ended = Counter(prefix + "request_success", text, labels, registry=self._registry)
        for reason in get_args(FinishReason):  # PromQL's rate() needs an initial sample of zero
            self._ended.labels(model_name, reason)
        self._tokens = {
            name: Counter(prefix + name, text, LABELS, registry=self._registry).labels(model_name)
            for name, text in (
                ("prompt_tokens", "Total number of prompt tokens"),
                ("generation_tokens", "Total number of output tokens"),
            )
        }
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def embedded(self, num_prompt_tokens: int, num_prompts: int) -> None:
        """Count the prompts of an embedding request."""
        self._tokens["prompt_tokens"].inc(num_prompt_tokens)
        self.ended("stop", num_prompts)

    def ended(self, reason: str, num_sequences: int) -> None:
        self._ended.labels(self._model_name, reason).inc(num_sequences)

    @contextlib.contextmanager
    def failures(self, num_sequences: int) -> Iterator[None]:
        """Count sequences that are aborted or fail inside the `with` block."""
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError):
            self.ended("abort", num_sequences)
            raise
        except EngineError:
            self.ended("error", num_sequences)
            raise

    async def observed(
        self, pieces: AsyncGenerator[StreamPiece, None], num_samples: int = 1
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield the pieces of a request unchanged, and observe their times and finish reason."""
        last: dict[int, float] = {}  # time of the latest tokens, keyed by sample
        num_counted = 0
        async with contextlib.aclosing(pieces):
            with contextlib.ExitStack() as until_over:
                until_over.enter_context(self.failures(num_samples))
                async for piece in pieces:
                    self._time(piece, last)
                    num_counted += len(piece.token_ids)
                    if piece.output is not None:
                        until_over.close()
                        self._end(piece.output, num_counted)
                    yield piece

    def _time(self, piece: StreamPiece, last: dict[int, float]) -> None:
        now, num_tokens = time.perf_counter(), len(piece.token_ids)
        if piece.sample in last and num_tokens:
            gap = (now - last[piece.sample]) / num_tokens
            for _ in range(num_tokens):
                self._histograms["inter_token_latency_seconds"].observe(gap)
        last[piece.sample] = now
        self._tokens["generation_tokens"].inc(num_tokens)

    def _end(self, output: RequestOutput, num_counted: int) -> None:
        num_prompt = len(output.prompt_token_ids)
        num_generated = sum(len(each.token_ids) for each in output.outputs)
        first = output.time_to_first_token
        seconds = {
            "e2e_request_latency_seconds": output.duration,
            "request_queue_time_seconds": output.queue_time,
        }
        if first:
            seconds |= {
                "time_to_first_token_seconds": first,
                "request_prefill_time_seconds": first - output.queue_time,
                "request_decode_time_seconds": output.duration - first,
            }
        numbers = {"request_prompt_tokens": num_prompt, "request_generation_tokens": num_generated}
        for name, value in (seconds | numbers).items():
            self._histograms[name].observe(value)
        self._tokens["prompt_tokens"].inc(num_prompt)
        self._tokens["generation_tokens"].inc(max(num_generated - num_counted, 0))
        for each in output.outputs:
            self.ended(each.finish_reason, 1)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engines; called by prometheus-client from `text`."""
        values = {replica.number: _values(replica) for replica in self._llm.replicas}
        for name, (family, text) in ENGINE_METRICS.items():
            metric = family(self._prefix + name, text, labels=ENGINE_LABELS)
            for number, each in values.items():
                metric.add_metric([self._model_name, str(number)], each[name])
            yield metric
        yield self._held_blocks()
        yield self._cache_config()

    def _held_blocks(self) -> Metric:
        text = "Number of KV-cache blocks that sequences hold, by group of layers"
        labels = (*ENGINE_LABELS, "group")
        metric = GaugeMetricFamily(self._prefix + "kv_cache_held_blocks", text, labels=labels)
        for replica in self._llm.replicas:
            for group, count in enumerate(replica.stats.num_held_blocks):
                metric.add_metric([self._model_name, str(replica.number), str(group)], count)
        return metric

    def _cache_config(self) -> Metric:
        config = asdict(self._llm.config)
        names = ("enable_prefix_caching", "gpu_memory_utilization", "kv_cache_dtype")
        labels = (*ENGINE_LABELS, "block_size", "num_gpu_blocks", *names)
        text = "Configuration of the KV cache"
        metric = GaugeMetricFamily(self._prefix + "cache_config_info", text, labels=labels)
        for replica in self._llm.replicas:
            # A block of tokens takes a block in each group of layers.
            num_blocks = replica.stats.num_blocks // len(replica.stats.num_held_blocks)
            sizes = config["kvcache_block_size"], num_blocks
            values = (replica.number, *sizes, *(config[name] for name in names))
            metric.add_metric([self._model_name, *map(str, values)], 1)
        return metric


def _values(replica: ReplicaInfo) -> dict[str, float]:
    stats = replica.stats
    num_used = stats.num_blocks - stats.num_free_blocks
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": num_used / max(stats.num_blocks, 1),
        "kv_cache_free_blocks": stats.num_free_blocks,
        "engine_up": replica.error is None,
        "prefix_cache_queries": stats.num_cache_queries,
        "prefix_cache_hits": stats.num_cache_hits,
        "num_preemptions": stats.num_preemptions,
        "engine_restarts": replica.num_restarts,
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
    }
