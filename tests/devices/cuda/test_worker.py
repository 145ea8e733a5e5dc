"""The worker on CUDA: decode steps are two replays, logits share memory, one stream for all."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from nanovllm import LLM, SamplingParams, assembly
from nanovllm.devices.cuda.steps import CudaSteps
from nanovllm.engine.step import StepPlan
from nanovllm.errors import ConfigError
from nanovllm.ops.interface import Sampling
from nanovllm.parallel.multiproc_executor import MultiprocExecutor
from nanovllm.worker import worker
from nanovllm.worker.forward import StepLogits, is_decode
from nanovllm.worker.input_batch import sampling_of
from nanovllm.worker.memory_needs import choose_num_blocks
from tests.bench.test_steps import CONFIG
from tests.devices import NEEDS_GPU, runner_of
from tests.devices.shared_gpu import own_mem_get_info, process_bytes
from tests.parallel.leftovers import is_alive
from tests.parallel.workers import process_ids
from tests.test_architecture import ROOT
from tests.test_equals_transformers import GREEDY, MAX_TOKENS, make_prompts
from tests.test_sampled_requests import mixed_params
from tests.threaded_ranks import engines_of

pytestmark = NEEDS_GPU

GIB = 1 << 30
VOCAB_SIZE = 151936
OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "num_kvcache_blocks": 9000,  # fixed, because other processes may hold memory of the device
    "device": "cuda",
    "skip_tokenizer_init": True,
}
# Records the MemoryNeeds from which an engine chooses its number of blocks.
recorded_needs = partial(mock.patch.object, worker, "choose_num_blocks", wraps=choose_num_blocks)
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.9},
    "min_p": {"temperature": 0.9, "min_p": 0.05},
    "full": {"temperature": 0.9, "top_k": 9, "top_p": 0.8},
}

# Runs many short prompts, then a few of many lengths; prints the kernels that it compiled itself.
START = """
import sys
from triton import knobs
from nanovllm import LLM, SamplingParams

misses = []
def listener(*, src, cache_hit, **_):
    if not cache_hit:
        misses.append(src.name)
knobs.compilation.listener = listener
# The cache size is fixed: memory held by other processes must not matter.
with LLM(sys.argv[1], device="cuda", num_kvcache_blocks=64, skip_tokenizer_init=True,
         max_num_seqs=20, max_model_len=128, dtype=sys.argv[2]) as llm:
    llm.generate([[1, 2, 3]] * 20, SamplingParams(max_tokens=5), use_tqdm=False)
    prompts = [[1] * length for length in range(1, 120, 9)]
    llm.generate(prompts, SamplingParams(max_tokens=5, top_p=0.9), use_tqdm=False)
print("compiled:", misses)
"""


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def capture_every_size(llm: LLM) -> None:
    """Capture the graphs that would otherwise be captured when a step first needs them."""
    runner = runner_of(llm)
    with torch.inference_mode(), runner.eager.input_batch.device.in_order():
        steps = runner.forward
        for bucket in steps.decode.all_buckets():
            steps.capture(bucket)
        for size in steps.prefill.sizes:
            steps.prefill.graph(size)


class NoEagerDecode:
    """Passes steps on to the graphs; decode steps fail unless they only replay graphs."""

    def __init__(self, graphed: CudaSteps) -> None:
        self.graphed = graphed
        self.eager, self.sampler = graphed.eager, graphed.sampler
        self.asked: set[Sampling] = set()
        self.num_rows: set[int] = set()

    def __call__(self, plan: StepPlan) -> StepLogits:
        graphed: Any = self.graphed
        if is_decode(plan):
            self.asked.add(self.eager.input_batch.sampling(plan))
            self.num_rows.add(len(plan.slots))
            graphed.sampler = SimpleNamespace(group=self.sampler.group)
            graphed.decode.eager = None
        else:
            graphed.decode.eager, graphed.sampler = self.eager, self.sampler
        logits: StepLogits = graphed(plan)
        assert (logits.graph is not None) == is_decode(plan)
        return logits


@pytest.mark.parametrize("kind", list(SAMPLED))
def test_a_decode_step_is_two_replays(tiny: Any, kind: str) -> None:
    """Decode steps replay two graphs, and give the same tokens as eager steps."""
    path, prompts = tiny("qwen3").path, make_prompts()
    params = [
        SamplingParams(**SAMPLED[kind], seed=i, max_tokens=2 + i % 19, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM(path, **OPTIONS, enforce_eager=True) as llm:
        want = generate(llm, prompts, params)
    with LLM(path, **OPTIONS) as llm:
        runner = runner_of(llm)
        capture_every_size(llm)
        runner.forward = replayed = NoEagerDecode(runner.forward)
        assert generate(llm, prompts, params) == want
    assert replayed.asked == {sampling_of(SamplingParams(**SAMPLED[kind]))}
    assert len(replayed.num_rows) > 3


def test_eager_and_graphed_steps_alternate(tiny: Any) -> None:
    """Small prefill chunks, every kind of sampling, and stop tokens masked between the replays."""
    path, prompts = tiny("qwen3").path, make_prompts()
    params = mixed_params(len(prompts))
    outputs = []
    for options in ({"enforce_eager": True}, {}, {"depth": 0}, {"max_num_batched_tokens": 11}):
        with LLM(path, **OPTIONS, **options) as llm:
            outputs.append(generate(llm, prompts, params))
    assert outputs[1:] == outputs[:1] * 3


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma2", "gemma3", "olmo2", "qwen3-moe"])
def test_nccl_runs_inside_graphs(tiny: Any, name: str) -> None:
    """A group of one rank, which is all one device allows, gives the same tokens as no group."""
    path, prompts = tiny(name).path, make_prompts()
    params = mixed_params(len(prompts))
    with LLM(path, **OPTIONS) as llm:
        want = generate(llm, prompts, params)
    with engines_of(1, "nccl"), LLM(path, **OPTIONS) as llm:
        assert isinstance(runner_of(llm).forward, CudaSteps)
        assert generate(llm, prompts, params) == want


def test_a_worker_process_gives_what_this_process_gives(tiny: Any) -> None:
    """One rank with its own process: as much of tensor parallelism as one GPU can test."""
    path, prompts = tiny("qwen3").path, make_prompts()
    params = mixed_params(len(prompts))
    with LLM(path, **OPTIONS) as llm:
        want = [generate(llm, prompts, params) for _ in range(2)]  # the second from the cache
        info = llm.engine.info
    create = partial(MultiprocExecutor, build_worker=assembly.build_worker)
    in_a_process = mock.patch.object(assembly, "create_executor", create)
    with in_a_process, LLM(path, **OPTIONS) as llm:
        assert llm.engine.info == info
        assert [generate(llm, prompts, params) for _ in range(2)] == want
        executor = llm.engine.core.executor
        assert isinstance(executor, MultiprocExecutor)
        (pid,) = process_ids(executor)
    assert not is_alive(pid)


def test_requests_wait_for_no_graph_and_no_kernel(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a latency target, all that ordinary requests need is captured at startup.

    Rarer graphs are captured one by one while the engine is idle.
    """
    path, prompts = tiny("qwen3").path, make_prompts()
    params = [*mixed_params(len(prompts) - 1), SamplingParams(logprobs=2, max_tokens=9)]
    many = [[1 + i % 3] * length for i, length in enumerate(range(1, 120, 3))]
    shared = [[*range(48), i] for i in range(40)]
    options = {**OPTIONS, "max_num_seqs": 40, "num_kvcache_blocks": 400}

    def answers(llm: LLM) -> list[list[list[int]]]:
        batches = ((prompts, params), (many, GREEDY), (shared, GREEDY))
        return [generate(llm, batch, asked) for batch, asked in batches]

    monkeypatch.setattr("nanovllm.devices.cuda.shared_prefixes.MIN_SAVED", 32 * 16)
    with LLM(path, **options) as llm:
        want = answers(llm)
    loaded: list[str] = []
    with LLM(path, **options, target_inter_token_ms=25.0) as llm:
        monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: loaded.append(src))
        graphed, executor = runner_of(llm).forward, llm.engine.core.executor
        pool = graphed.device.graph_pool
        capture = mock.Mock(side_effect=pool.capture)
        monkeypatch.setattr(pool, "capture", capture)
        assert answers(llm) == want
        assert capture.call_count == 0
        num_captured = 0
        while executor.capture_one():
            num_captured += 1
        num_shared = [way for way, _ in graphed.decode.graphs].count("shared")
        assert num_captured == capture.call_count == num_shared == 3
        assert answers(llm)[2] == want[2]
        assert capture.call_count == num_captured
    assert [src.name for src in loaded] == []


def test_short_prompts_are_graphs_too(tiny: Any) -> None:
    checkpoint, prompts = tiny("qwen3"), make_prompts()
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]

    def fail(plan: StepPlan) -> StepLogits:
        raise AssertionError(f"eager step of {plan.counts.sum()} tokens")

    with LLM(checkpoint.path, **OPTIONS) as llm:
        capture_every_size(llm)
        steps = runner_of(llm).forward
        steps.eager = mock.Mock(side_effect=fail, input_batch=steps.eager.input_batch)
        for batch in (prompts[:1], prompts):
            assert generate(llm, batch, GREEDY) == want[: len(batch)]


def test_more_rows_than_a_thousand(tiny: Any) -> None:
    checkpoint, prompts = tiny("qwen3"), make_prompts()[:5]
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]
    with LLM(checkpoint.path, **{**OPTIONS, "max_num_seqs": 1100}) as llm:
        assert generate(llm, prompts * 220, GREEDY) == want * 220


@pytest.fixture
def many_logits(tmp_path: Path) -> dict[str, Any]:
    """A small model with a large vocabulary and a large batch, so that logits dominate memory."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    config = {**CONFIG, **heads, "vocab_size": VOCAB_SIZE, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {**OPTIONS, "max_num_seqs": 512, "num_kvcache_blocks": 2048}
    return {**options, "model": tmp_path, "load_format": "dummy"}


def test_graphs_take_no_more_than_is_reserved_for_them(many_logits: dict[str, Any]) -> None:
    """Graphs share the logits of the largest size; separate ones would need ten times as much."""
    used = {}
    for enforce_eager in (False, True, False):  # the first compiles and loads the shared kernels
        with recorded_needs() as choose, LLM(**many_logits, enforce_eager=enforce_eager) as llm:
            if not enforce_eager:
                capture_every_size(llm)
            used[enforce_eager] = process_bytes()
            if not enforce_eager:
                assert logits_bytes(llm) > 1.4 * GIB
                reserved = choose.call_args.args[1].graphs
    taken = used[False] - used[True]
    print(f"graphs take {taken / GIB:.2f} GiB of {reserved / GIB:.2f}")
    assert taken <= reserved


def logits_bytes(llm: LLM) -> int:
    graphs = runner_of(llm).forward.decode.graphs
    return sum(graph.output.nbytes for (way, _), graph in graphs.items() if way == "layers")


def test_logits_of_every_size_are_tensors_of_the_graph(many_logits: dict[str, Any]) -> None:
    """Sampling uses the values that are written into the logits between the replays."""
    with LLM(**{**many_logits, "max_num_seqs": 24}) as llm:
        runner, seen = runner_of(llm), []
        graphed = runner.forward

        def forced(plan: StepPlan) -> StepLogits:
            step: StepLogits = graphed(plan)
            if is_decode(plan):
                seen.append(step.values.shape)
                step.values.fill_(-torch.inf)
                step.values[:, 77] = 1.0
            return step

        runner.forward = forced
        params = [SamplingParams(max_tokens=2 + i, ignore_eos=True) for i in range(24)]
        outputs = generate(llm, [[i + 1] for i in range(24)], params)
    assert {tokens for ids in outputs for tokens in ids[1:]} == {77}
    assert set(seen) == {(rows, VOCAB_SIZE) for rows in range(1, 25)}


def test_eager_engines_reserve_nothing_for_graphs(
    many_logits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", own_mem_get_info)
    options = {**many_logits, "num_kvcache_blocks": -1, "max_model_len": 2048}
    torch.cuda.empty_cache()
    free, total = own_mem_get_info()
    share = (total - free + 4 * GIB) / total  # less than the cache could use
    num_blocks, reserved = {}, {}
    for enforce_eager in (True, False, True):  # eager again, once both have compiled everything
        options |= {"enforce_eager": enforce_eager, "gpu_memory_utilization": share}
        with recorded_needs() as choose, LLM(**options) as llm:
            num_blocks[enforce_eager] = llm.engine.info.num_blocks
        reserved[enforce_eager] = choose.call_args.args[1].graphs
    block_bytes = 2 * 2 * 16 * 8 * 128 * 2  # keys and values: layers, tokens, heads, dim, bf16
    saved = (num_blocks[True] - num_blocks[False]) * block_bytes
    assert reserved[True] == 0
    assert reserved[False] >= 512 * VOCAB_SIZE * 2  # logits in bfloat16
    assert saved == pytest.approx(reserved[False], rel=0.15)


def test_blocks_that_cannot_fit_are_refused(many_logits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"cache [\d,.]+, .* are free; lower num_kvcache_blocks"):
        LLM(**{**many_logits, "num_kvcache_blocks": 1 << 26})


class Watched:
    """Records the stream that each step is queued on."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward
        self.streams: set[torch.cuda.Stream] = set()

    def __call__(self, plan: StepPlan) -> StepLogits:
        self.streams.add(torch.cuda.current_stream())
        logits: StepLogits = self.forward(plan)
        return logits


@pytest.fixture
def side_stream() -> Iterator[torch.cuda.Stream]:
    yield torch.cuda.Stream()
    torch.cuda.synchronize()


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_every_caller_queues_on_one_stream(
    tiny: Any, side_stream: torch.cuda.Stream, enforce_eager: bool
) -> None:
    """Callers in the main thread, in another thread, and under their own stream."""
    checkpoint, prompts = tiny("qwen3"), make_prompts()
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]
    with torch.cuda.stream(side_stream):  # must not matter for the engine's construction either
        llm = LLM(checkpoint.path, **OPTIONS, enforce_eager=enforce_eager)
    runner = runner_of(llm)
    runner.forward = watched = Watched(runner.forward)
    for prompt in prompts:
        llm.add_request(prompt, GREEDY)
    finished: dict[int, list[int]] = {}

    def step(context: Any) -> None:
        with context:
            finished.update((output.seq_id, output.token_ids) for output in llm.step().finished)

    contexts = [nullcontext(), torch.cuda.stream(side_stream)]
    for turn in range(10_000):
        if llm.is_finished():
            break
        if turn % 3 < 2:
            step(contexts[turn % 3])
        else:
            thread = threading.Thread(target=step, args=(contexts[turn % 2],))
            thread.start()
            thread.join()
    llm.close()
    assert [finished[i] for i in range(len(prompts))] == want
    assert watched.streams == {torch.cuda.default_stream()}


def test_a_dropped_engine_frees_its_memory(tiny: Any) -> None:
    """Memory is freed without close() and without the collector: there are no reference cycles."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    llm = LLM(tiny("qwen3").path, **{**OPTIONS, "num_kvcache_blocks": 1 << 15})
    assert torch.cuda.memory_allocated() > before + GIB // 2
    del llm
    assert torch.cuda.memory_allocated() < before + GIB // 8


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3", "bfloat16"), ("qwen3-moe", "bfloat16"), ("gemma3", "float32")],
)
def test_an_engine_finds_all_its_kernels_compiled(
    tiny: Any, name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parallel processes compile the first engine's kernels; the second finds them in the cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", START, str(tiny(name).path), dtype]
    for _ in range(2):
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "compiled: []"
    assert len(list(tmp_path.rglob("*.cubin"))) > 10
