"""The weights of the persistent step: a stream of tiles, and their products with a vector.

A tile is 8 lines of 1,024 columns. See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.exchange import CHUNK, LINES, SUMS
from nanovllm.devices.cuda.persistent.products import (
    ONE,
    both_blocks,
    load_factors,
    load_words,
    load_x,
    multiply,
    sum_of,
)
from nanovllm.devices.cuda.persistent.sizes import (
    factor_words,
    group_chunks,
    is_held,
    is_wide,
    line_flying,
    segment_groups,
    tile_bytes,
    tile_factors,
    tile_words,
)

HEAD_FLYING = gl.constexpr(4)  # tiles of the head on their way at once
NOWHERE = gl.constexpr(1 << 30)  # beyond the last line of all the copy engine writes zeros
NUM_USED = gl.constexpr(16)  # barriers of groups: more than a ring has slots
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
RING = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
RING_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 3))


@gluon.jit
def spread(memory, sums, row, first: gl.constexpr, step: gl.constexpr, N: gl.constexpr):
    """Store the warps' sums of N blocks for `total`, as rows `row` and on."""
    # Those of a line are in four threads, of which each stores two rows.
    n = 2 * gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, ONE)))[None, None, :] - row
    even, odd = sums[first], sums[first]
    for r in gl.static_range(N):
        even = gl.where(n == r, sums[first + r * step], even)
        odd = gl.where(n + 1 == r, sums[first + r * step], odd)
    memory.permute([0, 2, 1]).store(gl.reshape(gl.join(even, odd), [8, 8, 8]))


@gluon.jit
def total(memory):
    """Add the warps' sums up: [8 blocks, 8 lines]."""
    sums = gl.sum(memory.load(gl.SliceLayout(1, SUMS)), 0)
    return gl.convert_layout(sums, LINES, assert_trivial=True)


@gluon.jit
def add_up(memory, sums, row, N: gl.constexpr):
    spread(memory, sums, row, 0, 1, N)
    return total(memory)


@aggregate
class Lines:
    """Where a projection's lines of a layer are among all, and how far apart those of its parts."""

    first: gl.tensor
    count: gl.constexpr
    part: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, first, count):
        self.first, self.count, self.part = first, gl.constexpr(count), gl.constexpr(count)

    @gluon.jit
    def find(self, line):
        return self.first + line


@aggregate
class Stream:
    """This program's tiles of all weights, in the order of their use.

    Tiles of a group are used, and their slots come free, together. Where in the stream who loads or
    multiplies is, t says in tiles and g in groups. LINE is a `Line` of persistent_sizes.py.
    """

    ring: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor  # the same memory
    factors: gl.shared_memory_descriptor  # of codes, for each slot
    full: gl.shared_memory_descriptor  # a barrier for each slot
    used: gl.shared_memory_descriptor  # and for groups, in rotation
    sums: gl.shared_memory_descriptor  # what warps add up
    more_sums: gl.shared_memory_descriptor
    sm: gl.tensor
    slots: gl.constexpr
    flying: gl.constexpr  # tiles on their way at once: more of them slow the exchanges down
    bits: gl.constexpr  # of all weights but the head's

    @gluon.constexpr_function
    def __init__(self, ring, words, factors, full, used, sums, more_sums, sm, slots, flying, bits):
        self.ring, self.words, self.factors = ring, words, factors
        self.full, self.used = full, used
        self.sums, self.more_sums = sums, more_sums
        self.sm, self.slots, self.flying = sm, gl.constexpr(slots), gl.constexpr(flying)
        self.bits = gl.constexpr(bits)

    @gluon.jit
    def fetch(
        self, weights, lines, t, g, owners, BLOCKS: gl.constexpr, LINE: gl.constexpr,
        PARTS: gl.constexpr, GROUP: gl.constexpr, FLYING: gl.constexpr,
    ):  # fmt: skip
        """Ask for this program's tiles of a layer; gate and up are PARTS whose blocks alternate."""
        TILES: gl.constexpr = LINE.tiles
        N: gl.constexpr = PARTS * TILES
        for block in range(BLOCKS):
            line = block * CHUNK + self.sm * 8
            first = lines.find(line)
            for i in range(N):
                row, tile = first + i // TILES * lines.part, i % TILES
                owners = self.claim(t, g + (block * N + i) // GROUP, owners, LINE, FLYING)
                place = (row // 8 * TILES + tile) * tile_factors(LINE)
                is_there = line < lines.count
                self.copy(weights, t, is_there, row, tile * 16, place, 0, 8 * LINE.halves, LINE)
                t += 1
        return t, g + BLOCKS * N // GROUP, owners

    @gluon.jit
    def copy(
        self, weights, t, is_there, row, segment, place, at: gl.constexpr, N: gl.constexpr,
        LINE: gl.constexpr,
    ):  # fmt: skip
        """Ask for N segments of 8 lines, and their factors, for a tile from its segment `at` on."""
        weight, factors = weights
        slot = t % self.slots
        full, target = self.full.index(slot), self.ring.index(slot).slice(at, N, 0)
        there = [segment, gl.where(is_there, row, NOWHERE), 0]
        tma.async_copy_global_to_shared(weight, there, full, target)
        if LINE.bits < 16:
            STEP: gl.constexpr = factor_words(LINE.bits, N)
            COUNT: gl.constexpr = N * 8 * segment_groups(LINE.bits)
            target = self.factors.index(slot).slice(at // N * STEP, COUNT, 0)
            there = [gl.where(is_there, place, NOWHERE)]
            tma.async_copy_global_to_shared(factors, there, full, target)

    @gluon.jit
    def claim(self, t, g, owners, LINE: gl.constexpr, FLYING: gl.constexpr):
        """Wait for a tile's slot, and until few enough are on their way, and expect its bytes."""
        owners = self.take_slot(t, g, owners)
        before = t - line_flying(LINE, FLYING, self.slots)
        if before >= 0:
            mbarrier.wait(self.full.index(before % self.slots), (before // self.slots) & 1)
        mbarrier.expect(self.full.index(t % self.slots), tile_bytes(LINE))
        return owners

    @gluon.jit
    def take_slot(self, t, g, owners):
        """Wait until the group that a slot's last tile was of is used; note whose the next is."""
        slot = t % self.slots
        lane = gl.arange(0, 32, LANES)
        if t >= self.slots:
            owner = gl.sum(gl.where(lane == slot, owners, 0), 0)
            mbarrier.wait(self.used.index(owner % NUM_USED), (owner // NUM_USED) & 1)
        return gl.where(lane == slot, g, owners)

    @gluon.jit
    def wait(self, t, N: gl.constexpr, FLYING: gl.constexpr):
        """Wait for N tiles: before the last were asked for, those before them had come."""
        for k in gl.static_range(N):
            if k >= N - FLYING:
                mbarrier.wait(self.full.index((t + k) % self.slots), ((t + k) // self.slots) & 1)

    @gluon.jit
    def release(self, g):
        """Give a group's slots back, once every warp has loaded its tiles."""
        gl.thread_barrier()
        mbarrier.arrive(self.used.index(g % NUM_USED), count=1)

    @gluon.jit
    def tile_at(self, t, LINE: gl.constexpr, PIECE: gl.constexpr):
        """A thread's words of the tile at a place of the stream, and their factors."""
        w = load_words(self.words.index(t % self.slots), LINE.halves)
        if LINE.bits < 16:
            w = w + load_factors(self.factors.index(t % self.slots), LINE.halves, LINE.bits, PIECE)
        return w

    @gluon.jit
    def grab(self, t, g, N: gl.constexpr, LINE: gl.constexpr, FLYING: gl.constexpr,
             PIECE: gl.constexpr):  # fmt: skip
        """Move a group of N tiles into registers, with the factors of each."""
        self.wait(t, N, line_flying(LINE, FLYING, self.slots))
        w = ()
        for k in gl.static_range(N):
            w = w + self.tile_at(t + k, LINE, PIECE)
        self.release(g)
        return w

    @gluon.jit
    def grab_early(
        self, t, g, BLOCKS: gl.constexpr, LINE: gl.constexpr, FLYING: gl.constexpr,
        PIECE: gl.constexpr = 8,
    ):  # fmt: skip
        """Move a projection's tiles into registers before x comes, if they fit."""
        w = ()
        if is_held(BLOCKS, LINE):
            w = self.grab(t, g, BLOCKS * LINE.tiles, LINE, FLYING, PIECE)
        return w

    @gluon.jit
    def hold_x(self, x, LINE: gl.constexpr):
        """What products need of x for all blocks, moved into registers if it fits."""
        parts, totals = (), ()
        for k in gl.static_range(LINE.tiles * LINE.halves):
            if LINE.bits == 4 or not is_wide(LINE):
                part = load_x(x[k], LINE.bits)
                if LINE.bits == 4:
                    totals = totals + (sum_of(part),)
                if not is_wide(LINE):
                    parts = parts + (part,)
        return parts, totals

    @gluon.jit
    def products(
        self, t, g, held, x, held_x, COUNT: gl.constexpr, LINE: gl.constexpr,
        FLYING: gl.constexpr, PIECE: gl.constexpr = 8,
    ):  # fmt: skip
        """Multiply COUNT blocks of lines with x: this warp's part of each; a thread has a line's.

        Factors of codes came for PIECE segments at a time.
        """
        sums = ()
        if len(held) == 0 and is_wide(LINE):
            sums = self.products_by_tile(t, g, x, held_x, COUNT, LINE, FLYING, PIECE)
        else:
            if len(held) == 0:
                held = self.grab(t, g, COUNT * LINE.tiles, LINE, FLYING, PIECE)
            sums = self.products_of_held(held, x, held_x, COUNT, LINE)
        return sums

    @gluon.jit
    def products_of_held(self, w, x, held_x, COUNT: gl.constexpr, LINE: gl.constexpr):
        TILES: gl.constexpr = LINE.tiles
        WORDS: gl.constexpr = tile_words(LINE)
        sums = ()
        for r in gl.static_range(COUNT):
            total = gl.zeros([8, 8, 4], gl.float32, ONE)
            for c in gl.static_range(TILES):
                tile = w[(r * TILES + c) * WORDS : (r * TILES + c + 1) * WORDS]
                total = self.add_tile(tile, x, held_x, c, total, LINE)
            sums = sums + (whole(total, LINE.bits),)
        return sums

    @gluon.jit
    def products_by_tile(
        self, t, g, x, held_x, COUNT: gl.constexpr, LINE: gl.constexpr, FLYING: gl.constexpr,
        PIECE: gl.constexpr,
    ):  # fmt: skip
        N: gl.constexpr = group_chunks(LINE.tiles)
        sums = ()
        for _ in gl.static_range(COUNT):
            total = gl.zeros([8, 8, 4], gl.float32, ONE)
            for i in gl.static_range(LINE.tiles // N):
                self.wait(t, N, line_flying(LINE, FLYING, self.slots))
                for c in gl.static_range(N):
                    w = self.tile_at(t + c, LINE, PIECE)
                    total = self.add_tile(w, x, held_x, i * N + c, total, LINE)
                self.release(g)
                t += N
                g += 1
            sums = sums + (whole(total, LINE.bits),)
        return sums

    @gluon.jit
    def add_tile(self, w, x, held_x, c: gl.constexpr, total, LINE: gl.constexpr):
        """Add the products of tile c of a line with its pieces of x."""
        HALVES: gl.constexpr = LINE.halves
        parts, x_sums = (), ()
        for k in gl.static_range(c * HALVES, (c + 1) * HALVES):
            parts = parts + (held_x[0][k] if len(held_x[0]) > 0 else load_x(x[k], LINE.bits),)
            if LINE.bits == 4:
                x_sums = x_sums + (held_x[1][k],)
        return multiply(w, parts, x_sums, total, HALVES, LINE.bits)


@gluon.jit
def whole(total, BITS: gl.constexpr):
    """The sum of a line, of which with 4-bit codes each thread has half of the blocks."""
    if BITS == 4:
        total = both_blocks(total)
    return total
