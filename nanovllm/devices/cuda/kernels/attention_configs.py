"""Tiles and splits for the attention kernel: what measured fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from nanovllm.devices.cuda.kernels.attention_tiles import PagedCache

MIN_Q_ROWS = 16  # tl.dot takes no fewer
MAX_SPLITS = 32
DECODE_PROGRAMS = 5  # that a multiprocessor should get
MIN_DECODE_SPLIT = 64  # keys that are worth a program of their own
LARGE_TILE_PAIRS = range(192, 385)  # of row and kv head, whose contexts are read in large tiles
SHORT_CONTEXT = 512  # keys, up to which a second split gains less than joining both costs
PREFILL_PROGRAMS = 2
MIN_PREFILL_SPLIT = 256
MIN_PREFILL_SPLITS = 4  # fewer gain less than joining them costs
# Rows of tiles for which small tiles are best, because they occupy more of the device.
MAX_SMALL = 2048
MAX_FEW = 1024  # the same where keys are codes, which every program widens for itself


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    q_rows: int  # queries times query heads per kv head in one program
    tile: int  # keys per step of the loop
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; fewer let more programs run side by side
    pairs: int = 16  # of row and kv head that run side by side, so that L2 serves their keys
    min_split: int = MIN_PREFILL_SPLIT
    has_tma: bool = False  # whether the copy engine of Hopper fetches keys


TMA_CONFIG = AttentionConfig(128, 64, num_warps=8, num_stages=2, max_registers=128, has_tma=True)


def decode_config(
    head_dim: int, dtype: torch.dtype, has_large_tiles: bool = False, has_codes: bool = False
) -> AttentionConfig:
    """For rows of one query; `has_large_tiles` is what `suits_large_tiles` said."""
    is_wide = head_dim > 128
    if dtype != torch.float32 and not is_wide and (has_codes or has_large_tiles):
        tile, num_warps, num_stages = 64, 4, 3
    elif dtype == torch.float32:  # without tensor cores, small tiles save registers
        tile, num_warps, num_stages = 16, 4, 3
    else:
        tile, num_warps, num_stages = 32, 4 if is_wide else 2, 4
    return AttentionConfig(MIN_Q_ROWS, tile, num_warps, num_stages, min_split=MIN_DECODE_SPLIT)


def prefill_config(
    head_dim: int, dtype: torch.dtype, num_q_rows: int, has_codes: bool = False
) -> AttentionConfig:
    """For up to that many queries times heads per kv head."""
    is_wide = head_dim > 128
    if has_codes and dtype != torch.float32 and not is_wide:
        if num_q_rows <= MAX_FEW:
            return AttentionConfig(q_rows=32, tile=64, num_warps=4, num_stages=3)
        return AttentionConfig(q_rows=128, tile=64, num_warps=4, num_stages=2)
    if dtype == torch.float32:
        return AttentionConfig(q_rows=32, tile=16 if is_wide else 32, num_warps=4, num_stages=2)
    if num_q_rows <= (64 if is_wide else MAX_SMALL):
        return AttentionConfig(q_rows=64, tile=32 if is_wide else 64, num_warps=4, num_stages=3)
    if is_wide:
        return AttentionConfig(q_rows=128, tile=32, num_warps=8, num_stages=3)
    return AttentionConfig(q_rows=128, tile=64, num_warps=8, num_stages=2, max_registers=128)


def with_more_stages(config: AttentionConfig) -> AttentionConfig:
    """On Hopper, which has the memory: a program alone on its processor waits less for keys."""
    is_small = (config.q_rows, config.tile, config.num_warps) == (64, 64, 4)
    return replace(config, num_stages=4) if is_small else config


def suits_tma(q: Tensor, cache: PagedCache, max_query_len: int, window: int | None) -> bool:
    """Whether TMA_CONFIG serves these tensors, and there are enough queries for it."""
    group, head_dim = q.shape[1] // cache.k.shape[2], q.shape[2]
    is_whole = cache.k.shape[1] % TMA_CONFIG.tile == 0  # a tile lies in one block
    num_q_rows = max_query_len * group
    is_long = len(q) * group > MAX_SMALL and num_q_rows >= TMA_CONFIG.q_rows >= group
    is_plain = window is None and not cache.has_codes
    return is_whole and is_long and head_dim in (64, 128) and is_plain and q.itemsize == 2


def choose_splits(num_rows: int, num_kv_heads: int, max_context: int, num_sms: int) -> int:
    """Into how many programs to split a decode row's context to fill the device: a power of two.

    Where whole contexts nearly fill it, two splits still end more evenly than one.
    """
    num_pairs = max(1, num_rows * num_kv_heads)
    if num_pairs >= num_sms and max_context <= SHORT_CONTEXT:
        return 1
    wanted = DECODE_PROGRAMS * num_sms // num_pairs
    if num_pairs < DECODE_PROGRAMS * num_sms:
        wanted = max(wanted, 2)
    return _power_of_two(min(wanted, triton.cdiv(max_context, MIN_DECODE_SPLIT)))


def suits_large_tiles(num_rows: int, num_kv_heads: int, num_splits: int) -> bool:
    """On Hopper: where two splits of each context nearly fill the device, two in a processor."""
    return num_splits == 2 and num_rows * num_kv_heads in LARGE_TILE_PAIRS


def choose_prefill_splits(
    num_q_rows: int, num_kv_heads: int, config: AttentionConfig, max_context: int, num_sms: int
) -> int:
    """Into how many programs to split the keys of a kv head's few queries: a power of two."""
    num_programs = triton.cdiv(num_q_rows, config.q_rows) * num_kv_heads
    wanted = PREFILL_PROGRAMS * num_sms // num_programs
    most = min(wanted, triton.cdiv(max_context, config.min_split))
    return _power_of_two(most) if most >= MIN_PREFILL_SPLITS else 1


def _power_of_two(most: int) -> int:
    return 1 << (max(1, min(most, MAX_SPLITS)).bit_length() - 1)
