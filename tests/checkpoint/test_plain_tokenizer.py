"""The tokenizer without transformers equals the one that transformers would build."""

from __future__ import annotations

import copy
import json
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.plain_tokenizer import PlainTokenizer
from nanovllm.checkpoint.tokenizer import load_tokenizer
from tests.checkpoint.test_tokenizer import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    TEXTS,
    needs_smollm2,
    write_vocabulary,
)

CASES: dict[str, dict[str, Any]] = {
    "bytes": {**BYTE_LEVEL, "pre": "gpt-2"},
    "bytes, bos": {**BYTE_LEVEL, "pre": "llama-bpe"},
    "bytes, bos and eos": {
        **BYTE_LEVEL,
        "pre": "qwen2",
        "add_bos_token": True,
        "add_eos_token": True,
    },
    "bytes, eos is a plain token": {**BYTE_LEVEL, "pre": "qwen2", "eos_token_id": 260},
    "bytes, more roles": {
        **BYTE_LEVEL,
        "pre": "qwen2",
        "unknown_token_id": 271,
        "padding_token_id": 268,
    },
    "pieces": SENTENCEPIECE,
    "pieces without a space": {**SENTENCEPIECE, "add_space_prefix": False, "add_bos_token": False},
}


@pytest.mark.parametrize("metadata", CASES.values(), ids=CASES.keys())
def test_equals_transformers(tmp_path: Path, metadata: dict[str, Any]) -> None:
    plain = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **metadata))
    assert isinstance(plain, PlainTokenizer)
    other = plain._make_transformers()
    assert plain.special_tokens_map == other.special_tokens_map
    assert plain.eos_token_id == other.eos_token_id
    assert len(plain) == len(other)
    assert plain.get_vocab() == other.get_vocab()
    assert plain.added_tokens_decoder == other.added_tokens_decoder
    backends = [json.loads(each.backend_tokenizer.to_str()) for each in (plain, other)]
    # The post-processors are written differently; their results are compared below.
    assert backends[0] | {"post_processor": None} == backends[1] | {"post_processor": None}
    ids = range(len(metadata["tokens"]))
    assert plain.convert_ids_to_tokens(ids) == other.convert_ids_to_tokens(ids)
    assert plain._transformers is None  # not created so far
    rng = random.Random(0)
    marks = ["<|im_start|>", "<|im_end|>", "<think>", "</s>", "<s>", "<|end|>", "<unk>", " hello "]
    texts = [*TEXTS, *("".join(rng.choices([*marks, *"helo é1\n"], k=12)) for _ in range(200))]
    for text in texts:
        for add in (True, False):
            ids = plain.encode(text, add_special_tokens=add)
            assert ids == other.encode(text, add_special_tokens=add), text
        for skip in (True, False):
            assert plain.decode(ids, skip) == other.decode(ids, skip), text
    num_tokens = len(metadata["tokens"])
    for _ in range(200):
        ids = rng.choices(range(num_tokens), k=8)
        assert plain.decode(ids, True) == other.decode(ids, True)


def test_everything_else_is_transformers_own(tmp_path: Path) -> None:
    plain = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **CASES["bytes, bos"]))
    assert plain("hello")["input_ids"] == [269, 260]
    assert plain.tokenize("hello") == ["hello"]
    with pytest.raises(AttributeError, match="no_such"):
        plain.no_such  # noqa: B018
    with pytest.raises(ValueError, match="clean_up"):
        plain.decode([260], clean_up_tokenization_spaces=True)


def test_it_can_be_copied(tmp_path: Path) -> None:
    plain = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **CASES["bytes"]))
    assert copy.copy(plain).encode("hello") == [260]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(plain)  # a clear error, not infinite recursion


@needs_smollm2
def test_the_default_model_needs_no_transformers() -> None:
    script = f"""
import sys
from types import SimpleNamespace
sys.modules["transformers"] = sys.modules["torch"] = None
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.engine.chat_template import ChatTemplate
from nanovllm.serve.server_options import ServerOptions
from nanovllm.serve.service import Service
tokenizer = load_tokenizer(find_checkpoint("smollm2", need_weights=False))
template, names = ChatTemplate(tokenizer.chat_template), tokenizer.special_tokens_map
ids = tokenizer.encode(template.render([{{"role": "user", "content": "Hi"}}], **names))
print(tokenizer.decode(ids) == {smollm2_prompt()!r})
tokens = tokenizer.added_tokens_decoder, tokenizer.convert_ids_to_tokens(ids)
text = tokenizer.backend_tokenizer.to_str()
processor = SimpleNamespace(tokenizer=tokenizer, encode=tokenizer.encode)
llm = SimpleNamespace(input_processor=processor, replicas=[])
Service(llm, ServerOptions(served_model_name=("smollm2",)))
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("True\n", "")


def smollm2_prompt() -> str:
    tokenizer = load_tokenizer(find_checkpoint("smollm2", need_weights=False))
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text
