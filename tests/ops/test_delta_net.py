"""Gated DeltaNet in plain torch equals transformers, wherever the tokens of a row are split."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from nanovllm.ops.interface import RecurrentRows
from nanovllm.ops.torch_delta_net import (
    HeadTokens,
    normalize,
    run_chunks,
    run_token,
    split_rows,
)
from nanovllm.ops.torch_ops import TorchOps
from tests.ops.delta_nets import DeltaNetCase, random_state

CONFIG = Qwen3_5TextConfig(
    hidden_size=40,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    rms_norm_eps=1e-3,
)
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def random_tokens(num_rows: int, num_tokens: int) -> tuple[HeadTokens, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def make(*shape: int) -> Tensor:
        return torch.randn(num_rows, 4, *shape, generator=generator)

    q, k = (normalize(make(num_tokens, 24)) for _ in range(2))
    gates = -torch.nn.functional.softplus(make(num_tokens)), make(num_tokens).sigmoid()
    return HeadTokens(q, k, make(num_tokens, 12), *gates), make(24, 12)


def rule_of_transformers(rule: Any, tokens: HeadTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = (
        x.transpose(1, 2)
        for x in (tokens.q * 24**0.5, tokens.k, tokens.v, tokens.decay, tokens.beta)
    )
    y, after = rule(q, k, v, decay, beta, initial_state=state, output_final_state=True)
    return y.transpose(1, 2), after


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200])
def test_both_forms_of_the_rule_equal_transformers(num_tokens: int) -> None:
    tokens, state = random_tokens(1, num_tokens)
    got = run_chunks(tokens, state)
    for rule in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        for a, b in zip(got, rule_of_transformers(rule, tokens, state), strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE)


def test_the_recurrent_form_of_several_rows_equals_transformers() -> None:
    tokens, state = random_tokens(5, 1)
    want = rule_of_transformers(torch_recurrent_gated_delta_rule, tokens, state)
    for a, b in zip(run_token(tokens, state), want, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_strong_decay_does_not_overflow() -> None:
    tokens, state = random_tokens(1, 200)
    tokens = HeadTokens(tokens.q, tokens.k, tokens.v, 60 * tokens.decay, tokens.beta)
    want = rule_of_transformers(torch_recurrent_gated_delta_rule, tokens, state)
    for a, b in zip(run_chunks(tokens, state), want, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.fixture(scope="module")
def layer() -> Any:
    torch.manual_seed(0)
    layer = Qwen3_5GatedDeltaNet(CONFIG, 0).eval()
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return layer


def test_a_layer_equals_transformers(layer: Any) -> None:
    """A whole sequence, and the same one in random parts beside those of other sequences."""
    case = DeltaNetCase(layer)
    sequences = [0.7 * torch.randn(length, CONFIG.hidden_size) for length in (1, 70, 150, 9, 64)]
    with torch.inference_mode():
        want = [layer(sequence[None])[0] for sequence in sequences]
        state = random_state(case.sizes, len(sequences) + 2, torch.float32)
        slots = [5, 0, 3, 1, 6]
        for slot in slots:
            state.recurrent[slot], state.conv[slot] = 0, 0
        untouched = state.recurrent[2].clone(), state.conv[2].clone()
        rng, done = random.Random(0), [0] * len(sequences)
        got: list[list[Tensor]] = [[] for _ in sequences]
        while any(done[i] < len(sequence) for i, sequence in enumerate(sequences)):
            waiting = [i for i, sequence in enumerate(sequences) if done[i] < len(sequence)]
            rows = rng.sample(waiting, rng.randint(1, len(waiting)))
            counts = [rng.choice((1, 1, 2, 65, len(sequences[i]))) for i in rows]
            counts = [
                min(n, len(sequences[i]) - done[i]) for i, n in zip(rows, counts, strict=True)
            ]
            x = [sequences[i][done[i] :][:n] for i, n in zip(rows, counts, strict=True)]
            recurrent_rows = RecurrentRows(torch.tensor([slots[i] for i in rows]), counts)
            y = case.run(TorchOps(), torch.cat(x), state, recurrent_rows)
            for i, n, part in zip(rows, counts, y.split(counts), strict=True):
                got[i].append(layer.out_proj(part))
                done[i] += n
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(torch.cat(a), b, **TOLERANCE)
    assert torch.equal(state.recurrent[2], untouched[0])
    assert torch.equal(state.conv[2], untouched[1])


def test_rows_without_counts_have_one_token_each(layer: Any) -> None:
    case = DeltaNetCase(layer)
    x, slots = torch.randn(4, CONFIG.hidden_size), torch.tensor([2, 0, 4, 1])
    results = []
    for counts in (None, [1, 1, 1, 1]):
        state = random_state(case.sizes, 5, torch.float32)
        with torch.inference_mode():
            y = case.run(TorchOps(), x, state, RecurrentRows(slots, counts))
        results.append((y, state.recurrent, state.conv))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_multiply_sigmoid() -> None:
    x, base, gate = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 1)
    torch.testing.assert_close(TorchOps().multiply_sigmoid(x, gate), x * gate.sigmoid())
    got = TorchOps().multiply_sigmoid(x, gate, base)
    torch.testing.assert_close(got, base + x * gate.sigmoid())


def test_rows_of_equal_length_run_together_and_long_ones_in_parts() -> None:
    counts = [1, 1, 500, 500, 500, 2500, 1]
    parts = [
        (rows.start, rows.stop, tokens.start, tokens.stop) for rows, tokens in split_rows(counts)
    ]
    assert parts == [
        (0, 2, 0, 2),
        (2, 4, 2, 1002),
        (4, 5, 1002, 1502),
        (5, 6, 1502, 2526),
        (5, 6, 2526, 3550),
        (5, 6, 3550, 4002),
        (6, 7, 4002, 4003),
    ]
