"""A model that plays a script: it calls a tool after a user's turn, and answers after a result.

Its weights are constructed, so that it works at any context length and temperature. Head h of the
only layer attends to the token h + 1 places before (the rotary embedding alone decides that), and
copies the code of this token: BITS numbers, 1 or -1. Each neuron of the MLP recognizes the last
tokens of one position in the script, and writes the code of the token that follows. If no neuron
recognizes anything, the model ends its turn.

    residual: | code of the token | codes seen by each head | code of the next token | 1 |
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer

BITS, HEADS, GAP, CONTEXT = 16, 10, 30.0, 131072
NEXT, ONE = BITS * (HEADS + 1), BITS * (HEADS + 2)  # columns of the residual
WIDTH = 208
MULTIPLIER = 40503  # odd, so that codes differ
AFTER_USER = "<|im_end|>\n<|im_start|>assistant\n"
AFTER_RESULT = "_response>" + AFTER_USER


def call_of(name: str, arguments: dict[str, object]) -> str:
    """Return a call as models write it, but not this template: without spaces."""
    call = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>\n{call}\n</tool_call>"


def make_scripted_model(folder: Path, call: str, answer: str) -> Path:
    """Write a checkpoint whose model says `call` after a user's turn, and `answer` after a result.

    It may say some text before the call.
    """
    tokenizer = load_tokenizer(find_checkpoint("smollm2"))
    tokenizer.save_pretrained(folder)
    # ChatML with tool calls as in Qwen3: results in a row share one turn.
    shutil.copy(Path(__file__).with_suffix(".jinja"), folder / "chat_template.jinja")
    positions = dict(_script(tokenizer, call, answer))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=len(positions),
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=BITS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
        rope_theta=10000.0,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        _write(model, positions)
    model.save_pretrained(folder)
    return folder


Seen = tuple[int, ...]


def _script(
    tokenizer: PreTrainedTokenizerBase, call: str, answer: str
) -> Iterable[tuple[Seen, tuple[int, float]]]:
    """Yield the last tokens of each position, the next token, and a weight.

    The weight of the second reply is larger, because what precedes it includes AFTER_USER.
    """
    known: dict[Seen, int] = {}
    for before, reply, weight in ((AFTER_USER, call, 1.0), (AFTER_RESULT, answer, 4.0)):
        prompt, *_ = ids, reply_ids = [
            tokenizer.encode(text, add_special_tokens=False)
            for text in (before, f"{reply}{tokenizer.eos_token}")
        ]
        assert len(ids) <= HEADS + 1
        for i, token in enumerate(reply_ids):
            seen = tuple([*prompt, *reply_ids[:i]][-HEADS - 1 :] if i else prompt)
            assert known.setdefault(seen, token) == token, f"ambiguous: {tokenizer.decode(seen)!r}"
            yield seen, (token, weight)


def _write(model: Qwen3ForCausalLM, positions: dict[Seen, tuple[int, float]]) -> None:
    size, bits = model.config.vocab_size, torch.arange(BITS)
    numbers = torch.arange(size) * MULTIPLIER % 2**BITS
    codes = (numbers[:, None] >> bits & 1) * 2.0 - 1  # [vocabulary, BITS]
    for parameter in model.parameters():
        parameter.zero_()
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
        norm.weight.fill_(1.0)
    model.model.embed_tokens.weight[:, :BITS] = codes
    model.model.embed_tokens.weight[:, ONE] = 1.0
    # Sharp attention; the key is that of position 0 before the rotation, and the query of head h
    # that of position -(h + 1).
    attention.q_norm.weight.fill_(20.0)
    attention.k_norm.weight.fill_(20.0)
    half = BITS // 2
    attention.k_proj.weight[:half, ONE] = 1.0
    frequencies = 10000.0 ** (-torch.arange(half) * 2 / BITS)
    for head in range(HEADS):
        start, angles = head * BITS, -(head + 1) * frequencies
        attention.q_proj.weight[start : start + half, ONE] = angles.cos()
        attention.q_proj.weight[start + half : start + BITS, ONE] = angles.sin()
        attention.o_proj.weight[start + BITS + bits, start + bits] = 1.0
    # The factors undo the norms before attention and before the MLP.
    attention.v_proj.weight[:, :BITS] = torch.eye(BITS) * ((BITS + 1) / WIDTH) ** 0.5
    norm_factor = ((BITS * (HEADS + 1) + 1) / WIDTH) ** 0.5
    for i, (seen, (token, weight)) in enumerate(positions.items()):
        for back, each in enumerate(reversed(seen)):
            columns = slice(back * BITS, (back + 1) * BITS)
            mlp.gate_proj.weight[i, columns] = codes[each] * 20 * norm_factor
        mlp.gate_proj.weight[i, ONE] = -20 * norm_factor * (BITS * len(seen) - 1)
        mlp.up_proj.weight[i, ONE] = norm_factor
        mlp.down_proj.weight[NEXT : NEXT + BITS, i] = codes[token] * weight / 20
    model.lm_head.weight[:, NEXT : NEXT + BITS] = codes * GAP
    model.lm_head.weight[model.config.eos_token_id, ONE] = GAP
