"""A logits processor changes only the logits of its own request, and fails only this request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from tests.checkpoints import MIN_GAP, TinyCheckpoint
from tests.devices import DEVICES
from tests.parallel.workers import forbid_what_was_said
from tests.test_edited_requests import MODES, OPTIONS
from tests.test_equals_transformers import make_prompts

pytestmark = pytest.mark.usefixtures("one_thread")
MAX_TOKENS = 12
HERE = "tests.test_logits_processors"


def follow_the_last(output_token_ids: list[int], logits: Tensor) -> Tensor:
    """Prefer a token that depends on the last token and on the number of output tokens."""
    bias = torch.zeros_like(logits)
    if output_token_ids:
        bias[(output_token_ids[-1] + len(output_token_ids)) % len(logits)] = 30.0
    return logits + bias


def spoil(output_token_ids: list[int], logits: Tensor) -> Tensor:
    """Modify all arguments of a processor, which must have no effect."""
    new = logits.clone()
    logits.fill_(torch.nan)
    output_token_ids.clear()
    return new


PROCESSORS: list[list[Any]] = [
    [],
    [forbid_what_was_said],
    [f"{HERE}:follow_the_last"],
    [],
    [spoil, follow_the_last, forbid_what_was_said],
    [f"{HERE}:forbid_what_was_said", spoil],
]


def greedy(processors: list[Any], **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logits_processors=processors,
        **options,
    )


@torch.inference_mode()
def reference(checkpoint: TinyCheckpoint, prompt: list[int], processors: list[Any]) -> list[int]:
    answer: list[int] = []
    while len(answer) < MAX_TOKENS:
        logits = checkpoint.model(torch.tensor([prompt + answer])).logits[0, -1]
        for each in processors:
            function = globals()[each.partition(":")[2]] if isinstance(each, str) else each
            logits = function(list(answer), logits)
        best, second = logits.topk(2).values.tolist()
        assert best - second > MIN_GAP, "choose another prompt"
        answer.append(int(logits.argmax()))
    return answer


@pytest.fixture(scope="module")
def wanted(tiny: Any) -> list[list[int]]:
    pairs = zip(make_prompts(), PROCESSORS, strict=False)
    return [reference(tiny("qwen3"), prompt, processors) for prompt, processors in pairs]


@DEVICES
@pytest.mark.parametrize("mode", list(MODES))
def test_every_processor_beside_rows_without(
    tiny: Any, wanted: list[list[int]], device: str, mode: str
) -> None:
    checkpoint, prompts = tiny("qwen3"), make_prompts()[: len(PROCESSORS)]
    assert wanted[0] == checkpoint.generate(prompts[0], MAX_TOKENS)
    params = [greedy(processors) for processors in PROCESSORS]
    options = {**OPTIONS, **MODES[mode]}
    if mode == "preempted":
        options["num_kvcache_blocks"] = 8
    with LLM(checkpoint.path, device=device, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.token_ids for output in outputs] == wanted
        assert mode != "preempted" or llm.engine.core.scheduler.num_preemptions > 0


def test_samples_and_other_edits(tiny: Any) -> None:
    """Processors run last: they see edited logits, and the tokens of their own sample."""
    seen: list[tuple[int, ...]] = []

    def look(output_token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append(tuple(output_token_ids))
        assert logits[7] == -torch.inf
        assert logits.dtype == torch.float32
        return logits

    params = SamplingParams(
        max_tokens=5,
        seed=3,
        n=3,
        ignore_eos=True,
        allowed_token_ids=[i for i in range(160) if i != 7],
        logits_processors=[look],
        logprobs=0,
    )
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        [output] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    want = [tuple(each.token_ids[:i]) for each in output.outputs for i in range(5)]
    assert sorted(seen) == sorted(want)
    assert output.error is None


class Unlucky:
    """Fails at the third token."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, output_token_ids: list[int], logits: Tensor) -> Any:
        if len(output_token_ids) < 2:
            return logits
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise TypeError("no words")


@DEVICES
@pytest.mark.parametrize("depth", [0, 1])
def test_failures_end_their_own_request(tiny: Any, device: str, depth: int) -> None:
    failing: list[tuple[Any, str]] = [
        (Unlucky(ValueError("not today")), r"failed: ValueError\('not today'\)"),
        (Unlucky(SystemExit(1)), r"failed: SystemExit\(1\)"),
        (Unlucky(Unspeakable()), "failed: Unspeakable"),
        (Unlucky(None), "must return the logits, a tensor, not NoneType"),
        (Unlucky(torch.zeros(3)), r"float32 logits \[160\], not torch.float32 \[3\]"),
        (Unlucky(torch.zeros(160).double()), "not torch.float64"),
        (Unlucky(torch.full((160,), torch.nan)), "or produce NaN"),
        (Unlucky(torch.full((160,), -torch.inf)), "exclude every token"),
        (f"{HERE}:no_such_function", "no_such_function"),
        (f"{HERE}:HERE", "is not a function"),
    ]
    prompt = make_prompts()[3]
    params = [*(greedy([spoil, each]) for each, _ in failing), greedy([])]
    with LLM(tiny("qwen3").path, device=device, depth=depth, **OPTIONS) as llm:
        *broken, plain = llm.generate([prompt] * len(params), params, use_tqdm=False)
        again = llm.generate([prompt], greedy([]), use_tqdm=False)
    assert plain.token_ids == again[0].token_ids == tiny("qwen3").generate(prompt, MAX_TOKENS)
    for output, (processor, match) in zip(broken, failing, strict=True):
        assert output.finish_reason == "error"
        assert len(output.token_ids) == (0 if isinstance(processor, str) else 2)
        with pytest.raises(RuntimeError, match=match):
            raise RuntimeError(output.error)
    assert "logits_processors[1] (Unlucky" not in str(broken[-1].error)


def test_a_step_cannot_wait_for_itself(tiny: Any) -> None:
    """A processor that calls its own engine gets an error; otherwise it would wait forever."""
    prompt = [1, 2, 3]
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        asks: list[Any] = [
            lambda *_: llm.generate([prompt]),
            lambda *_: next(llm.stream([prompt])),
            lambda *_: next(llm.generate_stream([prompt])),
            lambda *_: llm.score(prompt, [[4]]),
            lambda *_: llm.embed([prompt]),
            lambda *_: llm.step(),
            lambda *_: llm.abort_all(),
        ]
        params = [greedy([ask]) for ask in asks]
        outputs = llm.generate([prompt] * len(asks), params, use_tqdm=False)
        assert ["within its own step" in str(output.error) for output in outputs] == [True] * 7
        assert llm.generate([prompt], greedy([]), use_tqdm=False)[0].error is None


@pytest.mark.slow
def test_the_documented_example(capsys: Any) -> None:
    text = (Path(__file__).parents[1] / "docs" / "offline.md").read_text()
    example = next(part for part in text.split("```python\n") if "say_nothing_twice" in part)
    scope: dict[str, Any] = {}
    exec(example.partition("```")[0], scope)
    with scope["llm"] as llm:
        [output] = llm.generate("The rain in Spain", scope["params"], use_tqdm=False)
    assert capsys.readouterr().out.strip() == output.text.strip()
    assert len(set(output.token_ids)) == len(output.token_ids) > 5
