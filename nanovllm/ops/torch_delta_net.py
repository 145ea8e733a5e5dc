"""Gated DeltaNet in plain torch: the reference for kernels, and the fallback without them.

The state of a head is a matrix S [key_dim, value_dim]. Each token multiplies S by its decay, and
then adds the outer product of k and beta * (v - k @ S), which moves k @ S toward v. Its output is
q @ S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.interface import DeltaNetInputs, DeltaNetWeights, LayerState, RecurrentRows

CHUNK_SIZE = 64  # number of tokens whose updates are computed at once
MAX_TOKENS = 1024  # number of tokens that run together in the chunked form
EPS = 1e-6  # eps of the L2 norms of q and k


@dataclass(frozen=True, slots=True)
class HeadTokens:
    """The inputs of the delta rule by value head, in float32."""

    q: Tensor  # [rows, heads, tokens, key_dim]
    k: Tensor
    v: Tensor  # [rows, heads, tokens, value_dim]
    decay: Tensor  # [rows, heads, tokens]: logarithm of the decay
    beta: Tensor  # [rows, heads, tokens]


def gated_delta_net(
    inputs: DeltaNetInputs, weights: DeltaNetWeights, state: LayerState, rows: RecurrentRows
) -> Tensor:
    """Implement Ops.gated_delta_net."""
    if rows.counts is None:
        return run_rows(inputs, weights, state, rows.slots)
    output = torch.empty_like(inputs.z)
    for row_slice, token_slice in split_rows(rows.counts):
        parts = (part[token_slice] for part in (inputs.qkv, inputs.z, inputs.b, inputs.a))
        slots = rows.slots[row_slice]
        output[token_slice] = run_rows(DeltaNetInputs(*parts), weights, state, slots)
    return output


def split_rows(counts: list[int]) -> Iterator[tuple[slice, slice]]:
    """Yield slices (rows, tokens) that run together: rows of equal length, or part of a long row.

    They have up to MAX_TOKENS tokens, except for rows of one token, which need less memory.
    """
    first_row = first_token = 0
    for count, group in groupby(counts):
        last_row = first_row + len(list(group))
        num_rows = last_row - first_row if count == 1 else max(MAX_TOKENS // count, 1)
        for row in range(first_row, last_row, num_rows):
            rows = slice(row, min(row + num_rows, last_row))
            last_token = first_token + count * (rows.stop - rows.start)
            step = last_token - first_token if count <= MAX_TOKENS else MAX_TOKENS
            for first in range(first_token, last_token, step):
                yield rows, slice(first, min(first + step, last_token))
            first_token = last_token
        first_row = last_row


def split_chunks(slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Split rows, where row i has counts[i] tokens, into chunks of up to CHUNK_SIZE tokens.

    Return int32 [chunks, 4]: the slot of each chunk, the index of its first token in the step, and
    the numbers of the row's tokens before the chunk and from its start on.
    """
    num_chunks = -(-counts // CHUNK_SIZE)
    rows = np.repeat(np.arange(len(counts)), num_chunks)
    indices = np.arange(len(rows)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    before = indices * CHUNK_SIZE
    first = (np.cumsum(counts) - counts)[rows] + before
    return np.stack((slots[rows], first, before, counts[rows] - before), axis=1).astype(np.int32)


def run_rows(
    inputs: DeltaNetInputs, weights: DeltaNetWeights, state: LayerState, slots: Tensor
) -> Tensor:
    """Run rows of equal length, which are concatenated in `inputs`."""
    num_rows, (_, num_heads, _, value_dim) = len(slots), state.recurrent.shape
    qkv = convolve(inputs.qkv.view(num_rows, -1, inputs.qkv.shape[1]), weights, state, slots)
    tokens = split_heads(qkv, inputs, weights, state)
    before = state.recurrent.index_select(0, slots)
    if qkv.shape[1] == 1:
        y, after = run_token(tokens, before)  # y: [rows, heads, tokens, value_dim]
    else:
        y, after = run_chunks(tokens, before)
    state.recurrent.index_copy_(0, slots, after)
    y = y.transpose(1, 2).reshape(-1, num_heads, value_dim)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + weights.norm.eps) * weights.norm.weight
    return (y.flatten(1) * F.silu(inputs.z.float())).to(inputs.z.dtype)


def convolve(x: Tensor, weights: DeltaNetWeights, state: LayerState, slots: Tensor) -> Tensor:
    """Return silu(conv(x)) in float32, for x [rows, tokens, channels], and update the state."""
    num_tokens = x.shape[1]
    x = torch.cat((state.conv.index_select(0, slots).transpose(1, 2), x), 1)
    state.conv.index_copy_(0, slots, x[:, num_tokens:].transpose(1, 2))
    taps = weights.conv.float().unbind(1)  # each [channels]
    y = x[:, :num_tokens].float() * taps[0]
    for i, tap in enumerate(taps[1:], 1):
        y.addcmul_(x[:, i : i + num_tokens].float(), tap)
    return F.silu(y)


def split_heads(
    qkv: Tensor, inputs: DeltaNetInputs, weights: DeltaNetWeights, state: LayerState
) -> HeadTokens:
    """Normalize q and k, repeat them for the value heads that share them, and compute the gates."""
    num_rows, num_tokens, num_channels = qkv.shape
    _, num_heads, key_dim, value_dim = state.recurrent.shape
    num_values = num_heads * value_dim
    num_keys = (num_channels - num_values) // 2
    q, k, v = qkv.split((num_keys, num_keys, num_values), dim=2)
    q, k = (normalize(x.view(num_rows, num_tokens, -1, key_dim)) for x in (q, k))
    group = num_heads * key_dim // num_keys
    q, k = (
        x.repeat(1, 1, group, 1) if weights.is_tiled else x.repeat_interleave(group, 2)
        for x in (q * key_dim**-0.5, k)
    )
    decay = weights.decay * F.softplus(inputs.a.float() + weights.dt_bias)
    gates = (x.view(num_rows, num_tokens, -1) for x in (decay, inputs.b.float().sigmoid()))
    v = v.view(num_rows, num_tokens, num_heads, value_dim)
    return HeadTokens(*(x.transpose(1, 2) for x in (q, k, v, *gates)))


def normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def run_token(tokens: HeadTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run one token of each row in the recurrent form; return its outputs and the new states."""
    state = state * tokens.decay.exp()[..., None]
    change = (tokens.v - tokens.k @ state) * tokens.beta[..., None]
    state = state + tokens.k.transpose(-1, -2) * change
    return tokens.q @ state, state


def run_chunks(tokens: HeadTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run any number of tokens in the chunked form; return their outputs and the new states.

    Within a chunk, each change depends on those before it: a triangular system. Its solution is
    affine in the state before the chunk. So all chunks are solved at once, before the loop.
    """
    num_tokens = tokens.q.shape[2]
    q, k, v = map(in_chunks, (tokens.q, tokens.k, tokens.v))
    decay, beta = (in_chunks(x[..., None]) for x in (tokens.decay, tokens.beta))
    total = decay.cumsum(3)  # [rows, heads, chunks, tokens, 1], from the chunk's start
    between = (total - total.transpose(-1, -2)).tril().exp().tril()  # decay between two tokens
    weighted = k * beta
    system = weighted @ k.transpose(-1, -2) * between
    sides = torch.cat((v * beta, weighted * total.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    # The changes for a state of zero; for another state, reads @ state is subtracted.
    changes, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = q @ k.transpose(-1, -2) * between
    last = total[..., -1:, :]
    chunks = q * total.exp(), k * (last - total).exp(), changes, reads, scores, last.exp()
    outputs = []
    for q, k, change, read, score, decay in zip(*(x.unbind(2) for x in chunks), strict=True):
        change = change - read @ state
        outputs.append(q @ state + score @ change)
        state = state * decay + k.transpose(-1, -2) @ change
    return torch.cat(outputs, dim=2)[:, :, :num_tokens], state


def in_chunks(x: Tensor) -> Tensor:
    """Split the tokens of x into chunks; padding has no effect, because its inputs are zero."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % CHUNK_SIZE))
    return x.unflatten(2, (-1, CHUNK_SIZE))
