"""A model's memory needs are computed before allocation; a model that does not fit is rejected."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.models import model_path
from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.devices import ranks
from nanovllm.errors import ConfigError
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import build_model, read_config
from nanovllm.ops.torch_delta_net import split_chunks
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker import host_memory as cpu
from nanovllm.worker import load_model
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.memory_needs import (
    MemoryNeeds,
    check_memory,
    choose_num_blocks,
    estimate_memory,
)
from nanovllm.worker.profile_run import largest_counts
from tests.checkpoints import TinyCheckpoint
from tests.devices import cpu_device
from tests.models.test_configs import CONFIGS, saved
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")
GIB = 1 << 30
Tiny = Callable[[str], TinyCheckpoint]


def build(group: TPGroup, dtype: torch.dtype = torch.float32) -> BuildContext:
    return BuildContext(torch.device("cpu"), dtype, None, None, group)  # type: ignore[arg-type]


@pytest.fixture
def small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup with a limit of 8 GiB, 2 of them in use, on a machine with 64 GiB."""
    files = tmp_path / "memory.max", tmp_path / "memory.current"
    for file, size in zip(files, (8, 2), strict=True):
        file.write_text(str(size * GIB))
    monkeypatch.setattr(cpu, "_cgroup_files", lambda: [files])
    monkeypatch.setattr(cpu, "_meminfo", lambda name: 64 * GIB)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_weights_are_counted_exactly(name: str) -> None:
    model, config = read_config(saved(name)), EngineConfig("m", max_model_len=64)
    for group in (TPGroup(0, 1), TPGroup(0, 2)):
        if model.num_kv_heads % group.size == 0:
            held = build_model(model, 64, build(group)).parameters()
            needs = estimate_memory(config, model, build(group))
            assert needs.weights == sum(parameter.nbytes for parameter in held)


@pytest.mark.parametrize(("num_slots", "max_len"), [(512, 64), (8, 500)])
def test_tables_are_counted(num_slots: int, max_len: int) -> None:
    config = EngineConfig("m", max_num_seqs=num_slots, max_model_len=max_len)
    model = read_config(saved("llama"))
    tables = InputBatch(cpu_device(), num_slots, max_len, config.kvcache_block_size)
    ropes = build_model(model, max_len, build(TPGroup())).model.ropes
    held = tables.words.nbytes + ropes[0].nbytes
    assert held <= estimate_memory(config, model, build(TPGroup())).tables + 4 * max_len <= 2 * held


def test_blocks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_meminfo", lambda name: 0)
    model, context = read_config(saved("llama")), build(TPGroup())
    block_bytes = 2 * 2 * (1 << 20) * 2 * 24 * 4  # k and v: layers, tokens, heads, dim, float32
    for num_blocks, size in ((-1, "0.75"), (1, "0.75"), (1000, "750.00")):
        config = EngineConfig("m", num_kvcache_blocks=num_blocks, kvcache_block_size=1 << 20)
        assert estimate_memory(config, model, context).block == block_bytes
        with pytest.raises(ConfigError, match=rf"cache {size}, .* lower num_kvcache_blocks"):
            check_memory(config, model, cpu_device(), context)


@pytest.mark.usefixtures("small_machine")
def test_the_number_of_blocks_follows_from_the_needs() -> None:
    """On a CPU, the KV cache gets a quarter of the free memory: 1.5 GiB."""
    model = MemoryNeeds(weights=GIB, tables=1, states=1, block=GIB >> 3, step=GIB, graphs=GIB)
    needs = model.including(MemoryNeeds(GIB, 1, 1, block=GIB >> 4, step=GIB, graphs=1))
    assert needs == replace(model, block=3 * GIB >> 4, graphs=GIB + 1)
    device = cpu_device()
    for options, num_blocks in (
        ({}, 8),
        ({"max_num_seqs": 1, "max_model_len": 64, "kvcache_block_size": 16}, 4),
        ({"num_kvcache_blocks": 1000}, 1000),
    ):
        assert choose_num_blocks(EngineConfig("m", **options), needs, device) == num_blocks
    config, large = EngineConfig("m", kvcache_block_size=64), replace(needs, block=2 * GIB)
    with pytest.raises(ConfigError, match=r"one block of 64 tokens takes 2,147,483,648 bytes"):
        choose_num_blocks(config, large, device)
    # Eight blocks fit, but a block of tokens takes one in each of nine groups.
    grouped = replace(needs, windows=(None, *[64] * 8))
    with pytest.raises(ConfigError, match=r"one block of 64 tokens takes 1,811,939,328 bytes"):
        choose_num_blocks(config, grouped, device)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_num_seqs": 10**8}, "lower max_num_seqs or max_model_len"),
        ({"num_kvcache_blocks": 10**9}, "lower num_kvcache_blocks"),
        ({"kvcache_block_size": 2**31 - 16}, "or kvcache_block_size"),
        ({"max_num_batched_tokens": 10**9, "max_num_seqs": 10**6}, "lower max_num_batched_tok"),
        ({"max_model_len": 10**9, "max_num_seqs": 10**7}, "lower max_num_seqs or max_model_len"),
        ({"max_num_seqs": 10**40}, r"max_num_seqs must be below 2\*\*31"),
        ({"num_kvcache_blocks": 10**40}, r"num_kvcache_blocks must be below 2\*\*31"),
        ({"max_num_batched_tokens": 10**400}, r"max_num_batched_tokens must be below 2\*\*31"),
    ],
)
def test_absurd_options_are_refused_at_once(
    tiny: Tiny, options: dict[str, Any], match: str
) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError, match=match):
        LLM(tiny("llama").path, skip_tokenizer_init=True, device="cpu", **options)
    assert time.process_time() - start < 1


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(
    ("dtype", "num_ranks", "match"),
    [
        ("bfloat16", 1, r"weights 14\.96, .* 6\.00 GiB of 8\.00 are free; use a smaller model"),
        ("float32", 1, r"weights 29\.92, .* 6\.00 GiB of 8\.00 are free; .* a 16-bit dtype"),
        ("bfloat16", 2, r"weights 7\.48, .* 3\.00 GiB of 4\.00 are free for each of 2 ranks"),
    ],
)
def test_a_model_of_eight_billion_on_a_small_machine(
    dtype: str, num_ranks: int, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_model, "build_model", None)  # nothing is built
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=match):
        LLM(model_path("llama-3.1-8b"), dtype=dtype, tensor_parallel_size=num_ranks, **options)


def test_every_rank_looks_at_its_own_memory(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory may have changed since the engine's check, and differs between devices."""
    monkeypatch.setattr(load_model, "check_memory", refuse)
    with engines_of(2), pytest.raises(ConfigError, match=r"rank . of 2"):
        LLM(tiny("llama").path, skip_tokenizer_init=True, device="cpu", dtype="float32")


def test_workers_of_a_cluster_need_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "find_spec", lambda name: object())  # Ray need not be installed
    config = EngineConfig("any", tensor_parallel_size=2, device="cpu")
    assert ranks.check_devices(config) is not None
    assert ranks.check_devices(replace(config, distributed_executor_backend="ray")) is None


def refuse(config: Any, model: Any, device: Any, build: BuildContext, *_: Any) -> None:
    raise ConfigError(f"no room for rank {build.group.rank} of {build.group.size}")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("of 9 GiB"),
        MemoryError("of 9 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: of 9 GiB"),
    ],
)
def test_memory_that_runs_out_all_the_same_is_explained(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(load_model, "load_weights", load)
    with pytest.raises(ConfigError, match=r"not enough memory for .*lower max_num_.*of 9 GiB"):
        LLM(tiny("llama").path, skip_tokenizer_init=True, device="cpu", dtype="float32")


def test_other_errors_stay_what_they_are(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(load_model, "load_weights", load)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        LLM(tiny("llama").path, skip_tokenizer_init=True, device="cpu", dtype="float32")


def test_a_model_larger_than_any_memory_is_refused(tmp_path: Path) -> None:
    """Each size is within its range, but their product is not."""
    largest = {"vocab_size": 1 << 24, "hidden_size": 1 << 20, "intermediate_size": 1 << 22}
    config = {**saved("mixtral"), **largest, "num_hidden_layers": 256, "num_local_experts": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = time.process_time()
    with pytest.raises(ConfigError, match=r"needs .* GiB of memory .*use a smaller model"):
        LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, device="cpu")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "num_chunks"),
    [(16384, 512, 248 + 512), (16384, 1, 256), (2048, 16, 31 + 16), (512, 512, 449), (2, 8, 1)],
)
def test_the_profiled_step_has_the_most_chunks(
    num_tokens: int, num_slots: int, num_chunks: int
) -> None:
    config = EngineConfig("unused", max_num_batched_tokens=num_tokens, max_model_len=40_000)
    counts = largest_counts(config, num_slots, True)
    assert counts.sum() == num_tokens
    assert len(counts) <= num_slots
    assert len(split_chunks(np.arange(len(counts)), counts)) == num_chunks
    assert largest_counts(config, num_slots, False).sum() >= num_tokens
