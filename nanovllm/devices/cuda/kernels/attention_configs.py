"""Tile sizes and key splits of the attention kernel, chosen by measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nanovllm.attention.backend import AttentionSpec
from nanovllm.devices.cuda.kernels.attention_tiles import PagedCache

MIN_Q_ROWS = 16  # minimum M of tl.dot
MAX_SPLITS = 32
DECODE_CTAS_PER_SM = 5
MIN_DECODE_SPLIT = 64  # smallest number of keys that is worth a CTA
LARGE_TILE_PAIRS = range(192, 385)  # (row, KV head) pairs for which split keys suit large tiles
MIN_UNSPLIT_PAIRS = 512  # from so many pairs on, rows of any length fill the device unsplit
SHORT_CONTEXT = 512  # up to this many keys, rows that fill the device are not split
PREFILL_CTAS_PER_SM = 2
MIN_PREFILL_SPLIT = 256  # smallest number of keys that is worth a CTA
MIN_PREFILL_SPLITS = 4  # fewer splits gain less than the merge costs
# Up to this many query rows, small tiles are faster, because they give more CTAs.
MAX_SMALL_TILE_ROWS = 2048
MAX_SMALL_TILE_ROWS_FP8 = 1024  # the same limit for FP8 keys, which every CTA has to upcast


class TileSizes(NamedTuple):
    keys: int  # per iteration
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    q_rows: int  # rows of a CTA's query tile: queries times the GQA group size
    tile: int  # keys per iteration
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; a lower limit lets more CTAs run concurrently
    pairs: int = 16  # (row, KV head) pairs that run concurrently, so that their keys stay in L2
    min_split: int = MIN_PREFILL_SPLIT
    has_tma: bool = False  # whether keys and values are loaded by TMA (Hopper)


TMA_CONFIG = AttentionConfig(128, 64, num_warps=8, num_stages=2, max_registers=128, has_tma=True)


def decode_config(
    head_dim: int, dtype: torch.dtype, large_tile: TileSizes | None = None, is_fp8: bool = False
) -> AttentionConfig:
    """Return the config for decode rows; `large_tile` is a result of `choose_large_tile`."""
    is_wide = head_dim > 128
    if dtype == torch.float32:  # without tensor cores, small tiles save registers
        sizes = TileSizes(16, num_warps=4, num_stages=3)
    elif is_wide:
        sizes = TileSizes(32, num_warps=4, num_stages=4)
    elif is_fp8:
        sizes = TileSizes(64, num_warps=4, num_stages=3)
    else:
        sizes = large_tile or TileSizes(32, num_warps=2, num_stages=4)
    return AttentionConfig(MIN_Q_ROWS, *sizes, min_split=MIN_DECODE_SPLIT)


def prefill_config(
    head_dim: int, dtype: torch.dtype, num_q_rows: int, is_fp8: bool = False
) -> AttentionConfig:
    """Return the config for prefill.

    `num_q_rows` is the maximum query length times the GQA group size.
    """
    is_wide = head_dim > 128
    if is_fp8 and dtype != torch.float32 and not is_wide:
        if num_q_rows <= MAX_SMALL_TILE_ROWS_FP8:
            return AttentionConfig(q_rows=32, tile=64, num_warps=4, num_stages=3)
        return AttentionConfig(q_rows=128, tile=64, num_warps=4, num_stages=2)
    if dtype == torch.float32:
        return AttentionConfig(q_rows=32, tile=16 if is_wide else 32, num_warps=4, num_stages=2)
    if num_q_rows <= (64 if is_wide else MAX_SMALL_TILE_ROWS):
        return AttentionConfig(q_rows=64, tile=32 if is_wide else 64, num_warps=4, num_stages=3)
    if is_wide:
        return AttentionConfig(q_rows=128, tile=32, num_warps=8, num_stages=3)
    return AttentionConfig(q_rows=128, tile=64, num_warps=8, num_stages=2, max_registers=128)


def with_more_stages(config: AttentionConfig) -> AttentionConfig:
    """Raise a small-tile config (64 x 64, four warps) to four stages; return any other unchanged.

    Used on Hopper for prefill without key splits: too few CTAs share an SM to hide the latency of
    loading keys.
    """
    is_small = (config.q_rows, config.tile, config.num_warps) == (64, 64, 4)
    return replace(config, num_stages=4) if is_small else config


def suits_tma(q: Tensor, cache: PagedCache, max_query_len: int, spec: AttentionSpec) -> bool:
    """Whether TMA_CONFIG supports these tensors, and there are enough queries to fill its tiles."""
    group, head_dim = q.shape[1] // cache.k.shape[2], q.shape[2]
    is_whole = cache.k.shape[1] % TMA_CONFIG.tile == 0  # each tile lies within one block
    num_q_rows = max_query_len * group
    is_long = len(q) * group > MAX_SMALL_TILE_ROWS and num_q_rows >= TMA_CONFIG.q_rows >= group
    is_plain = spec.window is None and spec.softcap is None and spec.sinks is None
    has_layout = head_dim in (64, 128) and q.itemsize == 2 and not cache.is_fp8
    return is_whole and is_long and is_plain and has_layout


def choose_splits(num_rows: int, num_kv_heads: int, max_context: int, num_sms: int) -> int:
    """Return the number of key splits per row that fills the device with CTAs, a power of two.

    Below MIN_UNSPLIT_PAIRS, two splits balance the load of long contexts better than one.
    """
    num_pairs = max(1, num_rows * num_kv_heads)
    is_full = num_pairs >= num_sms and max_context <= SHORT_CONTEXT
    if is_full or num_pairs >= MIN_UNSPLIT_PAIRS:
        return 1
    wanted = max(DECODE_CTAS_PER_SM * num_sms // num_pairs, 2)
    return _power_of_two(min(wanted, triton.cdiv(max_context, MIN_DECODE_SPLIT)))


def choose_large_tile(num_pairs: int, num_splits: int, max_context: int) -> TileSizes | None:
    """Return the large tile that is faster on Hopper than the usual one, if any.

    `num_pairs` is the number of (row, KV head) pairs.
    """
    if num_splits == 2 and num_pairs in LARGE_TILE_PAIRS:
        return TileSizes(64, num_warps=4, num_stages=3)
    if num_splits == 1 and num_pairs >= MIN_UNSPLIT_PAIRS and max_context > SHORT_CONTEXT:
        return TileSizes(64, num_warps=2, num_stages=4 if num_pairs < 1024 else 3)
    return None


def choose_prefill_splits(
    num_q_rows: int, num_kv_heads: int, config: AttentionConfig, max_context: int, num_sms: int
) -> int:
    """Return the number of key splits for prefill, a power of two; 1 if there are many queries."""
    num_ctas = triton.cdiv(num_q_rows, config.q_rows) * num_kv_heads
    wanted = PREFILL_CTAS_PER_SM * num_sms // num_ctas
    most = min(wanted, triton.cdiv(max_context, config.min_split))
    return _power_of_two(most) if most >= MIN_PREFILL_SPLITS else 1


def _power_of_two(most: int) -> int:
    return 1 << (max(1, min(most, MAX_SPLITS)).bit_length() - 1)
