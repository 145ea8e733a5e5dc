"""Check that small rounding differences, as between numbers of ranks, change no tokens."""

from __future__ import annotations

import torch

from nanovllm import SamplingParams
from nanovllm.ops.torch_sampling import SamplingColumns, sample
from tests.checkpoints import MIN_GAP, TinyCheckpoint

NUM_MOVES = 20


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
