"""What Prometheus reads, under vLLM's names: the engine's counts, and histograms of requests."""

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
from nanovllm.serve.model import Model, OneEngine

LABELS = ("model_name",)
ENGINE_LABELS = (*LABELS, "engine")  # the number of a replica
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
    "time_to_first_token_seconds": ("From a request's arrival to its first token", SECONDS),
    "inter_token_latency_seconds": ("Between the tokens of an answer", SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token", SECONDS),
    "request_queue_time_seconds": ("From a request's arrival to its first step", SECONDS),
    "request_prefill_time_seconds": ("From a request's first step to its first token", SECONDS),
    "request_decode_time_seconds": ("From a request's first token to its last", SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt", TOKENS),
    "request_generation_tokens": ("Tokens of an answer", TOKENS),
}
ENGINE_METRICS = {
    "num_requests_running": (GaugeMetricFamily, "Sequences that run"),
    "num_requests_waiting": (GaugeMetricFamily, "Sequences that wait"),
    "kv_cache_usage_perc": (GaugeMetricFamily, "Shard of the KV cache in use, from 0 to 1"),
    "engine_up": (GaugeMetricFamily, "1 while the engine answers, else 0"),
    "prefix_cache_queries": (CounterMetricFamily, "Prompt tokens looked up"),
    "prefix_cache_hits": (CounterMetricFamily, "Prompt tokens found in the cache"),
    "num_preemptions": (CounterMetricFamily, "Sequences that made way for others"),
    "engine_restarts": (CounterMetricFamily, "Engines started in place of others"),
}
# fmt: on


class Metrics:
    """Observes requests; what the engine counts itself is read when Prometheus asks."""

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
        text = "Requests that ended, by the reason"
        self._ended = Counter(prefix + "request_success", text, labels, registry=self._registry)
        for reason in get_args(FinishReason):  # a rate needs a value from before the first one
            self._ended.labels(model_name, reason)
        self._tokens = {
            name: Counter(prefix + name, text, LABELS, registry=self._registry).labels(model_name)
            for name, text in (
                ("prompt_tokens", "Tokens of all prompts"),
                ("generation_tokens", "Tokens of all answers"),
            )
        }
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def embedded(self, num_prompt_tokens: int, num_prompts: int) -> None:
        """Count prompts that nothing was generated for."""
        self._tokens["prompt_tokens"].inc(num_prompt_tokens)
        self.ended("stop", num_prompts)

    def ended(self, reason: str, num_sequences: int) -> None:
        self._ended.labels(self._model_name, reason).inc(num_sequences)

    @contextlib.contextmanager
    def failures(self, num_sequences: int) -> Iterator[None]:
        """Count sequences that are aborted or lost in here."""
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
        """Hand on the pieces of a request, and note when they came and how they ended."""
        last: dict[int, float] = {}  # when tokens came, by sample
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
        """Yield the metrics of the engines; prometheus-client calls this for `text`."""
        values = {replica.number: _values(replica) for replica in self._llm.replicas}
        for name, (family, text) in ENGINE_METRICS.items():
            metric = family(self._prefix + name, text, labels=ENGINE_LABELS)
            for number, each in values.items():
                metric.add_metric([self._model_name, str(number)], each[name])
            yield metric
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        config = asdict(self._llm.config)
        names = ("enable_prefix_caching", "gpu_memory_utilization", "kv_cache_dtype")
        labels = (*ENGINE_LABELS, "block_size", "num_gpu_blocks", *names)
        text = "How the KV cache is set up"
        metric = GaugeMetricFamily(self._prefix + "cache_config_info", text, labels=labels)
        for replica in self._llm.replicas:
            sizes = config["kvcache_block_size"], replica.stats.num_blocks
            values = (replica.number, *sizes, *(config[name] for name in names))
            metric.add_metric([self._model_name, *map(str, values)], 1)
        return metric


def _values(replica: OneEngine) -> dict[str, float]:
    stats = replica.stats
    num_used = stats.num_blocks - stats.num_free_blocks
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": num_used / max(stats.num_blocks, 1),
        "engine_up": replica.error is None,
        "prefix_cache_queries": stats.num_cache_queries,
        "prefix_cache_hits": stats.num_cache_hits,
        "num_preemptions": stats.num_preemptions,
        "engine_restarts": replica.num_restarts,
    }
