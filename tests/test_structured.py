"""Structured output: completions match a schema, regex, choice or grammar in any batch."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import jsonschema
import numpy as np
import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.errors import ConfigError, RequestError
from nanovllm.features.grammar import guidance as grammar
from nanovllm.outputs import RequestOutput
from tests.byte_tokenizer import EOS, with_tokenizer
from tests.checkpoints import VOCAB_SIZE
from tests.devices import DEVICES
from tests.json_schemas import random_schema
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 16,
    "max_model_len": 256,
    "gpu_memory_utilization": 0.2,
    "dtype": "float32",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["ab", "no"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any] | None] = [
    {"json": SCHEMA},
    None,
    {"regex": "[a-c]{3}-[0-9]{2,4}"},
    {"choice": ["yes", "no", "no one"]},
    None,
    {"grammar": 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'},
    {"json": SCHEMA, "after": "</think>"},
    {"regex": "[0-9]{2}", "after": "a"},
    {"regex": "[0-9]{2}", "opened_by": "b", "after": "a"},
    {"json": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3,
              "$defs": {"n": {"type": "number", "minimum": 0, "maximum": 9.5}}}},
]  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "chunked ahead": {"max_num_batched_tokens": 9, "depth": 1},
    "preempted": {"num_kvcache_blocks": 20, "depth": 1},
    "uncached": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def path(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny("qwen3").path, tmp_path_factory.mktemp("structured") / "qwen3")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), device="cpu", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    """Return an engine in float32: faster for many rows on CPUs without bfloat16 instructions."""
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 64, "dtype": "float32"}
    with LLM("smollm2", device="cpu", **options) as llm:
        yield llm


def params_of(asked: dict[str, Any] | None, seed: int, **options: Any) -> SamplingParams:
    given = {"max_tokens": 60, "seed": seed, "structured_outputs": asked, **options}
    return SamplingParams(**given)


def generate(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([*map(prompt_of, range(len(params)))], params, use_tqdm=False)


def prompt_of(index: int) -> list[int]:
    return [5 + i % 90 for i in range(index, index + 21)]


def batch(**options: Any) -> list[SamplingParams]:
    return [params_of(asked, seed, **options) for seed in range(2) for asked in ASKED]


def fits(asked: dict[str, Any], text: str) -> bool:
    if "after" in asked and text.startswith(asked.get("opened_by", "")):
        text = text.partition(asked["after"])[2]
    if "json" in asked:
        return jsonschema.Draft202012Validator(asked["json"]).is_valid(json.loads(text))
    if "choice" in asked:
        return text in asked["choice"]
    pattern = asked.get("regex", r"(\(*)[0-9]{1,3}(\)*)")
    found = re.fullmatch(pattern, text)
    return found is not None and ("regex" in asked or len(found[1]) == len(found[2]))


def check(params: list[SamplingParams], outputs: list[RequestOutput]) -> int:
    """Check every finished completion; return how many there are."""
    num_ended = 0
    for param, output in zip(params, outputs, strict=True):
        assert output.error is None
        asked = param.structured_outputs
        if asked is not None and output.finish_reason == "stop":
            assert fits(dict(asked), output.text), (asked, output.text)
            num_ended += 1
    return num_ended


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[list[int]]:
    outputs = generate(llm, batch())
    assert check(batch(), outputs) >= 8
    return [output.token_ids for output in outputs]


@DEVICES
@pytest.mark.parametrize("mode", MODES)
def test_modes_do_not_matter(path: Path, wanted: Any, device: str, mode: str) -> None:
    with LLM(str(path), device=device, **OPTIONS, **MODES[mode]) as llm:
        outputs = generate(llm, batch())
        assert check(batch(), outputs) >= 8
        if device == "cpu":  # on other devices, the same seeds give different random numbers
            assert [output.token_ids for output in outputs] == wanted
        if mode == "preempted":
            assert llm.engine.core.scheduler.num_preemptions > 0


def test_two_ranks(path: Path, wanted: Any) -> None:
    with engines_of(2), LLM(str(path), device="cpu", depth=1, **OPTIONS) as llm:
        assert [output.token_ids for output in generate(llm, batch())] == wanted


@pytest.mark.slow
def test_a_core_and_two_ranks_in_other_processes(path: Path, wanted: Any) -> None:
    """The core compiles the grammars again, without delaying requests that have none."""
    llm = AsyncLLM(str(path), device="cpu", tensor_parallel_size=2, depth=1, **OPTIONS)

    async def answer(index: int, params: SamplingParams) -> list[int]:
        pieces = [piece async for piece in llm.generate(prompt_of(index), params)]
        return [token_id for piece in pieces for token_id in piece.token_ids]

    async def answer_all() -> list[list[int]]:
        return await asyncio.gather(*(answer(*each) for each in enumerate(batch())))

    try:
        assert asyncio.run(answer_all()) == wanted
    finally:
        llm.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_others_get_what_they_get_alone(path: Path, depth: int) -> None:
    plain = [params_of(None, seed) for seed in range(6)]
    odd = [params_of(asked, seed) for seed, asked in enumerate(ASKED)]
    with LLM(str(path), device="cpu", depth=depth, **OPTIONS) as llm:
        alone = [llm.generate([[7, 8, 9 + seed]], p, use_tqdm=False)[0].token_ids
                 for seed, p in enumerate(plain)]  # fmt: skip
        prompts = [[7, 8, 9 + seed] for seed in range(6)] + [[5, 6]] * len(odd)
        outputs = llm.generate(prompts, [*plain, *odd], use_tqdm=False)
    assert [output.token_ids for output in outputs[:6]] == alone


@pytest.mark.endurance
@pytest.mark.parametrize(
    "temperature", [1.0, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.0, 5.0))]
)
def test_every_seed_and_temperature(
    llm: LLM, temperature: float, count: Callable[[int], int]
) -> None:
    num_ended = 0
    for first in range(0, count(100)):
        params = [params_of(asked, 1000 * first + i, temperature=temperature, max_tokens=120)
                  for i, asked in enumerate(ASKED) if asked is not None]  # fmt: skip
        outputs = generate(llm, params)
        num_ended += check(params, outputs)
        assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    assert num_ended >= count(100) * 2


def test_cut_short_is_length(llm: LLM) -> None:
    [output] = generate(llm, [params_of({"json": SCHEMA}, 1, max_tokens=3)])
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 3


def test_samples_follow_the_grammar_each_for_itself(llm: LLM) -> None:
    asked = {"regex": "[a-c]{4}"}
    [output] = generate(llm, [params_of(asked, 1, n=8, temperature=5.0)])
    texts = [each.text for each in output.outputs]
    assert all(fits(asked, text) for text in texts)
    assert len(set(texts)) > 1


def test_streams(llm: LLM) -> None:
    asked = {"json": SCHEMA}
    params = params_of(asked, 3, max_tokens=120)
    pieces = list(llm.stream([[5, 6, 7]], params))
    text = "".join(piece.text for piece in pieces)
    whole = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]
    assert text == whole.text
    assert whole.finish_reason != "stop" or fits(asked, text)


def test_stop_tokens_come_only_where_the_grammar_ends(llm: LLM) -> None:
    """Elsewhere, stop tokens are masked, even if the grammar allows their text. An ignored EOS
    still ends an output that the grammar does not let continue."""
    digits = [llm.get_tokenizer().encode(digit)[0] for digit in "0123456789"]
    asked = {"regex": "[a-c]{3}[0-9]+"}
    for options in ({"stop_token_ids": digits[:5]}, {"ignore_eos": True}, {"min_tokens": 20}):
        outputs = generate(llm, [params_of(asked, seed, **options) for seed in range(6)])
        for output in outputs:
            assert output.finish_reason in ("stop", "length")
            assert re.match("[a-c]{3}", output.text)
            if "min_tokens" in options:
                assert len(output.token_ids) >= 20
            if "ignore_eos" in options:
                assert EOS not in output.token_ids
    [output] = generate(llm, [params_of({"regex": "0[0-9]"}, 0, stop_token_ids=digits)])
    # The grammar requires a stop token where the output may not end.
    assert output.finish_reason == "error"
    [output] = generate(llm, [params_of({"choice": ["ab"]}, 0, ignore_eos=True, min_tokens=9)])
    assert (output.text, output.finish_reason) == ("ab", "stop")


def test_other_options_narrow_and_never_widen(llm: LLM) -> None:
    asked = {"regex": "[a-c]{6}"}
    letters = [llm.get_tokenizer().encode(c)[0] for c in "abcd"]
    bias = {token_id: 100.0 for token_id in range(VOCAB_SIZE) if token_id != letters[0]}
    outputs = generate(
        llm,
        [
            params_of(asked, 1, allowed_token_ids=letters[1:]),
            params_of(asked, 1, bad_words=["b", "c"]),
            params_of(asked, 1, logit_bias=bias),
            params_of(asked, 1, presence_penalty=2.0, repetition_penalty=1.5),
            params_of(asked, 1, allowed_token_ids=letters[3:]),
            params_of(None, 1),
        ],
    )
    texts = [output.text for output in outputs]
    assert re.fullmatch("[bc]{6}", texts[0])
    assert {*letters[1:3]}.isdisjoint(outputs[1].token_ids)
    assert all(re.fullmatch("[a-c]{6}", text) for text in texts[:4])
    assert outputs[4].finish_reason == "error"
    assert "structured_outputs" in str(outputs[4].error)
    assert outputs[5].finish_reason != "error"


def test_an_answer_after_a_special_token(llm: LLM) -> None:
    """A bias favors the special token, then line breaks, with which JSON may begin."""
    asked = {"json": SCHEMA, "after": "<bos>"}
    bias = {1: 100.0, llm.get_tokenizer().encode("\n")[0]: 60.0}
    params = [params_of(asked, seed, max_tokens=150, logit_bias=bias) for seed in range(4)]
    for output in generate(llm, params):
        assert output.token_ids[0] == 1
        assert output.text.startswith("\n\n{")
        assert output.finish_reason == "length" or fits({"json": SCHEMA}, output.text)


def test_only_what_a_special_token_opens_is_free(llm: LLM) -> None:
    """A bias decides whether the special token, which begins the reasoning, is generated."""
    asked = {"choice": ["yes"], "opened_by": "<bos>", "after": "!"}
    bias = {1: 100.0, llm.get_tokenizer().encode("!")[0]: 50.0}
    pushed, plain = generate(
        llm, [params_of(asked, 0, temperature=0.0, logit_bias=each) for each in (bias, {1: -100.0})]
    )
    assert pushed.token_ids[0] == 1
    assert pushed.text.endswith("!yes")
    assert plain.text == "yes"


def test_what_opens_a_thought_does_so_where_an_answer_could_begin_alike(llm: LLM) -> None:
    """Otherwise the grammar would constrain the reasoning that follows."""
    asked = {"regex": "[a-z]{4}", "opened_by": "b", "after": "!"}
    bias = {llm.get_tokenizer().encode("b")[0]: 100.0}
    [output] = generate(llm, [params_of(asked, 0, max_tokens=20, logit_bias=bias)])
    assert (output.text, output.finish_reason) == ("b" * 20, "length")


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    asked = {"choice": ["yes"]}
    [output] = generate(llm, [params_of(asked, 1, logprobs=0)])
    assert output.text == "yes"
    assert output.cumulative_logprob is not None
    assert output.cumulative_logprob < -1


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"json": SCHEMA, "regex": "a"},
        {"after": "x"},
        {"xml": "a"},
        {"regex": ""},
        {"regex": 5},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "ab"},
        {"json": "{"},
        {"json": [1]},
        {"json": {"const": float("nan")}},
        {"json": {"const": {1, 2}}},
        {"json_object": False},
        {"grammar": None},
        {"regex": "a", "after": ""},
        {"regex": "a", "after": "b", "opened_by": ""},
        {"regex": "a", "opened_by": "b"},
        {"regex": "\ud800"},
        "json",
    ],
)
def test_wrong_shapes(asked: Any) -> None:
    with pytest.raises(ConfigError, match="structured_outputs"):
        SamplingParams(structured_outputs=asked)


def test_the_record_is_detached_and_picklable() -> None:
    schema: dict[str, Any] = {"type": "object"}
    params = SamplingParams(structured_outputs={"json": schema, "after": "x"})
    schema["type"] = "array"
    assert params.structured_outputs == {"json": {"type": "object"}, "after": "x"}
    assert pickle.loads(pickle.dumps(params)) == params
    hash(params)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": "a\\"}, "backslash"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "no output"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": 'start: start "a"'}, "no output"),
        ({"grammar": "((("}, "expecting rule"),
        ({"grammar": 'start: %json {"uniqueItems": true}'}, "uniqueItems"),
        ({"json": False}, "false"),
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
    ],
)
def test_broken_grammars_are_refused_at_once(llm: LLM, asked: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(llm, [params_of(asked, 0)])


def test_needs_a_tokenizer_and_the_package(path: Path) -> None:
    with (
        LLM(str(path), device="cpu", skip_tokenizer_init=True, **OPTIONS) as llm,
        pytest.raises(RequestError, match="skip_tokenizer_init"),
    ):
        generate(llm, [params_of({"json": {}}, 0)])
    with (
        LLM(str(path), device="cpu", **OPTIONS) as llm,
        patch.dict(sys.modules, {"llguidance": None}),
    ):
        assert len(generate(llm, [params_of(None, 0)])) == 1
        with pytest.raises(RequestError, match="pip install llguidance"):
            generate(llm, [params_of({"regex": "a"}, 0)])


@pytest.mark.parametrize(("depth", "caching"), [(0, True), (1, False)])
def test_late_masks_change_nothing(path: Path, wanted: Any, depth: int, caching: bool) -> None:
    rng, compute = random.Random(0), grammar.compute_mask

    def late(*args: Any) -> None:
        time.sleep(rng.choice([0, 0, 0.004]))
        compute(*args)

    options = {**OPTIONS, "num_kvcache_blocks": 40, "enable_prefix_caching": caching}
    with (
        patch.object(grammar, "SLOW_MASK", -1.0),
        patch.object(grammar, "compute_mask", late),
        LLM(str(path), device="cpu", depth=depth, **options) as llm,
    ):
        scheduler = llm.engine.core.scheduler
        with patch.object(scheduler, "retract", wraps=scheduler.retract) as retract:
            outputs = generate(llm, batch())
        scheduler.check()
        assert retract.call_count > 0
    assert [output.token_ids for output in outputs] == wanted


@pytest.mark.parametrize("depth", [0, 1])
def test_a_slow_mask_is_waited_for_by_its_row_alone(path: Path, depth: int) -> None:
    others_are_done, compute = threading.Event(), grammar.compute_mask

    def slow(*args: Any) -> None:
        """Delay masks that other threads compute until the other outputs are complete."""
        if threading.current_thread().name.startswith("nanovllm-grammars"):
            others_are_done.wait(60)
        compute(*args)

    with (
        patch.object(grammar, "SLOW_MASK", -1.0),
        patch.object(grammar, "compute_mask", slow),
        LLM(str(path), device="cpu", depth=depth, **OPTIONS) as llm,
    ):
        constrained = params_of({"regex": "[ab]{16}"}, 0)
        first = llm.add_request(prompt_of(0), constrained)
        others = {
            llm.add_request(prompt_of(1 + seed), params_of(None, seed, max_tokens=30))
            for seed in range(4)
        }
        done: list[RequestOutput] = []
        while len(done) < len(others):
            done += llm.step().finished
        assert {output.seq_id for output in done} == others
        others_are_done.set()
        while not llm.is_finished():
            done += llm.step().finished
    assert done[-1].seq_id == first
    assert fits({"regex": "[ab]{16}"}, done[-1].text)


def wait_for(*matchers: grammar.GuidanceMatcher) -> None:
    for matcher in matchers:
        if matcher.job is not None:
            matcher.job.result()


def test_other_threads_compute_the_masks_of_slow_grammars(llm: LLM) -> None:
    grammars, allocate = (
        llm.engine.input_processor.get_grammars(),
        llm.engine.core.executor.mask_memory,
    )
    assert grammars is not None
    compiled = grammars.compile({"regex": "[ab]{50}"})
    first, second = (grammars.matcher(compiled, frozenset()) for _ in range(2))
    found, num_late = [], []
    for number in range(6):
        with patch.object(grammar, "SLOW_MASK", -1.0 if number == 2 else 60.0):
            masks, late = grammars.masks([(first, []), (second, [])], allocate)
        num_late.append(len(late))
        while late:
            wait_for(first, second)
            masks, late = grammars.masks([(first, []), (second, [])], allocate)
        found.append(masks)
        for matcher, mask in zip((first, second), masks, strict=True):
            wanted = np.zeros_like(mask)
            matcher.inner.deep_copy().unsafe_compute_mask_ptr(wanted.ctypes.data, wanted.nbytes)
            assert (mask == wanted).all()
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            assert not matcher.finishes(int(bits.argmax()))
    # The first mask of the third step is slow, so other threads compute all masks after it.
    assert num_late == [0, 0, 1, 2, 2, 2]
    assert all(np.shares_memory(each, found[0]) for each in found), "graphs read them in place"


def test_a_step_spends_a_bounded_time_on_masks(llm: LLM) -> None:
    grammars = llm.engine.input_processor.get_grammars()
    assert grammars is not None
    compiled = grammars.compile({"regex": "[ab]{51}"})
    matchers = [grammars.matcher(compiled, frozenset()) for _ in range(4)]
    token_id = np.unpackbits(matchers[0].mask.view(np.uint8), bitorder="little").argmax()
    for matcher in matchers:
        matcher.finishes(int(token_id))
    with patch.object(grammar, "MAX_STEP", 0.0):
        _, late = grammars.masks(
            [(each, []) for each in matchers], llm.engine.core.executor.mask_memory
        )
    assert late == [1, 2, 3]
    assert not compiled.compiled.is_slow


def test_a_mask_that_fails_ends_its_row_alone(llm: LLM) -> None:
    grammars = llm.engine.input_processor.get_grammars()
    assert grammars is not None
    compiled = grammars.compile({"regex": "[ab]{52}"})
    broken, other = (grammars.matcher(compiled, frozenset()) for _ in range(2))
    broken.mask = other.mask = None
    broken.inner = Mock()
    broken.inner.unsafe_compute_mask_ptr.side_effect = RuntimeError("broken")
    masks, late = grammars.masks([(broken, []), (other, [])], llm.engine.core.executor.mask_memory)
    assert not late
    assert not masks[0].any(), "no token may follow"
    assert masks[1].any()


def test_samples_wait_for_their_grammar(path: Path) -> None:
    """The grammar is ready late, as in a core process, which compiles it again in a thread."""
    is_late = threading.Event()
    params = params_of({"regex": "[ab]{6}"}, 3, n=3)
    with LLM(str(path), device="cpu", **OPTIONS) as llm:
        grammars = llm.engine.input_processor.get_grammars()
        assert grammars is not None
        (wanted,) = llm.generate([[5, 6]], params, use_tqdm=False)
        compile_it, begin = grammars.compile, grammars._begin_later
        calls = count()

        def begin_late(*args: Any) -> None:
            if next(calls) > 0:  # all but the first sample
                is_late.wait(60)
            begin(*args)

        with (
            patch.object(
                grammars, "compile", lambda asked: grammar.GuidanceGrammar(compile_it(asked).text)
            ),
            patch.object(grammars, "_begin_later", begin_late),
        ):
            llm.add_request([5, 6], params)
            while len(llm.engine.core.scheduler.postponed) < 2:
                llm.added.step()
            llm.engine.core.scheduler.check()
            is_late.set()
            done: list[RequestOutput] = []
            while not llm.added.is_finished():
                done += llm.added.step().finished
    assert [each.token_ids for each in done[0].outputs] == [
        each.token_ids for each in wanted.outputs
    ]


def test_what_waits_for_a_mask_can_be_aborted(path: Path) -> None:
    is_aborted = threading.Event()

    compute = grammar.compute_mask

    def stuck(*args: Any) -> None:
        if threading.current_thread().name.startswith("nanovllm-grammars"):
            is_aborted.wait(60)
        compute(*args)

    with (
        patch.object(grammar, "SLOW_MASK", -1.0),
        patch.object(grammar, "compute_mask", stuck),
        LLM(str(path), device="cpu", **OPTIONS) as llm,
    ):
        engine = llm.engine
        seq_id = llm.add_request([5, 6], params_of({"regex": "[ab]{60}"}, 0))
        while not engine.core.scheduler.postponed:
            llm.added.step()
        output = llm.added.abort(seq_id)
        assert output is not None
        assert output.finish_reason == "abort"
        assert llm.added.is_finished()
        engine.core.scheduler.check()
        is_aborted.set()


PATHOLOGICAL: list[dict[str, Any]] = [
    {"json": {"enum": [f"value {i} of many" for i in range(20_000)]}},
    {"json": {"type": "string", "pattern": "^(a|b|ab)*(a{1,500}b{1,500}){1,500}$"}},
    {"json": {"type": "array", "items": {"type": "string"}, "minItems": 50_000}},
    {"json": {"anyOf": [{"properties": {f"p{i}": {"type": "integer"}}} for i in range(800)]}},
    {"regex": "(.*a){30}.*b"},
    {"regex": "((a{0,100}){0,100}){0,100}"},
    {"grammar": 'start: a a a a a a a a\na: a a | "x" | '},
]


@pytest.mark.parametrize("asked", PATHOLOGICAL, ids=lambda asked: json.dumps(asked)[:40])
def test_a_pathological_grammar_holds_up_nobody(llm: LLM, asked: dict[str, Any]) -> None:
    """It is rejected or runs for a bounded time, so other requests wait no longer than that."""
    plain = [params_of(None, seed, max_tokens=20) for seed in range(4)]
    want = [output.token_ids for output in generate(llm, plain)]
    start = time.process_time()
    try:
        llm.engine.prepare([5, 6], params_of(asked, 0))
    except RequestError:
        return
    finally:
        assert time.process_time() - start < 5
    outputs = generate(llm, [*plain, params_of(asked, 0, max_tokens=20)])
    assert [output.token_ids for output in outputs[:4]] == want
    assert time.process_time() - start < 10


def refusal_of(llm: LLM, schema: Any) -> str | None:
    try:
        llm.engine.input_processor.get_grammars().compile({"json": schema})
    except RequestError as error:
        return str(error)
    return None


@pytest.mark.endurance
@pytest.mark.slow
def test_generated_schemas_with_the_default_model(smollm2: LLM, count: Callable[..., int]) -> None:
    """Checks a few schemas: `test_every_random_text_is_valid` checks more without a model."""
    params, num_refused, num_schemas = [], 0, count(500, few=8)
    for number in range(num_schemas):
        schema = random_schema(number, has_conditions=False)
        if (refusal := refusal_of(smollm2, schema)) is not None:
            num_refused += 1
            assert re.search(r"'[\w$]+' at #|oneOf|nsatisfiable", refusal), refusal
            continue
        seeds = range(count(3, few=2))
        params += [params_of({"json": schema}, seed, max_tokens=96) for seed in seeds]
    prompts = ["Fill in the form, in JSON:\n"] * len(params)
    outputs = smollm2.generate(prompts, params, use_tqdm=False)
    num_ended = 0
    for param, output in zip(params, outputs, strict=True):
        assert output.finish_reason in ("stop", "length"), output.error
        if output.finish_reason == "stop":
            num_ended += 1
            schema = dict(param.structured_outputs or {})["json"]
            validator = jsonschema.Draft202012Validator
            checked = validator(schema, format_checker=validator.FORMAT_CHECKER)
            assert checked.is_valid(json.loads(output.text)), (schema, output.text)
    assert num_refused <= max(0.15 * num_schemas, 3)
    assert num_ended >= len(params) / 4
