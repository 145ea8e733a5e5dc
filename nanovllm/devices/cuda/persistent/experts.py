"""Experts in the persistent step: which of them a token goes to, and how their weights are found.

The gates of the chosen experts are the lines of one wide MLP, one expert after another, and so are
the columns of their outputs. Only who loads must know whose they are. See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.exchange import CHUNK, S2, THREADS, four_floats, thread_index
from nanovllm.devices.cuda.persistent.products import stage
from nanovllm.devices.cuda.persistent.sizes import (
    expert_segments,
    piece_segments,
    segment_groups,
)
from nanovllm.devices.cuda.persistent.stream import LANES

HIGH, LOW = gl.constexpr(-65536), gl.constexpr(0xFFFF)  # bits of a key: its logit, its expert
LOWEST = gl.constexpr(-(1 << 31))


@gluon.constexpr_function
def meets(place, room, chunk):
    """Whether the columns of the expert in a place lie in a chunk."""
    return place * room < (chunk + 1) * 1024 and (place + 1) * room > chunk * 1024


@aggregate
class Experts:
    """The experts that were chosen in a layer, the best first, in one of 32 places each."""

    ids: gl.shared_memory_descriptor  # [8 warps, 32], of which each has all
    weights: gl.shared_memory_descriptor  # [32, 8 warps]
    chosen: gl.shared_memory_descriptor  # a barrier: they are there
    count: gl.constexpr
    top_k: gl.constexpr
    size: gl.constexpr  # of an expert's MLP
    is_normalized: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ids, weights, chosen, shape):
        self.ids, self.weights, self.chosen = ids, weights, chosen
        count, top_k, size, is_normalized = shape.experts
        self.count, self.top_k = gl.constexpr(count), gl.constexpr(top_k)
        self.size, self.is_normalized = gl.constexpr(size), gl.constexpr(is_normalized)

    @gluon.jit
    def choose(self, routed, now):
        """Wait for the router's logits, and tell who loads which experts are the best.

        Every warp does so by itself. A key is an integer that grows with a logit, and behind it an
        expert's number, of which of two logits alike the smaller one counts.
        """
        N: gl.constexpr = (self.count + 127) // 128
        lane = thread_index() % 32
        words = routed.poll_from(lane * 4, now, N, 128)
        keys = ()
        for n in gl.static_range(N):
            for j in gl.static_range(4):
                word = words[2 * n + j // 2]
                expert = n * 128 + lane * 4 + j
                key = in_order(word << 16 if j % 2 == 0 else word & HIGH) + (LOW - expert)
                keys = keys + (gl.where(expert < self.count, key, LOWEST),)
        found = lane * 0 + LOWEST
        left = keys
        for place in gl.static_range(self.top_k):
            best = gl.expand_dims(gl.max(largest(left), 1), 1)
            found = gl.where(lane == place, best, found)
            left = without(left, best)
        self.keep(keys, found, lane)

    @gluon.jit
    def keep(self, keys, found, lane):
        """Put the experts of the best keys into shared memory, and then their weights."""
        self.ids._reinterpret(gl.int32, [8, 32], S2).store(LOW - (found & LOW))
        gl.thread_barrier()
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
    def weight(self, place: gl.constexpr):
        found = self.weights.index(place).load(gl.SliceLayout(1, THREADS))
        return gl.expand_dims(found, 1)

    @gluon.jit
    def take(self, gated, now, BITS: gl.constexpr):
        """Stage what the experts' gates gave, each times its expert's weight.

        What was multiplied first is staged while the rest is on its way.
        """
        N: gl.constexpr = gated.size // CHUNK
        words = gated.poll(now, 0, N // 2) if N > 1 else ()
        staged = ()
        for k in gl.static_range(N):
            if k == N // 2:
                words = words + gated.poll(now, N // 2, N - N // 2)
            column = k * CHUNK + thread_index() * 4
            w = column * 0.0
            for place in gl.static_range(self.top_k):
                if meets(place, gated.room, k):
                    w = gl.where(column >= place * gated.room, self.weight(place), w)
            pair = gl.join(w, w)
            factors = gl.reshape(gl.join(pair, pair), [8, 128])
            x = four_floats(words[2 * k], words[2 * k + 1]) * factors
            staged = stage(staged, k, (x,), BITS)
        return staged

    @gluon.jit
    def wait(self, layer):
        """Return the experts' places among those of all layers, once they are chosen."""
        mbarrier.wait(self.chosen, layer & 1)
        return layer * self.count + self.ids.index(0).load(LANES)

    @gluon.jit
    def fetch_down(
        self, stream, weights, experts, t, g, owners, LINES: gl.constexpr, BLOCKS: gl.constexpr,
        LINE: gl.constexpr, GROUP: gl.constexpr, COLUMNS: gl.constexpr,
    ):  # fmt: skip
        """Ask for tiles whose columns are of one chosen expert after another, in pieces."""
        TILES: gl.constexpr = LINE.tiles
        rows = experts * LINES + stream.sm * 8
        for first in gl.static_range(0, TILES, COLUMNS):
            for block in range(BLOCKS):
                is_there = block * CHUNK + stream.sm * 8 < LINES
                for i in gl.static_range(COLUMNS):
                    group = g + (first * BLOCKS + block * COLUMNS + i) // GROUP
                    owners = stream.claim(t, group, owners, LINE, stream.flying)
                    lines = rows + block * CHUNK
                    self.fetch_pieces(stream, weights, t, is_there, lines, 16 * (first + i), LINE)
                    t += 1
        return t, g + BLOCKS * TILES // GROUP, owners

    @gluon.jit
    def fetch_pieces(
        self, stream, weights, t, is_there, rows, first: gl.constexpr, LINE: gl.constexpr
    ):
        """Ask for a tile from a line's segment on, of 128 bytes: no piece crosses two experts."""
        S: gl.constexpr = expert_segments(self.size, LINE.bits)
        N: gl.constexpr = piece_segments(self.size, LINE.bits)
        G: gl.constexpr = 8 * segment_groups(LINE.bits)  # factors of a segment
        for at in gl.static_range(0, 8 * LINE.halves, N):
            is_ours = is_there & ((first + at) // S < self.top_k)
            row = pick(rows, (first + at) // S)
            place = (row // 8 * S + (first + at) % S) * G
            stream.copy(weights, t, is_ours, row, (first + at) % S, place, at, N, LINE)


@aggregate
class ExpertLines:
    """The gates of the chosen experts, and what they gate, as the parts of one wide MLP."""

    experts: gl.tensor  # among those of all layers
    count: gl.constexpr  # of lines
    part: gl.constexpr  # an expert's

    @gluon.constexpr_function
    def __init__(self, experts, count, part):
        self.experts, self.count, self.part = experts, gl.constexpr(count), gl.constexpr(part)

    @gluon.jit
    def find(self, line):
        return pick(self.experts, line // self.part) * (2 * self.part) + line % self.part


@gluon.jit
def in_order(bits):
    """Bits of floats as integers of the same order, -0 before 0; bits of no bfloat16 stay."""
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
def pick(values, place):
    """A warp's value in a place."""
    return gl.sum(gl.where(gl.arange(0, 32, LANES) == place, values, 0), 0)
