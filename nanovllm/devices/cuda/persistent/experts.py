"""MoE in the persistent step: choose the experts, and locate their weights.

The chosen experts are treated as one wide MLP: their gate and up rows, and their down columns, are
concatenated. Only the loading warp needs to know which expert a row or column belongs to. See
docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.exchange import CHUNK, S2, THREADS, four_floats, thread_index
from nanovllm.devices.cuda.persistent.sizes import (
    expert_segments,
    piece_segments,
    segment_groups,
)
from nanovllm.devices.cuda.persistent.stream import LANES, barrier
from nanovllm.devices.cuda.persistent.tile_mma import stage

# Bit masks of the logit (HIGH) and the expert (LOW) in a key; see `Experts.choose`.
HIGH, LOW = gl.constexpr(-65536), gl.constexpr(0xFFFF)
LOWEST = gl.constexpr(-(1 << 31))


@gluon.constexpr_function
def overlaps(rank, capacity, chunk):
    """Whether a chunk contains columns of the expert with this rank.

    Each expert has `capacity` columns.
    """
    return rank * capacity < (chunk + 1) * 1024 and (rank + 1) * capacity > chunk * 1024


@aggregate
class Experts:
    """The experts chosen in a layer, at most 32, ranked by decreasing logit."""

    ids: gl.shared_memory_descriptor  # [8 warps, 32]: a copy for each warp
    weights: gl.shared_memory_descriptor  # [32, 8 warps]: a copy for each warp
    chosen: gl.shared_memory_descriptor  # mbarrier that completes once the ids are stored
    count: gl.constexpr  # experts per layer
    top_k: gl.constexpr
    size: gl.constexpr  # intermediate size of one expert
    is_normalized: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ids, weights, chosen, shape):
        self.ids, self.weights, self.chosen = ids, weights, chosen
        count, top_k, size, is_normalized = shape.experts
        self.count, self.top_k = gl.constexpr(count), gl.constexpr(top_k)
        self.size, self.is_normalized = gl.constexpr(size), gl.constexpr(is_normalized)

    @gluon.jit
    def choose(self, router_logits, buffer):
        """Poll the router logits, find the top-k experts, and signal the loading warp.

        Every warp finds the experts independently. It compares int32 keys with the logit in the
        upper half. If logits are equal, the lower half makes the smaller expert index win.
        """
        N: gl.constexpr = (self.count + 127) // 128
        lane = thread_index() % 32
        words = router_logits.poll_from(lane * 4, buffer, N, 128)
        keys = ()
        for n in gl.static_range(N):
            for j in gl.static_range(4):
                word = words[2 * n + j // 2]
                expert = n * 128 + lane * 4 + j
                key = in_order(word << 16 if j % 2 == 0 else word & HIGH) + (LOW - expert)
                keys = keys + (gl.where(expert < self.count, key, LOWEST),)
        found = lane * 0 + LOWEST
        left = keys
        for rank in gl.static_range(self.top_k):
            best = gl.expand_dims(gl.max(largest(left), 1), 1)
            found = gl.where(lane == rank, best, found)
            left = without(left, best)
        self.store_chosen(keys, found, lane)

    @gluon.jit
    def store_chosen(self, keys, found, lane):
        """Store the ids of the chosen experts in shared memory, then their routing weights."""
        self.ids._reinterpret(gl.int32, [8, 32], S2).store(LOW - (found & LOW))
        barrier()
        mbarrier.arrive(self.chosen, count=1)
        first = logit_of(gl.expand_dims(gl.max(found, 1), 1))
        odds = gl.where(lane < self.top_k, gl.exp(logit_of(found) - first), 0.0)
        if self.is_normalized:
            total = gl.expand_dims(gl.sum(odds, 1), 1)
        else:
            all_odds = odds * 0.0
            for i in gl.static_range(len(keys)):
                all_odds += gl.where(keys[i] > LOWEST, gl.exp(logit_of(keys[i]) - first), 0.0)
            total = gl.expand_dims(gl.sum(all_odds, 1), 1)
        weights = self.weights._reinterpret(gl.float32, [32, 8], S2).permute([1, 0])
        weights.store((odds / total).to(gl.bfloat16).to(gl.float32))

    @gluon.jit
    def weight(self, rank: gl.constexpr):
        found = self.weights.index(rank).load(gl.SliceLayout(1, THREADS))
        return gl.expand_dims(found, 1)

    @gluon.jit
    def stage_gated(self, gated, buffer, BITS: gl.constexpr):
        """Poll the gated values, multiply them by their experts' routing weights, and stage them.

        The first half is staged while other CTAs still compute the second.
        """
        N: gl.constexpr = gated.size // CHUNK
        words = gated.poll(buffer, 0, N // 2) if N > 1 else ()
        staged = ()
        for k in gl.static_range(N):
            if k == N // 2:
                words = words + gated.poll(buffer, N // 2, N - N // 2)
            column = k * CHUNK + thread_index() * 4
            w = column * 0.0
            for rank in gl.static_range(self.top_k):
                if overlaps(rank, gated.capacity, k):
                    w = gl.where(column >= rank * gated.capacity, self.weight(rank), w)
            pair = gl.join(w, w)
            expert_weights = gl.reshape(gl.join(pair, pair), [8, 128])
            x = four_floats(words[2 * k], words[2 * k + 1]) * expert_weights
            staged = stage(staged, k, (x,), BITS)
        return staged

    @gluon.jit
    def wait(self, layer):
        """Wait until the experts are chosen; return their indices among all layers' experts."""
        mbarrier.wait(self.chosen, layer & 1)
        return layer * self.count + self.ids.index(0).load(LANES)

    @gluon.jit
    def fetch_down(
        self, stream, weights, experts, t, g, owners, HIDDEN: gl.constexpr, BLOCKS: gl.constexpr,
        FORMAT: gl.constexpr, GROUP: gl.constexpr, COLUMNS: gl.constexpr,
    ):  # fmt: skip
        """Start the TMA copies of `down` tiles, in which the experts' columns are concatenated.

        The `down` of an expert has HIDDEN weight rows. Return the same as `Stream.fetch`.
        """
        TILES: gl.constexpr = FORMAT.tiles
        rows = experts * HIDDEN + stream.cta * 8
        for first in gl.static_range(0, TILES, COLUMNS):
            for block in range(BLOCKS):
                is_in_bounds = block * CHUNK + stream.cta * 8 < HIDDEN
                for i in gl.static_range(COLUMNS):
                    group = g + (first * BLOCKS + block * COLUMNS + i) // GROUP
                    owners = stream.claim(t, group, owners, FORMAT, stream.in_flight)
                    block_rows = rows + block * CHUNK
                    self.fetch_pieces(
                        stream, weights, t, is_in_bounds, block_rows, 16 * (first + i), FORMAT
                    )
                    t += 1
        return t, g + BLOCKS * TILES // GROUP, owners

    @gluon.jit
    def fetch_pieces(
        self, stream, weights, t, is_in_bounds, rows, first: gl.constexpr, FORMAT: gl.constexpr
    ):
        """Start the TMA copies of tile t, from segment `first` of the concatenated columns on.

        Each copy loads a piece of the tile: segments that belong to one expert.
        """
        S: gl.constexpr = expert_segments(self.size, FORMAT.bits)
        N: gl.constexpr = piece_segments(self.size, FORMAT.bits)
        # Number of scales of one segment of 8 weight rows.
        G: gl.constexpr = 8 * segment_groups(FORMAT.bits)
        for target in gl.static_range(0, 8 * FORMAT.halves, N):
            is_ours = is_in_bounds & ((first + target) // S < self.top_k)
            row = pick(rows, (first + target) // S)
            scale_offset = (row // 8 * S + (first + target) % S) * G
            stream.copy(
                weights, t, is_ours, row, (first + target) % S, scale_offset, target, N, FORMAT
            )


@aggregate
class ExpertRows:
    """The gate and up rows of the chosen experts, as the rows of one wide MLP."""

    experts: gl.tensor  # indices among the experts of all layers
    count: gl.constexpr  # number of gate rows of all chosen experts
    part_stride: gl.constexpr  # weight rows from an expert's gate to its up projection

    @gluon.constexpr_function
    def __init__(self, experts, count, part_stride):
        self.experts, self.count, self.part_stride = (
            experts,
            gl.constexpr(count),
            gl.constexpr(part_stride),
        )

    @gluon.jit
    def find(self, weight_row):
        return (
            pick(self.experts, weight_row // self.part_stride) * (2 * self.part_stride)
            + weight_row % self.part_stride
        )


@gluon.jit
def in_order(bits):
    """Map bfloat16 bits (upper half) to integers that sort like the values; keep the lower half.

    -0 sorts before 0. The mapping is its own inverse.
    """
    return bits ^ ((bits >> 31) & 0x7FFF0000)


@gluon.jit
def logit_of(key):
    return in_order(key & HIGH).to(gl.float32, bitcast=True)


@gluon.jit
def largest(keys):
    best = keys[0]
    for i in gl.static_range(1, len(keys)):
        best = gl.maximum(best, keys[i])
    return best


@gluon.jit
def without(keys, best):
    left = ()
    for i in gl.static_range(len(keys)):
        left = left + (gl.where(keys[i] == best, LOWEST, keys[i]),)
    return left


@gluon.jit
def pick(values, lane):
    """Return the value in lane `lane` of the warp."""
    return gl.sum(gl.where(gl.arange(0, 32, LANES) == lane, values, 0), 0)
