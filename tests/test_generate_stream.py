"""`LLM.generate_stream`: any number of prompts, read lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import RequestError
from tests.checkpoints import TinyCheckpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], TinyCheckpoint]) -> Iterator[LLM]:
    path = tiny("qwen3").path
    with LLM(
        path,
        device="cpu",
        dtype="float32",
        kvcache_block_size=16,
        max_num_seqs=4,
        max_model_len=128,
        skip_tokenizer_init=True,
    ) as llm:
        yield llm


PROMPTS = [[i % 50 + 1, 2, 3 + i % 7] for i in range(40)]


def test_outputs_are_those_of_generate_and_prompts_are_read_late(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=1 + i % 9, ignore_eos=True) for i in range(40)
    ]
    num_read = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal num_read
        for prompt in PROMPTS:
            num_read += 1
            yield prompt

    found: dict[int, list[int]] = {}
    for index, output in llm.generate_stream(prompts(), iter(params)):
        assert num_read - len(found) <= 8 + 4  # two batches, and the one that has just finished
        found[index] = output.token_ids
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [found[i] for i in range(40)] == [output.token_ids for output in expected]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_few_prompts(llm: LLM, count: int) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    indices = [index for index, _ in llm.generate_stream(PROMPTS[:count], params)]
    assert sorted(indices) == list(range(count))


def test_leaving_early_frees_everything(llm: LLM) -> None:
    for index, _ in llm.generate_stream(PROMPTS, SamplingParams(max_tokens=3)):
        if index > 3:
            break
    assert llm.is_finished()


def test_a_bad_prompt_is_named(llm: LLM) -> None:
    prompts = [*PROMPTS[:20], [10**9]]
    with pytest.raises(RequestError, match=r"^prompts\[20\]: "):
        list(llm.generate_stream(prompts, SamplingParams(max_tokens=2)))
    assert llm.is_finished()


def test_a_dict_is_one_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    ((index, output),) = llm.generate_stream(prompt, params)
    assert (index, output.prompt_token_ids) == (0, PROMPTS[0])
    # A string is one prompt, not a sequence of letters.
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        list(llm.generate_stream("some text", params))


@pytest.mark.parametrize("params", [[SamplingParams(max_tokens=2)] * 20, [{"max_tokens": 2}], {}])
def test_no_prompt_goes_without_its_parameters(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match=r"one for each prompt, got .* for prompts\[(20|0)\]"):
        list(llm.generate_stream(PROMPTS, params))
    assert llm.is_finished()
