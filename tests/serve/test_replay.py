"""Replies that come back in prompts keep the token ids that they were generated with."""

from __future__ import annotations

import contextlib
import json
import random
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast, Qwen3Config

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.engine.input_processor import InputProcessor, Vocabulary
from nanovllm.outputs import StreamPiece
from nanovllm.serve.replay import KeptReply, ReplayCache, Reply, canonical
from tests.checkpoint.test_tokenizer import (
    BYTE_LEVEL,
    PRE_TOKENIZERS,
    SENTENCEPIECE,
    write_vocabulary,
)
from tests.checkpoints import FAMILIES, SIZES, make_checkpoint
from tests.serve.byte_model import byte_tokenizer
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running
from tests.serve.templates import read_template

BLOCK = 16
WORDS = "the weather of Rome is sunny, and nothing else matters; so we look again. " * 20
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
NOTE = json.dumps(WORDS)[1:-1]


def call(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tagged(call: str) -> str:
    return f"<tool_call>{call}</tool_call>"


COMPACT = tagged(f'\n{{"name":"weather","arguments":{{"city":"Rome","note":"{NOTE}"}}}}\n')
REPLIES = {
    "compact": COMPACT,
    "odd spaces": tagged(f'{{ "name" :"weather",\n"arguments": {{"note" :"{NOTE}" ,"n":[ 1]}} }}'),
    "keys": call(f'{{"note": "{NOTE}", "10": 1, "9": {{"b": 1, "a": 2}}, "a": true}}'),
    "name last": tagged(f'{{"arguments": {{"note": "{NOTE}"}}, "name": "weather"}}'),
    "numbers": call(f'{{"x": 1.0, "y": 1e3, "z": 0.50, "note": "{NOTE}"}}'),
    "escapes": call(f'{{"x": "caf\\u00e9 \\/ \\u65e5", "note": "{NOTE}"}}'),
    "text before": f"{WORDS}\n\n\n{COMPACT}",
    "two calls": f"{COMPACT}\n\n{COMPACT}",
    "reasoning": f"<think>\n{WORDS}\n</think>\n\nSee.\n{COMPACT}",
    "text": f"<think>{WORDS}</think>{WORDS}\n\n",
}


class ForcedLLM:
    """An engine that generates given texts, split into random tokens."""

    def __init__(self, llm: AsyncLLM, spare_blocks: int) -> None:
        self._llm, self.text = llm, ""
        self.spare_blocks = spare_blocks  # blocks that may be computed besides new text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(
        self, prompt: list[int], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[StreamPiece, None]:
        """Generate `text`; add the stop token, which the engine does not sample after grammars."""
        forced = replace(params, structured_outputs={"choice": [self.text]}, temperature=1.0)
        stop_id = self.input_processor.tokenizer.eos_token_id
        async with contextlib.aclosing(self._llm.generate(prompt, forced, **options)) as pieces:
            async for piece in pieces:
                if piece.output is not None:
                    piece.output.outputs[0].token_ids.append(stop_id)
                    piece = replace(piece, token_ids=[*piece.token_ids, stop_id])
                yield piece


def trained_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that can split most texts in many ways."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet
    )
    backend.train_from_iterator([read_template("qwen3"), *REPLIES.values()], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[0],
        additional_special_tokens=special[1:],
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def forced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of a tiny model with full attention, or of a hybrid one."""
    folder = tmp_path_factory.mktemp("forced")
    tokenizer = trained_tokenizer(400)
    config = Qwen3Config(**SIZES, head_dim=16) if request.param == "qwen3" else FAMILIES["qwen3.5"]
    sizes = {"vocab_size": 512, "max_position_embeddings": 16384}
    config = type(config)(**{**config.to_dict(), **sizes})
    make_checkpoint(folder, config)
    tokenizer.chat_template = read_template("qwen3")
    tokenizer.save_pretrained(folder)
    llm = AsyncLLM(
        folder, in_process=True, device="cpu", dtype="float32", max_model_len=16384,
        kvcache_block_size=BLOCK, num_kvcache_blocks=2048, max_num_seqs=4,
    )  # fmt: skip
    try:
        with running(ForcedLLM(llm, 1 if request.param == "qwen3" else 2)) as server:
            yield server
    finally:
        llm.close()


class Client:
    """An agent: sends all turns so far, and executes the calls of the reply."""

    num_computed = num_new = num_completed = 0  # of the last request, and of its reply

    def __init__(self, server: Running) -> None:
        self.server, self.num_before = server, 0
        self.turns: list[dict[str, Any]] = []

    def step(self, text: str) -> None:
        """Let the model say `text`; append it and the results of its calls to the turns."""
        self.server.llm.text = text
        num_prompt, num_cached, self.num_completed = self.ask()
        self.num_computed = num_prompt - num_cached
        self.num_new = num_prompt - self.num_before
        self.num_before = num_prompt + self.num_completed

    def ask(self) -> tuple[int, int, int]:
        raise NotImplementedError

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.server.post(path, **body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


def through_javascript(arguments: str) -> str:
    """Parse and write JSON as JavaScript does: integer-like keys come first, 1.0 becomes 1."""

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            keys = sorted(
                value, key=lambda key: (not key.isdigit(), int(key) if key.isdigit() else 0)
            )
            return {key: ordered(value[key]) for key in keys}
        if isinstance(value, list):
            return [ordered(each) for each in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(ordered(json.loads(arguments)), separators=(",", ":"), ensure_ascii=False)


class ChatClient(Client):
    tools: Any = ({"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},)

    def ask(self) -> tuple[int, int, int]:
        turns = self.turns or [{"role": "user", "content": "Weather?"}]
        body = self.post("/v1/chat/completions", messages=turns, tools=self.tools)
        message, usage = body["choices"][0]["message"], body["usage"]
        calls = message.get("tool_calls") or []
        for each in calls:
            each["function"]["arguments"] = through_javascript(each["function"]["arguments"])
        said = {"role": "assistant", "content": (message["content"] or "").strip()}
        said |= {name: message[name] for name in ("reasoning_content",) if name in message}
        results = [{"role": "tool", "tool_call_id": each["id"], "content": "ok"} for each in calls]
        more = results or [{"role": "user", "content": "And now?"}]
        self.turns = [*turns, said | ({"tool_calls": calls} if calls else {}), *more]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, usage["completion_tokens"]


class ResponsesClient(Client):
    tools: Any = ({"type": "function", "name": "weather", "parameters": SCHEMA},)

    def ask(self) -> tuple[int, int, int]:
        turns = self.turns or [{"role": "user", "content": "Weather?"}]
        lines = self.server.post("/v1/responses", input=turns, tools=self.tools, stream=True)
        body = json.loads(lines.text.split("data: ")[-1])["response"]
        usage = body["usage"]
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        output = "function_call_output"
        results = [{"type": output, "call_id": each["call_id"], "output": "ok"} for each in calls]
        more = results or [{"role": "user", "content": "And now?"}]
        self.turns = [*turns, *body["output"], *more]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return usage["input_tokens"], cached, usage["output_tokens"]


class MessagesClient(Client):
    tools: Any = ({"name": "weather", "input_schema": SCHEMA},)

    def ask(self) -> tuple[int, int, int]:
        turns = self.turns or [{"role": "user", "content": "Weather?"}]
        body = {"messages": turns, "tools": self.tools}
        count = self.post("/v1/messages/count_tokens", **body)["input_tokens"]
        found = self.post("/v1/messages", **body, max_tokens=10**6)
        usage = found["usage"]
        calls = [block["id"] for block in found["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": i, "content": "ok"} for i in calls]
        more: Any = results or "And now?"
        content = json.loads(through_javascript(json.dumps({"": found["content"]})))[""]
        said = {"role": "assistant", "content": content}
        self.turns = [*turns, said, {"role": "user", "content": more}]
        assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]
        return count, usage["cache_read_input_tokens"], usage["output_tokens"]


class SplittingLLM(FakeLLM):
    """Generates a text in random pieces, each tokenized alone, and a stop token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.input_processor = InputProcessor(
            Vocabulary(trained_tokenizer(400), frozenset()), 400, 0
        )
        self.replies: list[list[int]] = []

    async def generate(
        self, prompt: list[int], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[StreamPiece, None]:
        self.asked.append((prompt, params))
        self.seed += 1
        pieces = self._cut()
        ids = [self.input_processor.encode(piece) for piece in pieces]
        ids[-1] = [*ids[-1], self.input_processor.tokenizer.eos_token_id]
        self.replies.append([i for each in ids for i in each])
        for piece, each in zip(pieces, ids, strict=True) if options["is_streaming"] else ():
            yield StreamPiece(0, piece, each, None)
        output = self._output(prompt)
        output.outputs[0].token_ids[:] = self.replies[-1]
        yield StreamPiece(0, "", [], output)

    def last_tokens(self) -> list[int]:
        """Return the last prompt and the reply to it, without the stop token."""
        return [*self.asked[-1][0], *self.replies[-1][:-1]]


@pytest.fixture(scope="module")
def splitting() -> Iterator[Running]:
    with running(SplittingLLM(max_len=10**5), chat_template=read_template("qwen3")) as server:
        yield server


CLIENTS = [ChatClient, ResponsesClient, MessagesClient]


@pytest.mark.parametrize("kind", CLIENTS)
def test_prompts_begin_with_the_last_prompt_and_its_reply(
    splitting: Running, kind: type[Client]
) -> None:
    client, llm = kind(splitting), splitting.llm
    for number, (name, text) in enumerate(REPLIES.items()):
        before = llm.last_tokens() if number else []
        client.step(text)
        prompt = llm.asked[-1][0]
        assert prompt[: len(before)] == before, name
        assert len(prompt) - len(before) < 200
        assert len(llm.replies[-1]) >= 300


@pytest.mark.endurance
@pytest.mark.slow
def test_later_requests_compute_only_what_is_new(
    forced: Running, count: Callable[..., int]
) -> None:
    client, spare = ChatClient(forced), forced.llm.spare_blocks * BLOCK
    words = WORDS[: count(len(WORDS), few=len(WORDS) // 4)]
    for number, (name, text) in enumerate(REPLIES.items()):
        client.step(text.replace(WORDS, words))
        print(name, client.num_completed, client.num_new, client.num_computed)
        assert client.num_completed >= count(300, few=3 * spare)
        assert number == 0 or client.num_computed <= client.num_new + spare, name


def test_edited_replies_are_tokenized_again(splitting: Running) -> None:
    client, llm = ChatClient(splitting), splitting.llm
    client.step(COMPACT)
    before = llm.last_tokens()
    turns = json.loads(json.dumps(client.turns))
    turns[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Bern"}'
    splitting.post("/v1/chat/completions", messages=turns, tools=client.tools)
    prompt = llm.asked[-1][0]
    text = llm.input_processor.tokenizer.decode(prompt)
    assert prompt[: len(before)] != before
    assert prompt == llm.input_processor.encode(text, add_special_tokens=False)
    assert "Bern" in text
    splitting.post(
        "/v1/chat/completions", messages=client.turns, cache_salt="x", tools=client.tools
    )
    assert llm.asked[-1][0][: len(before)] != before


def test_retries_are_told_apart(splitting: Running) -> None:
    llm, found = splitting.llm, []
    for text in ("The first answer.", "The second answer."):
        client = ChatClient(splitting)
        client.turns = [{"role": "user", "content": "A retry?"}]
        client.step(text)
        found.append((client.turns, llm.last_tokens()))
    for turns, before in found:
        splitting.post("/v1/chat/completions", messages=turns, tools=ChatClient.tools)
        assert llm.asked[-1][0][: len(before)] == before
        body = {"messages": turns, "tools": ChatClient.tools}
        counted = splitting.post("/tokenize", **body).json()
        assert counted["tokens"] == llm.asked[-1][0]


def tokenizers(folder: Path) -> dict[str, Any]:
    """Return tokenizers that treat the start of a text, and spaces, in different ways."""
    spaced = Tokenizer(models.BPE({piece: i for i, piece in enumerate(["<unk>", *PIECES])}, []))
    spaced.normalizer = normalizers.Replace(" ", "▁")
    spaced.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    first = Tokenizer(models.BPE({piece: i for i, piece in enumerate(["<unk>", *PIECES])}, []))
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    first.decoder = decoders.Metaspace(prepend_scheme="first")
    always = Tokenizer(models.BPE({piece: i for i, piece in enumerate(["<unk>", *PIECES])}, []))
    always.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    always.decoder = decoders.Metaspace(prepend_scheme="always")
    wrapped = {
        name: PreTrainedTokenizerFast(tokenizer_object=each, unk_token="<unk>", eos_token="</s>")
        for name, each in (("spaced", spaced), ("first", first), ("always", always))
    }
    stripping = trained_tokenizer(400)
    stripping.add_special_tokens({"eos_token": AddedToken("<|end|>", rstrip=True)})
    loaded = load_tokenizer(find_checkpoint("smollm2"))
    vocabularies: dict[str, dict[str, Any]] = {
        **{f"gguf-{pre}": {**BYTE_LEVEL, "pre": pre} for pre in PRE_TOKENIZERS},
        "gguf-prefix": {**SENTENCEPIECE, "add_space_prefix": True},
        "gguf-no-prefix": {**SENTENCEPIECE, "add_space_prefix": False},
    }
    read = {
        name: load_tokenizer(write_vocabulary(folder / f"{name}.gguf", **each))
        for name, each in vocabularies.items()
    }
    return {"bytes": byte_tokenizer(), "smollm2": loaded, "rstrip": stripping, **wrapped, **read}


PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz.:\n<>/|_", "ab", "▁a", "▁th", "he", "is", "▁is"]


NAMES = ["bytes", "smollm2", "rstrip", "spaced", "first", "always", "gguf-prefix", "gguf-no-prefix"]


@pytest.mark.parametrize("name", [*NAMES, *(f"gguf-{pre}" for pre in PRE_TOKENIZERS)])
def test_prompts_decode_to_the_text_with_the_kept_replies(name: str, tmp_path: Path) -> None:
    tokenizer, chance = tokenizers(tmp_path)[name], random.Random(0)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    stop, stop_id = tokenizer.eos_token, tokenizer.eos_token_id
    cache = ReplayCache(encode)

    def read(before: str, text: str) -> Reply:
        return Reply("", text.strip(), ())

    expected, text = "", ""
    for turn in range(30):
        words = chance.choices(["this is", "a lab", "the", "hello"], k=chance.randint(1, 9))
        asked = f"{' '.join(words)}{stop}\nassistant:\n"
        text, expected = text + asked, expected + asked
        prompt = cache.encode(text, None, read)
        assert decode(prompt.token_ids) == decode(encode(expected)), turn
        said = "".join(chance.choices("abc he is the ", k=chance.randint(1, 40))).strip() or "a"
        ids = [i for each in said for i in encode(each)] if turn % 2 else encode(said)
        cache.keep(prompt, KeptReply(Reply("", said, ()), array("i", ids), stop_id, stop))
        cache.check()
        space = chance.choice(["", " ", "\n"])
        # The first space of a text may have no token, unlike one after a prompt.
        generated = decode([*prompt.token_ids, *ids]).removeprefix(decode(prompt.token_ids))
        text, expected = f"{text}{space}{said}{stop}", f"{expected}{generated}{stop}"


def test_the_least_recently_used_replies_are_dropped() -> None:
    cache = ReplayCache(lambda text: [*text.encode()], max_bytes=10_000)

    def read(before: str, text: str) -> Reply:
        return Reply("", text, ())

    def reply(text: str) -> KeptReply:
        return KeptReply(Reply("", text, ()), array("i", [300, 301]), ord("$"), "$")

    prompts = [cache.encode(f"{i}: assistant", None, read) for i in range(50)]
    for i, prompt in enumerate(prompts):
        cache.keep(prompt, reply("same"))
        cache.keep(prompt, reply("same"))  # replaces the first one
        cache.check()
        kept = cache.encode(f"{prompts[0].text}same$", None, read)
        assert kept.token_ids == [*prompts[0].text.encode(), 300, 301, ord("$")], i
    dropped = cache.encode(f"{prompts[1].text}same$", None, read)
    assert 300 not in dropped.token_ids
    for number in range(500):
        cache.keep(prompts[0], reply(str(number)))
        cache.check()


def test_arguments_are_compared_as_values() -> None:
    same = ['{"a": 1.0, "b": [1e2]}', '{"b":[100],"a":1}', '{"b": [1E2], "a": 1}']
    assert len({canonical(each) for each in same}) == 1
    others = ['{"a": true}', '{"a": 1}', '{"a": "1"}', '{"a": 1.5}', '{"a": null}', '{"a": ']
    assert len({canonical(each) for each in others}) == len(others)
    assert canonical("[" * 100_000) == "[" * 100_000
