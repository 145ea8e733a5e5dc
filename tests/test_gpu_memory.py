"""Memory: steps do not leak, `close` frees it, and `gpu_memory_utilization` is respected."""

from __future__ import annotations

import gc
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.devices.cuda.energy import energy_counter
from nanovllm.errors import ConfigError
from tests.bench.test_steps import CONFIG
from tests.checkpoints import VOCAB_SIZE
from tests.devices import NEEDS_GPU
from tests.test_equals_transformers import GREEDY, make_prompts
from tests.test_sampled_requests import KINDS

MIB = 1 << 20
GIB = 1 << 30
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "kvcache_block_size": 16}
# Keys and values take 32 KiB per token, so the KV cache could use far more memory than it gets.
LARGE_CACHE = {
    **CONFIG,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Usage:
    allocated: int  # device bytes that torch uses
    reserved: int  # device bytes that torch uses or caches
    pinned: int
    resident: int


def usage() -> Usage:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    if not torch.cuda.is_available():
        return Usage(0, 0, 0, resident)
    torch.cuda.synchronize()
    host = torch.cuda.memory.host_memory_stats()
    pinned = max(host.get(f"{name}_bytes.current", 0) for name in ("allocated", "reserved"))
    return Usage(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pinned, resident)


class Churn:
    """Requests of every kind that arrive, finish and are aborted; some prompts share a prefix."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.live: list[int] = []
        self.rng = random.Random(0)
        self.prefixes = [self.rng.choices(range(VOCAB_SIZE), k=48) for _ in range(3)]
        self.num_finished = self.num_cached = 0

    def run(self, num_steps: int) -> Usage:
        """Run steps; return the memory in use after every request has finished."""
        for _ in range(num_steps):
            while len(self.live) < 12 and self.rng.random() < 0.6:
                self.live.append(self.llm.add_request(*self._request()))
            if self.live and self.rng.random() < 0.04:
                self.llm.abort(self.live.pop(self.rng.randrange(len(self.live))))
            self._step()
        while not self.llm.is_finished():
            self._step()
        scheduler = self.llm.engine.core.scheduler
        scheduler.check()
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
        assert not self.live
        assert not self.llm.engine.client.owners
        return usage()

    def _request(self) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        prefix = rng.choice([[], [], *self.prefixes])
        prompt = prefix + rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40))
        params = SamplingParams(**rng.choice(KINDS), max_tokens=rng.randint(6, 30))
        return prompt, params

    def _step(self) -> None:
        for output in self.llm.step().finished:
            self.live.remove(output.seq_id)
            self.num_finished += 1
            self.num_cached += output.num_cached_tokens


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=NEEDS_GPU)],
)
def test_two_thousand_steps_leave_nothing_behind(tiny: Any, device: str) -> None:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kvcache_blocks": 20}
    path = tiny("qwen3").path
    with LLM(path, device=device, max_model_len=128, **options, **OPTIONS) as llm:
        churn = Churn(llm)
        first, middle, last = (churn.run(num_steps) for num_steps in (200, 900, 900))
        assert llm.engine.core.scheduler.num_preemptions > 10
    assert churn.num_finished > 400
    assert churn.num_cached > 1000
    assert last.allocated <= first.allocated
    assert last.reserved <= first.reserved + 4 * MIB  # two segments: fragmentation varies
    assert last.pinned <= first.pinned + MIB
    assert last.resident <= middle.resident + 12 * MIB  # caches of libraries take longer to fill


@pytest.fixture(params=[pytest.param(None, marks=NEEDS_GPU, id="cuda")])
def device_bytes() -> int:
    """Free torch's cached memory; return the size of the device's memory."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[1]


def used_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_close_gives_the_memory_back(tiny: Any, device_bytes: int) -> None:
    """Engines can follow one another; cuBLAS keeps a workspace of 32 MiB for each stream."""
    before = usage()
    rounds = []
    for _ in range(3):
        options = {"max_num_seqs": 8, "max_model_len": 128, "num_kvcache_blocks": 1 << 15}
        llm = LLM(tiny("qwen3").path, device="cuda", **options, **OPTIONS)
        llm.generate(make_prompts(), GREEDY, use_tqdm=False)
        assert usage().allocated > before.allocated + 500 * MIB
        llm.close()
        rounds.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    for allocated, reserved in rounds:
        assert allocated <= before.allocated + 150 * MIB
        assert reserved <= before.reserved + 200 * MIB
    assert rounds[2][0] <= rounds[1][0] + 40 * MIB


@pytest.fixture
def large_cache(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(LARGE_CACHE))
    return {
        "model": tmp_path,
        "device": "cuda",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "kvcache_block_size": 32,
        "max_num_seqs": 64,
        "max_model_len": 32768,
    }


def test_the_share_of_the_memory_is_kept_to(large_cache: dict[str, Any], device_bytes: int) -> None:
    """Under full load, with and without memory that does not belong to the engine."""
    share = used_bytes() / device_bytes + 0.1
    pools = []
    for num_other_bytes in (0, 2 * GIB):
        other = torch.empty(num_other_bytes, dtype=torch.uint8, device="cuda")
        with LLM(**large_cache, gpu_memory_utilization=share) as llm:
            pools.append(llm.engine.info.num_blocks)
            prompts = [[i] * 255 for i in range(64)]
            params = SamplingParams(max_tokens=4, ignore_eos=True, top_p=0.9)
            llm.generate(prompts, params, use_tqdm=False)
            used_share = used_bytes() / device_bytes
        assert used_share <= share + 0.003
        assert used_share >= share - 0.02 - GIB / device_bytes  # part of the reserve may be unused
        del other, llm
        torch.cuda.empty_cache()
    block_bytes = 32 * 32 * 1024
    assert (pools[0] - pools[1]) * block_bytes == pytest.approx(2 * GIB, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 0.001}, "no GPU memory is left.*raise gpu_memory_utilization"),
        ({"num_kvcache_blocks": 1 << 22}, r"cache 4,09\d\.\d\d, .*lower num_kvcache_blocks"),
    ],
    ids=["share", "blocks"],
)
def test_a_cache_that_does_not_fit_is_explained(
    large_cache: dict[str, Any], device_bytes: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**large_cache, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_energy() -> None:
    """A GPU uses between 50 and 1,500 W while it multiplies."""
    joules = energy_counter(1)
    if joules is None:
        pytest.skip("NVML does not count the energy of this GPU")
    x = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    before, start = joules(), time.perf_counter()
    while time.perf_counter() - start < 1:
        x @ x
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert 50 < (joules() - before) / seconds < 1500
