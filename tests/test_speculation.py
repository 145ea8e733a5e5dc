"""Speculative decoding does not change outputs, whatever options the requests have."""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from benchmarks.replayed_drafts import Replay, set_drafter
from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import DraftCounts
from nanovllm.engine.timing import StepLog
from nanovllm.errors import ConfigError
from nanovllm.features.speculation.drafter import Drafter
from nanovllm.features.speculation.proposer import ModelProposer, Proposal, Proposer
from nanovllm.ops.torch_sampling import sample
from nanovllm.outputs import CompletionOutput, RequestOutput
from tests.byte_tokenizer import with_tokenizer
from tests.checkpoints import MIN_GAP, SIZES, VOCAB_SIZE, make_checkpoint
from tests.clear_choices import Draw, choice_gap, columns_of, gap_at
from tests.devices import NEEDS_GPU
from tests.ops.sampling_by_noise import sample_by_noise
from tests.ops.test_torch_sampling import chi_square, chi_square_limit
from tests.threaded_ranks import engines_of

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "dtype": "float32",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 7}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "no"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "[a-c]{3}-[0-9]{2,4}"},
    {"choice": ["yes", "no", "no one"]},
    {"regex": "[0-9]{2}", "after": "a"},
]
# Requests have random combinations of these.
FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 9, "min_p": 0.01},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3},
    {"logit_bias": {9: 3.0, 11: -5.0}},
    {"bad_words": ["ab", "b"]},
    {"min_tokens": 6, "stop_token_ids": [*range(0, VOCAB_SIZE, 7)]},
    {"stop": ["a", "}"]},
    {"logprobs": 2},
    {"n": 2},
    {"max_tokens": 8},
    {"prompt_logprobs": 1},
    {"logits_processors": ["tests.test_speculation:prefer_the_last"]},
]


class EagerDrafter(Drafter):
    """Proposes a random number of draft tokens, whether or not they pay off."""

    def __init__(self, proposer: Proposer, num_speculative_tokens: int, seed: int = 0) -> None:
        super().__init__(proposer, num_speculative_tokens)
        self._rng = random.Random(seed)

    def begin(self, num_rows: int, num_unused: int) -> None:
        super().begin(num_rows, num_unused)
        self._is_on = True

    def _best_count(self, state: object, most: int) -> int:
        return self._rng.randrange(most + 1)


def prefer_the_last(output_token_ids: list[int], logits: Any) -> Any:
    if output_token_ids:
        logits[output_token_ids[-1]] += 1.0
    return logits


@pytest.fixture(scope="module")
def path(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("speculation") / "qwen3"
    return str(with_tokenizer(tiny("qwen3").path, folder))


def make_requests(
    rng: random.Random, has_grammars: bool
) -> tuple[list[list[int]], list[SamplingParams]]:
    base = [rng.randrange(5, 90) for _ in range(24)]
    prompts, params = [], []
    for _ in range(rng.choice([1, 3, 6])):
        prompts.append(base[: rng.randrange(1, 25)] + [rng.randrange(5, 90) for _ in range(4)])
        asked: dict[str, Any] = {"max_tokens": 20, "seed": rng.randrange(1000)}
        for feature in rng.sample(FEATURES, rng.randrange(4)):
            asked |= feature
        if rng.random() < 0.3 and has_grammars:
            asked["structured_outputs"] = rng.choice(GRAMMARS)
        if asked.get("temperature") == 0.0:
            asked.pop("n", None)
        params.append(SamplingParams(**asked))
    return prompts, params


@dataclass(frozen=True)
class Comparison:
    """Compares outputs with those of an engine without drafts, whose options are `options`."""

    path: str
    options: dict[str, Any]

    def check(
        self,
        outputs: list[RequestOutput],
        wanted: list[RequestOutput],
        params: list[SamplingParams],
        seed: int,
    ) -> None:
        for output, want, asked in zip(outputs, wanted, params, strict=True):
            pairs = zip(output.outputs, want.outputs, strict=True)
            for index, (each, plain) in enumerate(pairs):
                if (place := first_difference(each, plain)) is not None:
                    self._check_tie(want, asked, index, place, seed)
                    each, plain = (shortened(sample, place) for sample in (each, plain))
                assert_equal(each, plain, seed)

    def _check_tie(
        self, want: RequestOutput, asked: SamplingParams, index: int, place: int, seed: int
    ) -> None:
        """Fail if a token differs that rounding could not have changed."""
        assert asked.seed is not None
        params = replace(asked, seed=asked.seed + index)
        token_ids = want.outputs[index].token_ids[: place + 1]
        gap = gap_at(self.path, self.options, want.prompt_token_ids, token_ids, params)
        text = f"seed {seed}: sample {index} differs at token {place}, gap {gap:.1e}: {asked}"
        logger.warning(text)
        assert gap < MIN_GAP, text


def first_difference(each: CompletionOutput, plain: CompletionOutput) -> int | None:
    """Return the index of the first token that differs; None if all tokens that both have agree."""
    pairs = enumerate(zip(each.token_ids, plain.token_ids, strict=False))
    return next((i for i, (a, b) in pairs if a != b), None)


def shortened(sample: CompletionOutput, num_tokens: int) -> CompletionOutput:
    """Return the first tokens of a sample, which may end elsewhere than another one."""
    logprobs = None if sample.logprobs is None else sample.logprobs[:num_tokens]
    token_ids = sample.token_ids[:num_tokens]
    return replace(sample, token_ids=token_ids, logprobs=logprobs, text="", finish_reason="length")


def assert_equal(each: CompletionOutput, plain: CompletionOutput, seed: int) -> None:
    """Compare two samples; an aborted one must be a prefix of the wanted one."""
    is_aborted = each.finish_reason == "abort"
    if is_aborted:
        assert each.token_ids == plain.token_ids[: len(each.token_ids)], seed
        assert plain.text.startswith(each.text), seed
    else:
        assert (each.token_ids, each.text) == (plain.token_ids, plain.text), seed
        assert each.finish_reason == plain.finish_reason, seed
    assert (each.logprobs is None) == (plain.logprobs is None)
    pairs = zip(each.logprobs or [], plain.logprobs or [], strict=not is_aborted)
    for found, right in pairs:
        assert {i: x.rank for i, x in found.items()} == {i: x.rank for i, x in right.items()}
        for token_id, logprob in found.items():
            assert logprob.logprob == pytest.approx(right[token_id].logprob, abs=1e-4)


def run_with_aborts(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], rng: random.Random
) -> list[RequestOutput]:
    """Run requests, and abort some of them after random steps."""
    seq_ids = [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]
    outputs = {}
    while not llm.is_finished():
        finished = llm.step().finished
        if rng.random() < 0.15:
            aborted = llm.abort(rng.choice(seq_ids))
            finished += [] if aborted is None else [aborted]
        outputs.update((output.seq_id, output) for output in finished)
    return [outputs[seq_id] for seq_id in seq_ids]


@pytest.mark.endurance
@pytest.mark.parametrize(
    ("device", "depth"), [("cpu", 0), ("cpu", 1), pytest.param("cuda", 1, marks=NEEDS_GPU)]
)
def test_drafts_change_no_output(
    path: str, device: str, depth: int, count: Callable[[int], int]
) -> None:
    num_drafted = num_accepted = num_aborted = num_preemptions = 0
    has_grammars = find_spec("llguidance") is not None
    options = {**OPTIONS, "device": device, "depth": depth, "speculative_config": NGRAM}
    comparison = Comparison(path, {**OPTIONS, "device": device})
    if device == "cuda":
        options["gpu_memory_utilization"] = 0.1
    with (
        LLM(path, **options | {"speculative_config": None}) as plain,
        LLM(path, **options) as large,
        LLM(path, **options, num_kvcache_blocks=8, max_num_batched_tokens=24) as small,
    ):
        for seed in range(count(500)):
            rng = random.Random(1000 * depth + seed)
            prompts, params = make_requests(rng, has_grammars)
            wanted = plain.generate(prompts, params, use_tqdm=False)
            recorded = [
                want.prompt_token_ids + each.token_ids for want in wanted for each in want.outputs
            ]
            llm = small if rng.random() < 0.5 else large
            scheduler = llm.engine.core.scheduler
            set_drafter(scheduler, EagerDrafter(Replay(recorded, VOCAB_SIZE, rng=rng), 7, seed))
            draft_counts = scheduler.draft_counts
            if rng.random() < 0.2:
                outputs = run_with_aborts(llm, prompts, params, rng)
                num_aborted += sum(output.finish_reason == "abort" for output in outputs)
            else:
                outputs = llm.generate(prompts, params, use_tqdm=False)
            comparison.check(outputs, wanted, params, seed)
            for output, asked in zip(outputs, params, strict=True):
                num_drafts = output.num_accepted_tokens + output.num_rejected_tokens
                assert not (num_drafts and asked.logits_processors)
            scheduler.check()
            assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
            num_drafted += draft_counts.num_draft_tokens
            num_accepted += draft_counts.num_accepted_tokens
        num_preemptions = small.engine.core.scheduler.num_preemptions
    assert num_drafted > 1.2 * num_accepted > 5 * count(500)
    assert num_aborted > 0.1 * count(500)
    assert num_preemptions > 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=8, seed=5, n=2, temperature=1.2, presence_penalty=0.7),
        SamplingParams(max_tokens=8, seed=5, structured_outputs={"regex": "[a-z]{8}"}),
        SamplingParams(max_tokens=8, temperature=0.0, seed=0),
    ],
    ids=["sampled", "masked", "greedy"],
)
def test_a_difference_without_a_tie_fails(path: str, params: SamplingParams) -> None:
    if params.structured_outputs is not None:
        pytest.importorskip("llguidance")
    options = {**OPTIONS, "device": "cpu"}
    with LLM(path, **options) as llm:
        [want] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    last = want.outputs[-1]
    wrong = replace(last, token_ids=[*last.token_ids[:4], last.token_ids[4] + 1])
    output = replace(want, outputs=[*want.outputs[:-1], wrong])
    with pytest.raises(
        AssertionError, match=r"differs at token 4, gap (1\.0e\+00|\d\.\de-0[123]):"
    ):
        Comparison(path, options).check([output], [want], [params], 0)


@pytest.mark.parametrize("draw", [sample, sample_by_noise])
def test_the_gap_of_a_near_tie(draw: Draw) -> None:
    """Between a logit that draws a token and one that does not, the gap is their distance."""
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([3])
    for params in (SamplingParams(temperature=1.2, seed=4), SamplingParams(temperature=0, seed=0)):
        columns = columns_of(params, 1)
        before = draw(logits, columns, position)
        low, high = 0.0, 20.0  # added to the logit of the last token
        for _ in range(40):
            middle = (low + high) / 2
            moved = logits.clone()
            moved[0, -1] += middle
            is_same = bool(draw(moved, columns, position) == before)
            low, high = (middle, high) if is_same else (low, middle)
        for distance in (1e-5, 1e-4, 1e-2):
            moved = logits.clone()
            moved[0, -1] += low - distance
            gap = choice_gap(moved, columns, position, draw)
            assert 0.1 * distance < gap < 1.4 * distance


# Each with replayed drafts or, if its name says so, with the target as its own draft model.
MODES: dict[str, dict[str, Any]] = {
    "ranks": {"depth": 1},
    "ranks-draft-model": {},
    "fp8-cache": {"kv_cache_dtype": "fp8", "depth": 1},
    "fp8-cache-draft-model": {"kv_cache_dtype": "fp8", "depth": 1},
    "no-prefix-cache": {"enable_prefix_caching": False, "num_kvcache_blocks": 8},
    "eager": {"enforce_eager": True, "max_num_batched_tokens": 24},
    "plain-torch": {"attention_backend": "sdpa", "depth": 1},
}


@pytest.mark.endurance
@pytest.mark.parametrize("mode", MODES)
def test_modes(path: str, mode: str, count: Callable[..., int]) -> None:
    options, is_model = {**OPTIONS, **MODES[mode], "device": "cpu"}, mode.endswith("draft-model")
    config = {**NGRAM, "method": "draft_model", "model": path} if is_model else NGRAM
    comparison = Comparison(path, options)
    with contextlib.ExitStack() as stack:
        if mode.startswith("ranks"):
            stack.enter_context(engines_of(2))
        plain = stack.enter_context(LLM(path, **options))
        llm = stack.enter_context(LLM(path, **options, speculative_config=config))
        scheduler, counts = llm.engine.core.scheduler, DraftCounts()
        for seed in range(count(40, 5)):
            rng = random.Random(seed)
            prompts, params = make_requests(rng, find_spec("llguidance") is not None)
            wanted = plain.generate(prompts, params, use_tqdm=False)
            recorded = [
                want.prompt_token_ids + each.token_ids for want in wanted for each in want.outputs
            ]
            proposer = ModelProposer() if is_model else Replay(recorded, VOCAB_SIZE, rng=rng)
            set_drafter(scheduler, EagerDrafter(proposer, 7, seed))
            scheduler.draft_counts = counts
            outputs = llm.generate(prompts, params, use_tqdm=False)
            comparison.check(outputs, wanted, params, seed)
        scheduler.check()
    assert counts.num_draft_tokens > counts.num_accepted_tokens > 5 * count(40, 5)


@pytest.mark.endurance
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("draft", ["same", "other"])
def test_a_draft_model_changes_no_output(
    path: str, tiny: Any, device: str, draft: str, count: Callable[[int], int]
) -> None:
    """If the target is its own draft model, nearly all draft tokens are accepted."""
    has_grammars = find_spec("llguidance") is not None
    model = path if draft == "same" else str(tiny("llama").path)
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": model}
    options = {**OPTIONS, "device": device}
    comparison = Comparison(path, dict(options))
    if device == "cuda":
        options["gpu_memory_utilization"] = 0.1
    with (
        LLM(path, **options) as plain,
        LLM(path, **options, speculative_config=config) as large,
        LLM(
            path,
            **options,
            speculative_config=config,
            num_kvcache_blocks=8,
            max_num_batched_tokens=24,
        ) as small,
    ):
        counts = DraftCounts()
        for seed in range(count(100)):
            rng = random.Random(seed)
            prompts, params = make_requests(rng, has_grammars)
            wanted = plain.generate(prompts, params, use_tqdm=False)
            llm = small if rng.random() < 0.5 else large
            set_drafter(llm.engine.core.scheduler, EagerDrafter(ModelProposer(), 3, seed))
            llm.engine.core.scheduler.draft_counts = counts
            outputs = llm.generate(prompts, params, use_tqdm=False)
            comparison.check(outputs, wanted, params, seed)
    assert counts.num_draft_tokens > 3 * count(100)
    rate = counts.num_accepted_tokens / counts.num_draft_tokens
    assert rate > 0.8 if draft == "same" else rate < 0.5


def test_a_draft_model_has_the_same_vocabulary(path: str, tmp_path: Path) -> None:
    config = Qwen3Config(**{**SIZES, "vocab_size": 64}, head_dim=32)
    model = str(make_checkpoint(tmp_path / "small", config).path)
    with pytest.raises(ConfigError, match="same vocabulary"):
        LLM(
            path,
            **OPTIONS,
            device="cpu",
            speculative_config={"method": "draft_model", "model": model},
        )


def test_repeated_text_is_drafted(path: str) -> None:
    """A grammar allows only one text: once it repeats, every draft token is accepted."""
    params = SamplingParams(
        temperature=0, max_tokens=60, structured_outputs={"regex": "(abc-12 ){9}"}
    )
    with LLM(path, **OPTIONS, device="cpu") as llm:
        plain_log = llm.engine.core.log = StepLog()
        [want] = llm.generate([[7, 8, 9]], params, use_tqdm=False)
    with LLM(path, **OPTIONS, device="cpu", speculative_config=NGRAM) as llm:
        log = llm.engine.core.log = StepLog()
        [output] = llm.generate([[7, 8, 9]], params, use_tqdm=False)
        draft_counts = llm.engine.core.scheduler.draft_counts
        assert len(log.timings) < 0.6 * len(plain_log.timings)
    assert output.token_ids == want.token_ids
    assert output.num_accepted_tokens == draft_counts.num_accepted_tokens > 20
    assert output.num_rejected_tokens == draft_counts.num_rejected_tokens


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "method must be one of ngram, suffix, draft_model"),
        ({"method": "eagle"}, "method must be one of ngram, suffix, draft_model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "between 1 and 32"),
        ({"method": "draft_model"}, "speculative_config model must be a hub id or a folder"),
        ({"method": "ngram", "model": "x"}, "given only with method draft_model"),
        ({"method": "ngram", "tokens": 3}, "speculative_config must be a dict of"),
        ("ngram", "speculative_config must be a dict"),
    ],
)
def test_wrong_options(path: str, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(path, **OPTIONS, device="cpu", speculative_config=config)


@pytest.mark.slow
def test_samples_with_drafts_follow_the_exact_distribution(tiny: Any) -> None:
    """10,000 samples of three tokens, four choices each; draft tokens are random guesses."""
    num_samples, prompt, choices = 10_000, [5, 6, 7], 4
    checkpoint = tiny("qwen3")
    params = SamplingParams(temperature=1.5, top_k=choices, max_tokens=3, n=100, ignore_eos=True)
    contexts: list[tuple[int, ...]] = [()]
    next_probs: dict[tuple[int, ...], dict[int, float]] = {}
    for _ in range(3):
        ids = torch.tensor([[*prompt, *context] for context in contexts])
        with torch.no_grad():
            values, tokens = checkpoint.model(ids).logits[:, -1].topk(choices)
        for context, row, kept in zip(contexts, values / 1.5, tokens.tolist(), strict=True):
            next_probs[context] = dict(zip(kept, row.double().softmax(0).tolist(), strict=True))
        contexts = [(*each, token) for each in contexts for token in next_probs[each]]
    probs = [
        next_probs[()][a] * next_probs[(a,)][b] * next_probs[(a, b)][c] for a, b, c in contexts
    ]

    class Guess:
        rng = random.Random(1)

        def propose(self, seq: Any, most: int) -> Proposal | None:
            drafts = seq.token_ids[len(prompt) :].tolist()
            num_known = len(drafts)
            while len(drafts) < num_known + most:
                drafts.append(self.rng.choice([*next_probs.get(tuple(drafts), {0: 1.0})]))
            return Proposal(drafts[num_known:], 0)

        def finished(self, seq: Any) -> None: ...

    options = {**OPTIONS, "max_num_seqs": 64, "device": "cpu", "skip_tokenizer_init": True}
    with LLM(checkpoint.path, **options) as llm:
        scheduler = llm.engine.core.scheduler
        set_drafter(scheduler, EagerDrafter(Guess(), 64))
        seeds = range(0, num_samples, params.n)
        outputs = llm.generate(
            [prompt] * len(seeds), [replace(params, seed=seed) for seed in seeds], use_tqdm=False
        )
    found = Counter(tuple(each.token_ids) for output in outputs for each in output.outputs)
    assert sum(found.values()) == num_samples
    assert scheduler.draft_counts.num_accepted_tokens > num_samples / 20
    counts = np.array([found[context] for context in contexts])
    assert counts.sum() == num_samples
    statistic, degrees = chi_square(counts, np.array(probs))
    assert degrees > 10
    assert statistic < chi_square_limit(degrees)
