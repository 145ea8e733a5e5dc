"""vLLM's Python interface: typed options, conversations, request ids, steps."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.assembly import engine_config
from nanovllm.config import EngineConfig
from nanovllm.engine.engine_options import VLLM_OPTIONS, EngineOptions
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.features.states.state_pool import StateCounts
from nanovllm.outputs import StreamPiece
from tests.serve.byte_model import make_byte_model

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
ASK = [{"role": "user", "content": "What is 2 + 2?"}]
BEGUN = [*ASK, {"role": "assistant", "content": "It is"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "block_size": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"), max_len=512)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def async_llm(path: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(path, in_process=True, **OPTIONS)
    yield llm
    llm.close()


# Options


def test_the_signature_has_every_option() -> None:
    """Editors and type checkers use the TypedDict."""
    typed = {name: each.__forward_arg__ for name, each in EngineOptions.__annotations__.items()}
    aliases = {"block_size": typed.pop("block_size")}
    own = {field.name: str(field.type) for field in fields(EngineConfig) if field.name != "model"}
    assert aliases == {"block_size": own["kvcache_block_size"]}
    assert typed.pop("dtype") == f"{own.pop('dtype')} | torch.dtype"
    assert typed == own
    for engine in (LLM, AsyncLLM):
        assert engine.__init__.__annotations__["options"] == "Unpack[EngineOptions]"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float, "float32"),
        ("half", "float16"),
        ("float", "float32"),
        ("auto", "auto"),
    ],
)
def test_types_of_numbers_have_several_names(given: Any, name: str) -> None:
    assert engine_config("x", {"dtype": given}).dtype == name


def test_other_types_of_numbers_are_refused() -> None:
    for wrong in (torch.int8, "int8", None, 16):
        with pytest.raises(ConfigError, match="dtype must be"):
            engine_config("x", {"dtype": wrong})


def test_block_size_is_an_alias() -> None:
    assert engine_config("x", {"block_size": 32}).kvcache_block_size == 32
    with pytest.raises(TypeError, match="block_size is another name for kvcache_block_size"):
        engine_config("x", {"block_size": 32, "kvcache_block_size": 32})


def test_options_that_only_vllm_needs(caplog: pytest.LogCaptureFixture) -> None:
    given = {"trust_remote_code": True, "swap_space": 4, "enable_chunked_prefill": False}
    harmless = {"pipeline_parallel_size": 1, "cpu_offload_gb": 0, "tokenizer": None}
    expected = EngineConfig("x", seed=3)
    assert engine_config("x", {**given, **harmless, "seed": 3}) == expected
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "trust_remote_code has no effect: code from a repository is never run",
        "swap_space has no effect: there is no swap space",
        "pipeline_parallel_size 1 has no effect",
        "cpu_offload_gb 0 has no effect",
    ]
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2 is not supported"):
        engine_config("x", {"pipeline_parallel_size": 2})
    assert not {field.name for field in fields(EngineConfig)} & set(VLLM_OPTIONS)


@pytest.mark.parametrize("option", [{"enable_lora": True}, {"max_lora_rank": 8}])
def test_adapters_are_not_supported(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"_\w+: LoRA adapters are not supported"):
        engine_config("x", option)
    assert engine_config("x", {"enable_lora": False, "max_lora_rank": None}) == EngineConfig("x")


def test_options_of_image_processors_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    engine_config("x", {"mm_processor_kwargs": {"max_pixels": 1024}})
    reason = "images are resized as the checkpoint defines"
    assert caplog.messages == [f"mm_processor_kwargs has no effect: {reason}"]


def test_the_number_of_images_is_limited() -> None:
    assert EngineConfig("x").max_images == 16
    assert engine_config("x", {"limit_mm_per_prompt": {"image": 1, "video": 0}}).max_images == 1
    wrong = {"image": -1}, {"image": True}, {5: 1}, 7, 0, {"video": 1}, {"images": 0}, {"audio": -1}
    for limits in wrong:
        with pytest.raises(ConfigError, match="limit_mm_per_prompt must be"):
            engine_config("x", {"limit_mm_per_prompt": limits})


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"temprature": 1}, "; did you mean temperature?"),
        ({"max_token": 3}, "; did you mean max_tokens?"),
        ({"guided_json": {}}, "; did you mean structured_outputs?"),
        ({"guided_decoding": None}, "; did you mean structured_outputs?"),
        ({"xyzzy": 3}, "'xyzzy'"),
    ],
)
def test_unknown_sampling_parameters_have_suggestions(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(TypeError, match=r"SamplingParams got an unexpected") as error:
        SamplingParams(**options)
    assert str(error.value).endswith(hint)


def test_unknown_engine_options_have_suggestions() -> None:
    for engine in (LLM, AsyncLLM):
        with pytest.raises(TypeError, match=r"'max_seqs'; did you mean max_num_seqs\?"):
            engine("x", max_seqs=3)


# Conversations


def test_chat_continues_the_last_message_or_begins_none(llm: LLM) -> None:
    def prompt(messages: Any = ASK, **options: Any) -> str:
        [output] = llm.chat(messages, GREEDY, use_tqdm=False, **options)
        return llm.get_tokenizer().decode(output.prompt_token_ids)

    assert prompt().endswith("<|im_start|>assistant\n")
    assert prompt(add_generation_prompt=False).endswith("What is 2 + 2?<|im_end|>\n")
    assert prompt(BEGUN, continue_final_message=True).endswith("assistant\nIt is")
    both = {"add_generation_prompt": True, "continue_final_message": True}
    with pytest.raises(RequestError, match="mutually exclusive"):
        llm.chat(BEGUN, GREEDY, **both)
    # Both are accepted as arguments, as in vLLM, and in chat_template_kwargs.
    both["add_generation_prompt"] = False
    assert prompt(BEGUN, **both) == prompt(BEGUN, chat_template_kwargs=both)


def test_chat_shows_tools_and_calls_to_them(llm: LLM) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    called = [*ASK, {"role": "assistant", "tool_calls": [call]}]
    [output] = llm.chat(called, GREEDY, use_tqdm=False, tools=TOOLS)
    text = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert '{"type": "function", "function": {"name": "add"' in text
    assert '{"name": "add", "arguments": {"a": 2}}' in text
    call["function"]["arguments"] = "{"  # type: ignore[index]
    with pytest.raises(RequestError, match="tool_calls must be calls whose arguments"):
        llm.chat(called, GREEDY)


def test_chat_refuses_tools_that_the_template_cannot_show(llm: LLM) -> None:
    kwargs = {"chat_template": "{{ messages[0].content }}"}
    with pytest.raises(RequestError, match="does not show tools"):
        llm.chat(ASK, GREEDY, tools=TOOLS, chat_template_kwargs=kwargs)


def test_chat_streams(llm: LLM) -> None:
    [whole] = llm.chat(BEGUN, GREEDY, use_tqdm=False, continue_final_message=True, tools=TOOLS)
    pieces = list(llm.stream_chat(BEGUN, GREEDY, continue_final_message=True, tools=TOOLS))
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_an_async_chat_answers_as_the_other_does(llm: LLM, async_llm: AsyncLLM) -> None:
    options: dict[str, Any] = {"continue_final_message": True, "tools": TOOLS}

    async def ask(messages: Any) -> list[StreamPiece]:
        return [piece async for piece in async_llm.chat(messages, GREEDY, "mine", **options)]

    [whole] = llm.chat(BEGUN, GREEDY, use_tqdm=False, **options)
    pieces = asyncio.run(ask(BEGUN))
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert pieces[-1].output is not None
    assert pieces[-1].output.request_id == pieces[0].request_id == "mine"
    with pytest.raises(RequestError, match="one conversation, got 2"):
        asyncio.run(ask([BEGUN, BEGUN]))
    assert asyncio.run(async_llm.get_tokenizer()).eos_token == "<|im_end|>"


def test_there_may_be_no_tokenizer(path: Path) -> None:
    with (
        LLM(path, skip_tokenizer_init=True, load_format="dummy", **OPTIONS) as llm,
        pytest.raises(RequestError, match="no tokenizer is loaded with skip_tokenizer_init"),
    ):
        llm.get_tokenizer()


# Requests


def test_max_tokens_none_is_as_long_as_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, min_tokens=100, ignore_eos=True)
    assert params.max_tokens is None
    [output] = llm.generate([[65] * 500], params, use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (12, "length")


def test_requests_have_ids_of_their_callers(llm: LLM) -> None:
    seq_id = llm.add_request([1, 2, 3], LONG)
    llm.add_request([4, 5], LONG, request_id="mine")
    ids = set()
    while len(ids) < 2:
        ids |= {piece.request_id for piece in llm.step().pieces}
    assert ids == {str(seq_id), "mine"}
    assert llm.abort("no such request") is None
    aborted = llm.abort("mine")
    assert aborted is not None
    assert (aborted.request_id, aborted.prompt_token_ids) == ("mine", [4, 5])
    assert llm.abort("mine") is None
    assert llm.abort(str(seq_id)) is not None
    assert llm.is_finished()
    with pytest.raises(RequestError, match="request_id must be a string, got 3"):
        llm.add_request([1], request_id=3)  # type: ignore[arg-type]


def test_async_requests_are_aborted_by_the_ids_of_their_callers(async_llm: AsyncLLM) -> None:
    # LONG: an abort that is sent now may be handled a few steps later.
    last = ask_and_pause(async_llm, lambda: async_llm.abort("mine"), LONG)
    assert last.output is not None
    assert (last.output.request_id, last.output.finish_reason) == ("mine", "abort")


def test_a_step_returns_the_new_tokens_of_every_request(llm: LLM) -> None:
    prompts = [[65, 66], [67] * 40, [68]]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    tokens: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
    finished = {}
    while not llm.is_finished():
        step = llm.step()
        for piece in step.pieces:
            tokens[piece.seq_id] += piece.token_ids
            assert len(piece.token_ids) <= 1
        ended = {piece.seq_id: piece.output for piece in step.pieces if piece.finished}
        assert ended == {output.seq_id: output for output in step.finished}
        assert all(output.finished for output in step.finished)
        finished |= ended
    assert list(tokens.values()) == [output.token_ids for output in outputs]
    assert [finished[seq_id].text for seq_id in ids] == [output.text for output in outputs]


def test_steps_of_others_lose_nothing(llm: LLM) -> None:
    """Outputs for requests of `add_request` are kept for the next `step`."""
    [alone] = llm.generate([[65, 66]], GREEDY, use_tqdm=False)
    seq_id = llm.add_request([65, 66], GREEDY)
    llm.generate([[67] * 40], GREEDY, use_tqdm=False)
    pieces = []
    while not llm.is_finished():
        pieces += llm.step().pieces
    assert [token for piece in pieces for token in piece.token_ids] == alone.token_ids
    assert {piece.seq_id for piece in pieces} == {seq_id}


def test_unknown_options_of_a_conversation_are_refused(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for chat in (llm.chat, llm.stream_chat):
        with pytest.raises(TypeError, match="unexpected keyword argument 'unheard_of'"):
            chat(messages, unheard_of=1)  # type: ignore[call-arg]


# Speed


def test_a_progress_bar_counts_prompts_and_tokens(llm: LLM) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        llm.generate([[1, 2], [3]], GREEDY)
    assert "2/2" in shown.getvalue()
    assert re.search(r"input [1-9]\d* tok/s, output [1-9]\d* tok/s", shown.getvalue())


# Debugging


def ask_and_pause(
    llm: AsyncLLM, meanwhile: Callable[[], object], given: SamplingParams = GREEDY
) -> StreamPiece:
    """Call a function while the core is in its first step, at a breakpoint."""
    paused, go_on = threading.Event(), threading.Event()

    def hook() -> None:
        assert threading.current_thread().name == "nanovllm-core"
        paused.set()
        assert go_on.wait(240)

    async def ask() -> StreamPiece:
        params = replace(given, logits_processors=[f"{__name__}:pause"])
        answer = llm.generate([1, 2, 3], params, "mine", is_streaming=False)
        task = asyncio.ensure_future(anext(answer))
        assert await asyncio.to_thread(paused.wait, 240)
        assert (task.done(), llm.error) == (False, None)
        meanwhile()
        go_on.set()
        return await task

    with patch.object(sys, "breakpointhook", hook):
        return asyncio.run(ask())


def pause(_: list[int], logits: torch.Tensor) -> torch.Tensor:
    breakpoint()
    return logits


def test_a_core_in_this_process_may_pause(async_llm: AsyncLLM) -> None:
    last = ask_and_pause(async_llm, lambda: None)
    assert last.output is not None
    assert (last.output.finish_reason, len(last.output.token_ids)) == ("length", 6)


def test_the_config_has_the_number_of_sequences_that_can_run(tiny: Any) -> None:
    """The memory for recurrent states limits it; a server derives the size of its queue from it."""
    counts = StateCounts(num_slots=3, num_snapshots=4)
    with patch("nanovllm.worker.state_cache.choose_state_counts", return_value=counts):
        llm = AsyncLLM(tiny("qwen3.5").path, in_process=True, skip_tokenizer_init=True, **OPTIONS)
    llm.close()
    assert llm.config.max_num_seqs == 3


def test_a_core_in_this_process_that_fails(path: Path) -> None:
    llm = AsyncLLM(path, in_process=True, **OPTIONS)

    async def ask() -> Any:
        return [piece async for piece in llm.generate([1, 2, 3], GREEDY)]

    with (
        patch("nanovllm.engine.core.EngineCore.step", side_effect=KeyError("quit")),
        pytest.raises(EngineError, match="the engine core failed: KeyError"),
    ):
        asyncio.run(ask())
    with pytest.raises(EngineError, match="the engine core failed"):
        asyncio.run(ask())
    llm.close()
    with pytest.raises(ConfigError, match="in_process runs one engine"):
        AsyncLLM(path, in_process=True, data_parallel_size=2)
