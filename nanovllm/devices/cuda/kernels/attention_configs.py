"""Tile sizes and key splits of the attention kernel, chosen by measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from nanovllm.attention.backend import AttentionSpec
from nanovllm.devices.cuda.kernels.attention_tiles import PagedCache

MIN_Q_ROWS = 16  # minimum M of tl.dot
MAX_SPLITS = 32
DECODE_CTAS_PER_SM = 5
MIN_DECODE_SPLIT = 64  # smallest number of keys that is worth a CTA
LARGE_TILE_PAIRS = range(192, 385)  # numbers of (row, KV head) pairs for which large tiles pay off
SHORT_CONTEXT = 512  # up to this many keys, rows that fill the device are not split
PREFILL_CTAS_PER_SM = 2
MIN_PREFILL_SPLIT = 256  # smallest number of keys that is worth a CTA
MIN_PREFILL_SPLITS = 4  # fewer splits gain less than the merge costs
# Up to this many query rows, small tiles are faster, because they give more CTAs.
MAX_SMALL_TILE_ROWS = 2048
MAX_SMALL_TILE_ROWS_FP8 = 1024  # the same limit for FP8 keys, which every CTA has to upcast


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
    head_dim: int, dtype: torch.dtype, has_large_tiles: bool = False, is_fp8: bool = False
) -> AttentionConfig:
    """Return the config for decode rows; `has_large_tiles` is the result of `suits_large_tiles`."""
    is_wide = head_dim > 128
    if dtype != torch.float32 and not is_wide and (is_fp8 or has_large_tiles):
        tile, num_warps, num_stages = 64, 4, 3
    elif dtype == torch.float32:  # without tensor cores, small tiles save registers
        tile, num_warps, num_stages = 16, 4, 3
    else:
        tile, num_warps, num_stages = 32, 4 if is_wide else 2, 4
    return AttentionConfig(MIN_Q_ROWS, tile, num_warps, num_stages, min_split=MIN_DECODE_SPLIT)


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

    Even if unsplit rows nearly fill the device, two splits balance the load better than one.
    """
    num_pairs = max(1, num_rows * num_kv_heads)
    if num_pairs >= num_sms and max_context <= SHORT_CONTEXT:
        return 1
    wanted = DECODE_CTAS_PER_SM * num_sms // num_pairs
    if num_pairs < DECODE_CTAS_PER_SM * num_sms:
        wanted = max(wanted, 2)
    return _power_of_two(min(wanted, triton.cdiv(max_context, MIN_DECODE_SPLIT)))


def suits_large_tiles(num_rows: int, num_kv_heads: int, num_splits: int) -> bool:
    """Whether large tiles are faster than small ones on Hopper.

    They are if the keys are split in two, and LARGE_TILE_PAIRS contains the number of pairs.
    """
    return num_splits == 2 and num_rows * num_kv_heads in LARGE_TILE_PAIRS


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
