"""The whole CUDA path on a CPU: an engine with interpreted kernels, whose graphs are functions.

    TRITON_INTERPRET=1 python -m tests.devices.cuda.interpreted_engine

Tokens in float32 equal those of transformers, and logits in float16 are close: through decode
graphs, padded prompts, every kind of sampling and every number of rows.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig, Qwen3Config

from benchmarks.replayed_drafts import Replay, set_drafter
from nanovllm import LLM, SamplingParams
from nanovllm.devices import choose
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cuda import decode_graphs, device, shared_prefixes, steps
from nanovllm.devices.cuda.device import CudaDevice
from nanovllm.devices.cuda.kernels import linear_one_row
from nanovllm.devices.cuda.kernels.linear_one_row import OneRowConfig, one_row_config
from nanovllm.devices.cuda.ops import TritonOps
from nanovllm.devices.cuda.persistent.packed_weights import (
    step_constants,
    step_layers,
    step_tensors,
)
from nanovllm.devices.cuda.steps import CudaSteps
from nanovllm.devices.cuda.triton_attention import TritonAttention
from nanovllm.engine.step import Pending
from nanovllm.features.grammar.guidance import GuidanceGrammar
from nanovllm.models.decoder import DecoderModel
from nanovllm.ops.interface import LayerCache, Ops, Sampling
from nanovllm.worker.forward import EagerForward, Sampled
from tests.checkpoints import DELTA_NET, SIZES, make_checkpoint
from tests.devices import FunctionPool, RunAgain, runner_of
from tests.devices.cuda.persistent.reference import reference_step
from tests.forced_tokens import Ids, forced_logits
from tests.models.transformers_families import make_config
from tests.test_fp8_kv_cache import answer
from tests.test_speculation import NGRAM, EagerDrafter
from tests.threaded_ranks import engines_of

OPTIONS = {"max_model_len": 64, "kvcache_block_size": 16, "skip_tokenizer_init": True}
NUM_PROCESSORS = 8
SPLIT = Qwen3Config(  # the last projection of a layer has enough inputs for split-K
    **{**SIZES, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1}, head_dim=32
)
ONE_LAYER = Qwen3Config(**{**SIZES, "num_hidden_layers": 1}, head_dim=32, tie_word_embeddings=False)
HYBRID = Qwen3_5TextConfig(**SIZES, **DELTA_NET, full_attention_interval=2)
# Several ways to ask for the most likely token, so that every kind of sampler has one result.
GREEDY_WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1e-4},
    {"temperature": 0.5, "min_p": 1.0},
    {"temperature": 0.5, "top_k": 1},
]


class InterpretedDevice(RunAgain, CpuDevice):
    """A CPU device that runs the CUDA kernels, with the parts of CudaDevice that graphs need."""

    persistent = None
    sampler, prepare, runner = CudaDevice.sampler, CudaDevice.prepare, CudaDevice.runner
    steps, prefill_sizes = CudaDevice.steps, CudaDevice.prefill_sizes
    warm_up, compile_ahead = CudaDevice.warm_up, CudaDevice.compile_ahead
    uses_graphs = CudaDevice.uses_graphs
    token_logprobs = staticmethod(CudaDevice.token_logprobs)
    apply_token_bitmask = staticmethod(CudaDevice.apply_token_bitmask)
    _max_tokens, _count_graph_bytes = CudaDevice._max_tokens, CudaDevice._count_graph_bytes

    def ops(self, dtype: torch.dtype) -> Ops:
        return TritonOps()

    def attention(self, dtype: torch.dtype, ops: Ops) -> TritonAttention:
        device: Any = self
        return TritonAttention(device, NUM_PROCESSORS)

    def profile(self, largest_step: Callable[[], EagerForward]) -> int:
        largest_step()
        return 0  # not measured

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array, order="C"))

    def fetch(self, *tensors: Tensor) -> Pending[list[np.ndarray]]:
        return super().fetch(*(t.clone() for t in tensors))  # the next replay overwrites them


@contextmanager
def interpreted() -> Iterator[None]:
    """Make engines run the CUDA kernels in the interpreter."""
    with mock.patch.object(choose, "create_device", InterpretedDevice):
        yield


def wide_tiles(*args: Any) -> OneRowConfig:
    """Give each CTA eight times as many outputs: the interpreter runs CTAs one by one."""
    config = one_row_config(*args)
    return replace(config, block_out=8 * config.block_out)


def check_tokens(root: Path) -> None:
    """Prompts are admitted while others decode; a graph of every size runs, full and padded.

    Batches of two rows have a graph for short contexts and one for longer contexts.
    """
    checkpoint = make_checkpoint(root / "qwen3", ONE_LAYER)
    rng = random.Random(0)
    prompts = [rng.choices(range(160), k=length) for length in (1, 17, 33, 3, 16)]
    lens = [2, 4, 3, 2, 3]
    want = [checkpoint.generate(p, n) for p, n in zip(prompts, lens, strict=True)]
    with (
        mock.patch.object(decode_graphs, "SHORT_SIZES", (2,)),
        mock.patch.object(decode_graphs, "SHORT_CONTEXT", 18),
        LLM(checkpoint.path, max_num_seqs=3, max_num_batched_tokens=20, depth=1, **OPTIONS) as llm,
    ):
        graphed = runner_of(llm).forward.decode
        assert graphed.sizes == [1, 2, 3]
        for way, num_prompts in zip(GREEDY_WAYS, (5, 2, 2, 2), strict=True):
            params = [SamplingParams(max_tokens=n, ignore_eos=True, **way) for n in lens]
            outputs = llm.generate(prompts[:num_prompts], params[:num_prompts], use_tqdm=False)
            assert [output.token_ids for output in outputs] == want[:num_prompts], way
        assert {("layers", (2, 18)), ("layers", (2, 64))} <= set(graphed.graphs)


def check_shared_prefixes(root: Path) -> None:
    """Two rows that begin with the same block read it once; a third row does not share it."""
    checkpoint = make_checkpoint(root / "shared", ONE_LAYER)
    rng = random.Random(0)
    prefix = rng.choices(range(160), k=18)
    prompts = [[*prefix, 1], [5, 6, 7], [*prefix, 2, 3]]
    with (
        mock.patch.object(decode_graphs, "MIN_ROWS", 3),
        mock.patch.object(shared_prefixes, "MIN_SAVED", 16),
        mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
        LLM(checkpoint.path, max_num_seqs=3, max_num_batched_tokens=48, **OPTIONS) as llm,
    ):
        graphed = runner_of(llm).forward.decode
        graphed.graph = mock.Mock(side_effect=graphed.graph)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.token_ids for o in outputs] == [checkpoint.generate(p, 4) for p in prompts]
    assert [call.args[0] for call in graphed.graph.mock_calls].count("shared") == 3


def check_transformers_model(root: Path) -> None:
    """Graphs run transformers' model code, whose layers differ in windows, heads and head sizes."""
    checkpoint = make_checkpoint(root / "gemma4", make_config("gemma4_text"))
    rng = random.Random(0)
    prompts = [rng.choices(range(160), k=length) for length in (33, 3, 17)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with (
        mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
        LLM(checkpoint.path, max_num_seqs=2, max_num_batched_tokens=20, **OPTIONS) as llm,
    ):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        graphed = runner_of(llm).forward.decode
        assert graphed.persistent is None
        assert graphed.graphs
    assert [o.token_ids for o in outputs] == [checkpoint.generate(p, 4) for p in prompts]


def check_hybrid_model(root: Path) -> None:
    """Graphs update recurrent states, of padding rows too, in decode steps and beside prompts."""
    checkpoint = make_checkpoint(root / "hybrid", HYBRID)
    rng = random.Random(0)
    prompts = [rng.choices(range(160), k=length) for length in (3, 18)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with (
        mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
        mock.patch.object(decode_graphs, "graph_sizes", return_value=[3]),
        LLM(checkpoint.path, max_num_seqs=3, max_num_batched_tokens=16, **OPTIONS) as llm,
    ):
        graphed = runner_of(llm).forward
        eager = mock.Mock(side_effect=graphed.eager)
        eager.input_batch = graphed.eager.input_batch
        graphed.eager = eager
        for _ in range(2):  # the second time, prompts start from snapshots
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [o.token_ids for o in outputs] == [checkpoint.generate(p, 3) for p in prompts]
        assert graphed.decode.graphs
        assert eager.call_count == 0


def check_drafts(root: Path) -> None:
    """Drafts, right and wrong, are verified in graphs and beside prompts; no token changes."""
    checkpoint = make_checkpoint(root / "drafts", ONE_LAYER)
    rng = random.Random(0)
    prompts = [rng.choices(range(160), k=length) for length in (5, 17, 9)]
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1}, {"top_k": 20, "seed": 2}]
    params = [SamplingParams(max_tokens=9, ignore_eos=True, **way) for way in ways]
    options = {**OPTIONS, "max_num_seqs": 2, "max_num_batched_tokens": 24, "depth": 1}
    with LLM(checkpoint.path, **options) as llm:
        want = [o.token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    config = {**NGRAM, "num_speculative_tokens": 3}
    with LLM(checkpoint.path, **options, speculative_config=config) as llm:
        recorded = [[*prompt, *ids] for prompt, ids in zip(prompts, want, strict=True)]
        scheduler = llm.engine.core.scheduler
        set_drafter(scheduler, EagerDrafter(Replay(recorded, 160, rng=rng), 3))
        found = [o.token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        assert max(runner_of(llm).forward.decode.sizes) == 5
    assert found == want
    counts = scheduler.draft_counts
    assert counts.num_draft_tokens > counts.num_accepted_tokens > 5


class OneToken:
    """A GuidanceEngine whose grammars each allow a single token."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def compile(self, asked: Any) -> GuidanceGrammar:
        return GuidanceGrammar(asked["regex"])

    def matcher(self, grammar: GuidanceGrammar, stop_token_ids: frozenset[int]) -> Any:
        token_id = int(grammar.text)
        return SimpleNamespace(finishes=lambda _: False, is_ready=True, token_id=token_id)

    def masks(self, rows: list[Any], allocate: Any) -> tuple[np.ndarray, list[int]]:
        matchers = [matcher for matcher, drafts in rows for _ in range(1 + len(drafts))]
        masks: np.ndarray = allocate(len(matchers), -(-self.vocab_size // 32))
        bits = np.zeros((len(masks), masks.shape[1] * 32), np.uint8)
        for row, matcher in enumerate(matchers):
            bits[row, matcher.token_id] = 1
        masks[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return masks, []

    def close(self) -> None: ...


def check_masks(root: Path) -> None:
    """One graph applies bitmasks and samples, for decode steps of every batch size."""
    path = make_checkpoint(root / "masks", ONE_LAYER).path
    with (
        mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
        LLM(path, max_num_seqs=3, max_num_batched_tokens=8, **OPTIONS) as llm,
    ):
        engine, graphed = llm.engine, runner_of(llm).forward
        grammars: Any = OneToken(160)
        engine.input_processor.grammars = grammars
        num_masked = record_masked(graphed)
        tokens, lens = [7, 31, 96], [4, 2, 3]
        params = [
            SamplingParams(temperature=0, max_tokens=n, structured_outputs={"regex": str(token)})
            for token, n in zip(tokens, lens, strict=True)
        ]
        outputs = llm.generate([[1, 2], [3], [4, 5, 6]], params, use_tqdm=False)
    assert [o.token_ids for o in outputs] == [[t] * n for t, n in zip(tokens, lens, strict=True)]
    # The first of four steps is a prefill, which has no sampler graph.
    assert num_masked == [0, 3, 2, 1]


def record_masked(graphed: CudaSteps) -> list[int]:
    """Return a list to which each step appends how many rows a graph with bitmasks samples."""
    num_masked: list[int] = []
    replay = graphed.replay_masked

    def recorded(*args: Any) -> Sampled | None:
        sampled = replay(*args)
        num_masked.append(0 if sampled is None else len(sampled.tokens))
        return sampled

    graphed.replay_masked = recorded  # type: ignore[method-assign]
    return num_masked


def check_captures_ahead(root: Path) -> None:
    """With a latency target, steps capture nothing; rarer graphs are captured while idle."""
    checkpoint = make_checkpoint(root / "ahead", ONE_LAYER)
    prefix = random.Random(0).choices(range(160), k=18)
    prompts = [[*prefix, 1], [5, 6, 7], [*prefix, 2, 3]]
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    masked = [
        SamplingParams(temperature=0, max_tokens=3, structured_outputs={"regex": str(token)})
        for token in (7, 31, 96)
    ]
    options = {**OPTIONS, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    with (
        mock.patch.object(decode_graphs, "MIN_ROWS", 3),
        mock.patch.object(shared_prefixes, "MIN_SAVED", 16),
        mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
        mock.patch.object(
            FunctionPool, "capture", autospec=True, side_effect=FunctionPool.capture
        ) as capture,
        LLM(checkpoint.path, target_inter_token_ms=25.0, **options) as llm,
    ):
        engine, graphed = llm.engine, runner_of(llm).forward
        masks = np.zeros((3, 160 // 32), np.int32)  # the same memory for every step
        grammars: Any = OneToken(160)
        engine.input_processor.grammars = grammars
        engine.core.executor.mask_memory = lambda num_rows, _: masks[:num_rows]
        graph, num_masked = mock.Mock(side_effect=graphed.decode.graph), record_masked(graphed)
        graphed.decode.graph = graph
        for num_rare in (0, 1 + 3):  # one for shared prefixes, one with bitmasks per batch size
            capture.reset_mock()
            num_masked.clear()
            graph.reset_mock()
            outputs = llm.generate(prompts, plain, use_tqdm=False)
            want = [checkpoint.generate(prompt, 3) for prompt in prompts]
            assert [output.token_ids for output in outputs] == want
            outputs = llm.generate([[1, 2], [3], [4, 5, 6]], masked, use_tqdm=False)
            assert [output.token_ids for output in outputs] == [[7] * 3, [31] * 3, [96] * 3]
            assert capture.call_count == 0
            ways = {call.args[0] for call in graph.mock_calls}
            assert ways == ({"layers", "shared"} if num_rare > 0 else {"layers"})
            assert any(num_masked) == (num_rare > 0)
            captured = [engine.core.executor.capture_one() for _ in range(6)]
            if num_rare == 0:
                assert captured == [True] * 4 + [False] * 2
            else:
                assert captured == [False] * 6


def check_cache_of_eight_bits(root: Path) -> None:
    """An FP8 cache: chunked prompts, alone and with decode rows, and rows that share a block."""
    checkpoint = make_checkpoint(root / "fp8", ONE_LAYER)
    rng = random.Random(0)
    prefix = rng.choices(range(160), k=18)
    prompts = [[*prefix, 1], [5, 6, 7], [*prefix, 2, 3]]
    answers = [answer(checkpoint.model, prompt) for prompt in prompts]
    options = {**OPTIONS, "kv_cache_dtype": "fp8", "dtype": "float32"}
    with (
        mock.patch.object(decode_graphs, "MIN_ROWS", 3),
        mock.patch.object(shared_prefixes, "MIN_SAVED", 16),
        mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
        LLM(checkpoint.path, max_num_seqs=3, max_num_batched_tokens=12, **options) as llm,
    ):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert runner_of(llm).forward.decode.persistent is None  # it does not read FP8 keys
    for output, want in zip(outputs, answers, strict=True):
        count = min(want.num_clear, 4)
        assert output.token_ids[:count] == want.token_ids[:count]


def check_logits(root: Path) -> None:
    """Logits are close for one row, a few and more, where the norm adds up partial sums.

    A group of one rank, which runs the collectives by itself, gives the same logits.
    """
    path = make_checkpoint(root / "split", SPLIT, seed=3).path
    rng = random.Random(1)
    prompts: Ids = [rng.choices(range(160), k=length) for length in (5, 1, 20)]
    answers: Ids = [rng.choices(range(160), k=count) for count in (2, 1, 1)]
    options = {**OPTIONS, "max_num_batched_tokens": 24}
    with LLM(path, dtype="float32", **options) as llm:
        exact = forced_logits(llm, prompts, answers)
    of_one_rank = engines_of(1, make_device=InterpretedDevice)
    for max_num_seqs, engines in ((1, interpreted()), (3, interpreted()), (3, of_one_rank)):
        with (
            engines,
            mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
            LLM(path, dtype="float16", max_num_seqs=max_num_seqs, **options) as llm,
        ):
            ours = forced_logits(llm, prompts, answers)
        for a, b in zip(ours, exact, strict=True):
            assert (a - b).abs().max() < 0.01 * b.abs().max()


class ReferenceStep:
    """A persistent step in plain torch, for short contexts."""

    most_tokens, rows = 9, (1, 4)

    def __init__(self, model: DecoderModel, lost: int | None) -> None:
        layers = step_layers(model)
        self.tensors, self.constants = step_tensors(model, layers), step_constants(model, layers)
        self.contexts: list[int] = []
        self.lost = lost  # index of the step that times out
        self.is_lost = False

    def suits(self, caches: list[LayerCache]) -> bool:
        return True

    def max_tokens(self, rows: int) -> int:
        return self.most_tokens

    def gave_up(self) -> bool:
        is_lost, self.is_lost = self.is_lost, False
        return is_lost

    def run(
        self,
        slots: Tensor,
        lengths: Tensor,
        tokens: Tensor,
        block_table: Tensor,
        caches: list[LayerCache],
        logits: Tensor,
        context_lens: Tensor,
        verifies: bool,
    ) -> None:
        k, v = [cache.k.flatten(0, 1) for cache in caches], [c.v.flatten(0, 1) for c in caches]
        block_size = caches[0].k.shape[1]
        for row, slot in enumerate(slots.tolist()):
            num_after = int((slots[row + 1 :] == slot).sum())
            assert verifies or num_after == 0 or lengths[slot] == 0
            length = max(int(lengths[slot]) - num_after, 0)
            context_lens[row] = length
            if length == 0:
                continue
            if len(self.contexts) == self.lost:
                self.is_lost, self.lost = True, None
                return
            positions = torch.arange(length)
            blocks = block_table[slot, positions // block_size].long()
            places = blocks * block_size + positions % block_size
            token = int(tokens[slot, length - 1])
            logits[row] = reference_step(
                self.tensors, self.constants, token, places, k, v, torch.float32
            ).to(logits.dtype)
            self.contexts.append(length)


def check_whole_step(root: Path) -> None:
    """A few short sequences use the persistent step; both ways to run share the cache."""
    path = make_checkpoint(root / "whole", ONE_LAYER, seed=3).path
    rng = random.Random(1)
    prompts: Ids = [rng.choices(range(160), k=length) for length in (5, 1, 8)]
    answers: Ids = [rng.choices(range(160), k=count) for count in (4, 3, 4)]
    with LLM(path, dtype="float32", **OPTIONS) as llm:
        exact = forced_logits(llm, prompts, answers)
    with (
        interpreted(),
        mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
        mock.patch.object(device, "build", lambda model, _: ReferenceStep(model, None)),
        LLM(path, dtype="float16", max_num_seqs=1, max_num_batched_tokens=8, **OPTIONS) as llm,
    ):
        ours = forced_logits(llm, prompts, answers)
        step: Any = runner_of(llm).forward.decode.persistent
    for a, b in zip(ours, exact, strict=True):
        assert (a - b).abs().max() < 0.02 * b.abs().max()
    assert sorted(step.contexts) == [1, 2, 3, 6, 7, 8, 9]  # a prompt of one token decodes, too
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(path, dtype="float32", **OPTIONS) as llm:
        exact = llm.generate([[3], [1, 2], [5]], params, use_tqdm=False)
    with (
        interpreted(),
        mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
        mock.patch.object(ReferenceStep, "most_tokens", 12),
        mock.patch.object(device, "build", lambda model, _: ReferenceStep(model, None)),
        LLM(path, dtype="float16", max_num_seqs=4, max_num_batched_tokens=8, **OPTIONS) as llm,
    ):
        found = llm.generate([[3], [1, 2], [5]], params, use_tqdm=False)
        step = runner_of(llm).forward.decode.persistent
    assert [each.token_ids for each in found] == [each.token_ids for each in exact]
    assert len(step.contexts) >= 6  # three rows ran as four, one of them padding


def check_lost_step(root: Path) -> None:
    """The persistent step times out once: the sequence is recomputed, then runs layer by layer."""
    path = make_checkpoint(root / "lost", ONE_LAYER, seed=3).path
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(path, dtype="float32", **OPTIONS) as llm:
        want = llm.generate([[1, 2]], params, use_tqdm=False)[0].token_ids
    with (
        interpreted(),
        mock.patch.object(steps, "CAPTURED_SAMPLING", (Sampling.GREEDY,)),
        mock.patch.object(device, "build", lambda model, _: ReferenceStep(model, 3)),
        LLM(
            path, dtype="float16", max_num_seqs=1, max_num_batched_tokens=8, depth=1, **OPTIONS
        ) as llm,
    ):
        assert llm.generate([[1, 2]], params, use_tqdm=False)[0].token_ids == want
        step: Any = runner_of(llm).forward.decode.persistent
        assert llm.engine.core.scheduler.num_preemptions == 1
    assert step.contexts[:3] == [3, 4, 5]
    assert len(step.contexts) <= 4  # one more may have been in flight


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(linear_one_row, "one_row_config", wide_tiles),
        # Only the largest graph is captured before a step needs it.
        mock.patch.object(decode_graphs, "FIRST_SIZES", ()),
    ):
        with interpreted():
            check_tokens(Path(folder))
            check_shared_prefixes(Path(folder))
            check_transformers_model(Path(folder))
            check_hybrid_model(Path(folder))
            check_masks(Path(folder))
            check_drafts(Path(folder))
            check_captures_ahead(Path(folder))
            check_cache_of_eight_bits(Path(folder))
        check_logits(Path(folder))
        check_whole_step(Path(folder))
        check_lost_step(Path(folder))


if __name__ == "__main__":
    main()
