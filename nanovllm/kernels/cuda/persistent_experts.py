"""Experts in the persistent step: which of them a token goes to, and how their weights are found.

The gates of the chosen experts are the lines of one wide MLP, one expert after another, and so are
the columns of their outputs. Only who loads must know whose they are. See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from nanovllm.kernels.cuda.persistent_exchange import CHUNK, S1, four_floats, thread_index
from nanovllm.kernels.cuda.persistent_products import stage
from nanovllm.kernels.cuda.persistent_sizes import (
    chosen_layout,
    expert_segments,
    piece_segments,
    power_of_two,
    rank_layout,
    segment_groups,
)
from nanovllm.kernels.cuda.persistent_stream import LANES

WHOLE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.constexpr_function
def meets(place, room, chunk):
    """Whether the columns of the expert in a place lie in a chunk."""
    return place * room < (chunk + 1) * 1024 and (place + 1) * room > chunk * 1024


@aggregate
class Experts:
    """The experts that were chosen in a layer, the best first, in one of 32 places each."""

    ids: gl.shared_memory_descriptor  # [32]
    weights: gl.shared_memory_descriptor  # [32, 1]
    chosen: gl.shared_memory_descriptor  # a barrier: they are there
    count: gl.constexpr
    top_k: gl.constexpr
    size: gl.constexpr  # of an expert's MLP
    is_normalized: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ids, weights, chosen, sizes):
        self.ids, self.weights, self.chosen = ids, weights, chosen
        count, top_k, size, is_normalized = sizes[7:]
        self.count, self.top_k = gl.constexpr(count), gl.constexpr(top_k)
        self.size, self.is_normalized = gl.constexpr(size), gl.constexpr(is_normalized)

    @gluon.jit
    def choose(self, routed, now):
        """Wait for the router's logits, and tell who loads which experts are the best."""
        P: gl.constexpr = power_of_two(self.count)
        R: gl.constexpr = rank_layout(P)
        words = routed.poll(now)
        memory = gl.allocate_shared_memory(gl.float32, [CHUNK], S1)
        memory.store(gl.reshape(four_floats(words[0], words[1]), [CHUNK]))
        logits = memory.slice(0, P)
        i = gl.arange(0, P, gl.SliceLayout(1, R))
        j = gl.arange(0, P, gl.SliceLayout(0, R))
        lowest: gl.constexpr = -float("inf")
        own = gl.where(i < self.count, logits.load(gl.SliceLayout(1, R)), lowest)
        others = gl.where(j < self.count, logits.load(gl.SliceLayout(0, R)), lowest)
        others = gl.expand_dims(others, 0) + gl.zeros([P, P], gl.float32, R)
        column = gl.expand_dims(own, 1)
        is_before = gl.expand_dims(j, 0) < gl.expand_dims(i, 1)
        is_better = (others > column) | ((others == column) & is_before)
        rank = gl.sum(is_better.to(gl.int32), 1)  # of each expert
        odds = gl.exp(own - gl.max(others, 1))
        self.keep(rank, odds, P)

    @gluon.jit
    def keep(self, rank, odds, P: gl.constexpr):
        """Put the experts of the first ranks, and their weights, into shared memory."""
        C: gl.constexpr = chosen_layout(P)
        rank = gl.expand_dims(gl.convert_layout(rank, gl.SliceLayout(1, C)), 1)
        odds = gl.expand_dims(gl.convert_layout(odds, gl.SliceLayout(1, C)), 1)
        expert = gl.expand_dims(gl.arange(0, P, gl.SliceLayout(1, C)), 1)
        place = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, C)), 0)
        is_there = (rank == place) & (place < self.top_k)
        found = gl.sum(gl.where(is_there, odds, 0.0), 0)
        if self.is_normalized:
            total = gl.sum(found, 0)
        else:
            total = gl.sum(gl.sum(gl.where(place == 0, odds, 0.0), 0), 0)
        self.ids.store(gl.sum(gl.where(is_there, expert, 0), 0))
        self.weights._reinterpret(gl.float32, [32], S1).store(
            (found / total).to(gl.bfloat16).to(gl.float32)
        )
        gl.thread_barrier()
        mbarrier.arrive(self.chosen, count=1)

    @gluon.jit
    def weight(self, place: gl.constexpr):
        return gl.sum(self.weights.index(place).load(WHOLE), 0)

    @gluon.jit
    def take(self, gated, now, BITS: gl.constexpr):
        """Stage what the experts' gates gave, each times its expert's weight."""
        words = gated.poll(now)
        staged = ()
        for k in gl.static_range(gated.size // CHUNK):
            column = k * CHUNK + thread_index() * 4
            w = column * 0.0
            for place in gl.static_range(self.top_k):
                if meets(place, gated.room, k):
                    w = gl.where(column >= place * gated.room, self.weight(place), w)
            pair = gl.join(w, w)
            factors = gl.reshape(gl.join(pair, pair), [8, 128])
            x = four_floats(words[2 * k], words[2 * k + 1]) * factors
            staged = stage(staged, k, x, BITS)
        return staged

    @gluon.jit
    def wait(self, layer):
        """Return the experts' places among those of all layers, once they are chosen."""
        mbarrier.wait(self.chosen, layer & 1)
        return layer * self.count + self.ids.load(LANES)

    @gluon.jit
    def fetch_down(
        self, stream, weights, experts, t, g, owners, LINES: gl.constexpr, BLOCKS: gl.constexpr,
        LINE: gl.constexpr, GROUP: gl.constexpr,
    ):  # fmt: skip
        """Ask for tiles whose columns are of one chosen expert after another, in pieces."""
        TILES: gl.constexpr = LINE[0]
        rows = experts * LINES + stream.sm * 8
        for block in range(BLOCKS):
            is_there = block * CHUNK + stream.sm * 8 < LINES
            for tile in gl.static_range(TILES):
                owners = stream.claim(
                    t, g + (block * TILES + tile) // GROUP, owners, LINE, stream.flying
                )
                self.fetch_pieces(
                    stream, weights, t, is_there, rows + block * CHUNK, 16 * tile, LINE
                )
                t += 1
        return t, g + BLOCKS * TILES // GROUP, owners

    @gluon.jit
    def fetch_pieces(
        self, stream, weights, t, is_there, rows, first: gl.constexpr, LINE: gl.constexpr
    ):
        """Ask for a tile from a line's segment on, of 128 bytes: no piece crosses two experts."""
        S: gl.constexpr = expert_segments(self.size, LINE[2])
        N: gl.constexpr = piece_segments(self.size, LINE[2])
        G: gl.constexpr = 8 * segment_groups(LINE[2])  # factors of a segment
        for at in gl.static_range(0, 8 * LINE[1], N):
            is_ours = is_there & ((first + at) // S < self.top_k)
            row = pick(rows, (first + at) // S)
            place = (row // 8 * S + (first + at) % S) * G
            stream.copy(weights, t, is_ours, row, (first + at) % S, place, at, N, LINE)


@aggregate
class ExpertLines:
    """The gates of the chosen experts, and what they gate, as the parts of one wide MLP."""

    experts: gl.tensor  # among those of all layers
    size: gl.constexpr
    count: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, experts, size, count):
        self.experts, self.size, self.count = experts, gl.constexpr(size), gl.constexpr(count)

    @gluon.jit
    def find(self, line, part):
        expert = pick(self.experts, line // self.size)
        return (expert * 2 + part) * self.size + line % self.size


@gluon.jit
def pick(values, place):
    """A warp's value in a place."""
    return gl.sum(gl.where(gl.arange(0, 32, LANES) == place, values, 0), 0)
