"""Tell which tokens small rounding differences, as between numbers of ranks, could change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.ops import torch_sampling
from nanovllm.ops.torch_sampling import SamplingColumns, sample
from tests.checkpoints import MIN_GAP, TinyCheckpoint
from tests.ops.sampling_by_noise import sample_by_noise

NUM_MOVES = 20
Draw = Callable[[Tensor, SamplingColumns, Tensor], Tensor]


def choice_gap(logits: Tensor, columns: SamplingColumns, position: Tensor, draw: Draw) -> float:
    """Return how much the logits [1, vocab_size] must move apart to change the drawn token.

    If `draw` takes the largest logit after adding noise, this is the gap of the two largest. Moves
    that change what top_k, top_p and min_p keep count as well. Accurate to a factor of 1.3.
    """
    token, ids = draw(logits, columns, position), torch.arange(logits.shape[1])
    generator = torch.Generator().manual_seed(0)
    moves = torch.stack([ids != token, ids < token, ids >= token, ids <= token, ids > token])
    chances = torch.rand(NUM_MOVES, logits.shape[1], generator=generator) < 0.5
    moves = torch.cat((moves, chances)).float() - 0.5
    for gap in torch.logspace(-7, 0, 64).tolist():
        rows = columns.select(torch.zeros(len(moves), dtype=torch.long))
        if (draw(logits + gap * moves, rows, position.expand(len(moves))) != token).any():
            return float(gap)
    return 1.0


def gap_at(
    path: str,
    options: dict[str, Any],
    prompt: list[int],
    token_ids: list[int],
    params: SamplingParams,
) -> float:
    """Return the `choice_gap` of the last of `token_ids`, which follow the prompt.

    A new engine on the CPU computes the logits, with all edits and masks. `options["device"]` only
    chooses how tokens are drawn.
    """
    draw = sample_by_noise if options["device"] == "cuda" else sample
    sequence = torch.tensor([*prompt, *token_ids])
    recorded: dict[int, tuple[Tensor, SamplingColumns, Tensor]] = {}

    def force(logits: Tensor, columns: SamplingColumns, positions: Tensor) -> Tensor:
        recorded[int(positions[-1])] = logits[-1:].float().clone(), columns, positions[-1:]
        return sequence[positions.clamp(max=len(sequence) - 1)]

    params = replace(params, max_tokens=len(token_ids), n=1)
    with (
        mock.patch.object(torch_sampling, "sample", force),
        LLM(path, **{**options, "device": "cpu"}) as llm,
    ):
        llm.generate([prompt], params, use_tqdm=False)
    row = recorded[len(sequence) - 1]
    gap, drawn = choice_gap(*row, draw), int(draw(*row))
    assert drawn == token_ids[-1] or gap < MIN_GAP, f"{drawn} is drawn, not {token_ids[-1]}"
    return gap


@torch.inference_mode()
def assert_clear(
    checkpoint: TinyCheckpoint, prompt: list[int], answer: list[int], params: SamplingParams
) -> None:
    """Assert that transformers' logits give the same tokens even after small random changes."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits = checkpoint.model(ids).logits[0, len(prompt) - 1 :]  # [len(answer), vocab_size]
    logits[: params.min_tokens, params.stop_token_ids] = -torch.inf
    if params.temperature == 0:
        best, second = logits.topk(2).values.unbind(-1)
        gap = (best - second).min().item()
        assert gap > MIN_GAP, f"top-2 gap {gap:.1e}: choose another prompt"
    columns = columns_of(params, NUM_MOVES * len(answer))
    positions = torch.arange(len(prompt), len(prompt) + len(answer)).repeat(NUM_MOVES)
    generator = torch.Generator().manual_seed(0)
    moves = MIN_GAP * (torch.rand(NUM_MOVES, *logits.shape, generator=generator) - 0.5)
    tokens = sample((logits + moves).flatten(0, 1), columns, positions)
    assert tokens.tolist() == NUM_MOVES * answer, "choose another seed"


def columns_of(params: SamplingParams, num_rows: int) -> SamplingColumns:
    """Return the sampler's input for the tokens of one request."""

    def repeat(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype)

    assert params.seed is not None
    return SamplingColumns(
        temperature=repeat(params.temperature, torch.float32),
        top_k=repeat(max(params.top_k, 0), torch.int32),
        top_p=repeat(params.top_p, torch.float32),
        min_p=repeat(params.min_p, torch.float32),
        seed=repeat(params.seed, torch.int64),
    )
