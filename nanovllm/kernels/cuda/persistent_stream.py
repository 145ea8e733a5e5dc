"""The weights of the persistent step: a stream of tiles, and their products with a vector.

A tile is 8 lines of 1,024 columns. See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from nanovllm.kernels.cuda.persistent_codes import (
    ONE,
    both_blocks,
    load_factors,
    load_x,
    multiply_codes,
    sixteen,
    sum_of,
)
from nanovllm.kernels.cuda.persistent_exchange import CHUNK, LINES, S2, SUMS
from nanovllm.kernels.cuda.persistent_sizes import (
    TILE_BYTES,
    group_chunks,
    is_held,
    is_wide,
    tile_groups,
)

HEAD_FLYING = gl.constexpr(4)  # tiles of the head on their way at once
NUM_USED = gl.constexpr(16)  # barriers of groups: more than a ring has slots
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
RING = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
RING_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 3))
# A tile as words of two weights, [16, 8 lines, 32]: the layout that the tensor cores want of B
TILE = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 8, 4], [8, 1, 1], [2, 1, 0]))


@gluon.constexpr_function
def product_asm(words):
    """Add x times 8 lines of `words` words of two weights to the sums of two of the lines.

    x is every one of the upper 8 lines of A; the lower ones are zero.
    """
    code = "{ .reg .f32 c<4>, d<4>; .reg .b32 z; mov.b32 z, 0; "
    code += f"mov.f32 c0, ${2 * words + 2}; mov.f32 c1, ${2 * words + 3}; "
    code += "".join(f"mov.f32 {name}, 0f00000000; " for name in ("c2", "c3", "d0", "d1"))
    code += "mov.f32 d2, 0f00000000; mov.f32 d3, 0f00000000; "
    for k in range(2, words + 2, 2):
        sums = "{c0, c1, c2, c3}" if k % 4 == 2 else "{d0, d1, d2, d3}"
        code += f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sums}, "
        code += f"{{${k}, z, ${k + 1}, z}}, {{${k + words}, ${k + words + 1}}}, {sums}; "
    return code + "add.f32 $0, c0, d0; add.f32 $1, c1, d1; }"


@gluon.constexpr_function
def product_registers(words):
    return "=f,=f," + "r," * (2 * words) + "f,f"


@gluon.jit
def words_of(tile):
    """The 16 words that each thread has of a tile, as tensors of one word."""
    t = gl.permute(gl.reshape(tile, [2, 8, 8, 4, 8]), [1, 2, 3, 0, 4])
    return sixteen(gl.reshape(t, [8, 8, 4, 16]))


@gluon.jit
def words_of_x(chunk):
    """A thread's part of a staged chunk: the same columns as it has of a tile."""
    x = chunk._reinterpret(gl.int32, [16, 32], S2).load(gl.SliceLayout(1, TILE))
    return words_of(gl.expand_dims(x, 1) + gl.zeros([16, 8, 32], gl.int32, TILE))


@gluon.jit
def multiply(w, i: gl.constexpr, x, c0, c1):
    """Add the products of tile i of w with a chunk of x."""
    operands = [
        x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
        x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
        w[i], w[i + 1], w[i + 2], w[i + 3], w[i + 4], w[i + 5], w[i + 6], w[i + 7],
        w[i + 8], w[i + 9], w[i + 10], w[i + 11], w[i + 12], w[i + 13], w[i + 14], w[i + 15],
        c0, c1,
    ]  # fmt: skip
    types: gl.constexpr = (gl.float32, gl.float32)
    return gl.inline_asm_elementwise(
        product_asm(16), product_registers(16), operands, types, True, 1
    )


@gluon.jit
def spread(
    memory, sums, row, first: gl.constexpr, step: gl.constexpr, N: gl.constexpr, BITS: gl.constexpr
):
    """Store the warps' sums of N blocks for `total`, as rows `row` and on."""
    if BITS < 16:
        # Those of a line are in four threads, of which each stores two rows.
        n = 2 * gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, ONE)))[None, None, :] - row
        even, odd = sums[first], sums[first]
        for r in gl.static_range(N):
            even = gl.where(n == r, sums[first + r * step], even)
            odd = gl.where(n + 1 == r, sums[first + r * step], odd)
        memory.permute([0, 2, 1]).store(gl.reshape(gl.join(even, odd), [8, 8, 8]))
    else:
        n = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, ONE)))[None, :, None] - row
        even, odd = sums[2 * first], sums[2 * first + 1]
        for r in gl.static_range(1, N):
            even = gl.where(n == r, sums[2 * (first + r * step)], even)
            odd = gl.where(n == r, sums[2 * (first + r * step) + 1], odd)
        memory.store(gl.reshape(gl.join(even, odd), [8, 8, 8]))


@gluon.jit
def total(memory):
    """Add the warps' sums up: [8 blocks, 8 lines]."""
    sums = gl.sum(memory.load(gl.SliceLayout(1, SUMS)), 0)
    return gl.convert_layout(sums, LINES, assert_trivial=True)


@gluon.jit
def add_up(memory, sums, row, N: gl.constexpr, BITS: gl.constexpr):
    spread(memory, sums, row, 0, 1, N, BITS)
    return total(memory)


@aggregate
class Stream:
    """This program's tiles of all weights, in the order of their use.

    Tiles of a group are used, and their slots come free, together. Where in the stream who loads or
    multiplies is, t says in tiles and g in groups. BITS are those of a weight.
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
        self, weights, t, g, owners, layer, LINES: gl.constexpr, BLOCKS: gl.constexpr,
        TILES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, FLYING: gl.constexpr,
        BITS: gl.constexpr,
    ):  # fmt: skip
        """Ask for this program's tiles of a layer; gate and up are PARTS whose blocks alternate."""
        codes, factors = weights
        FACTORS: gl.constexpr = 8 * tile_groups(BITS)
        for i in range(BLOCKS * PARTS * TILES):
            block, tile = i // TILES, i % TILES
            line = block // PARTS * CHUNK + self.sm * 8
            # Beyond the last line of all the copy engine writes zeros, and reads nothing.
            is_there = line < LINES
            line = gl.where(is_there, (layer * PARTS + block % PARTS) * LINES + line, 1 << 30)
            owners = self.claim(t, g + i // GROUP, owners, TILE_BYTES + 4 * FACTORS, FLYING)
            full = self.full.index(t % self.slots)
            tma.async_copy_global_to_shared(
                codes, [tile * 16, line, 0], full, self.ring.index(t % self.slots)
            )
            if BITS < 16:
                place = gl.where(is_there, (line // 8 * TILES + tile) * FACTORS, 1 << 30)
                target = self.factors.index(t % self.slots).slice(0, FACTORS, 0)
                tma.async_copy_global_to_shared(factors, [place], full, target)
            t += 1
        return t, g + BLOCKS * PARTS * TILES // GROUP, owners

    @gluon.jit
    def claim(self, t, g, owners, BYTES: gl.constexpr, FLYING: gl.constexpr):
        """Wait for a tile's slot, and until few enough are on their way, and expect its bytes."""
        owners = self.take_slot(t, g, owners)
        if t >= FLYING:
            before = t - FLYING
            mbarrier.wait(self.full.index(before % self.slots), (before // self.slots) & 1)
        mbarrier.expect(self.full.index(t % self.slots), BYTES)
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
    def words_at(self, t):
        """A thread's words of the tile at a place of the stream."""
        return words_of(self.words.index(t % self.slots).load(TILE))

    @gluon.jit
    def grab(
        self, t, g, N: gl.constexpr, FLYING: gl.constexpr, BITS: gl.constexpr,
        PIECE: gl.constexpr,
    ):  # fmt: skip
        """Move a group of N tiles into registers, with the factors of each."""
        self.wait(t, N, FLYING)
        w = ()
        for k in gl.static_range(N):
            w = w + self.words_at(t + k)
            if BITS < 16:
                w = w + load_factors(self.factors.index((t + k) % self.slots), BITS, PIECE)
        self.release(g)
        return w

    @gluon.jit
    def grab_early(self, t, g, BLOCKS: gl.constexpr, TILES: gl.constexpr, PIECE: gl.constexpr = 8):
        """Move a projection's tiles into registers before x comes, if they fit."""
        w = ()
        if is_held(BLOCKS, TILES, self.bits):
            w = self.grab(t, g, BLOCKS * TILES, self.flying, self.bits, PIECE)
        return w

    @gluon.jit
    def hold_x(self, x, TILES: gl.constexpr):
        """What products with codes need of x for all blocks, moved into registers if it fits."""
        parts, totals = (), ()
        if self.bits < 16:
            for k in gl.static_range(2 * TILES):
                if self.bits == 4 or not is_wide(TILES, self.bits):
                    part = load_x(x[k], self.bits)
                    if self.bits == 4:
                        totals = totals + (sum_of(part),)
                    if not is_wide(TILES, self.bits):
                        parts = parts + (part,)
        return parts, totals

    @gluon.jit
    def products(
        self, t, g, held, x, held_x, COUNT: gl.constexpr, TILES: gl.constexpr,
        FLYING: gl.constexpr, BITS: gl.constexpr, PIECE: gl.constexpr = 8,
    ):  # fmt: skip
        """Multiply COUNT blocks of lines with x: this warp's part of each.

        A thread has the sums of two lines, or by codes those of one. Factors of codes came for
        PIECE segments at a time.
        """
        sums = ()
        if BITS < 16:
            if is_wide(TILES, BITS):
                sums = self.products_of_codes(t, g, x, held_x[1], COUNT, TILES, PIECE)
            else:
                if len(held) == 0:
                    held = self.grab(t, g, COUNT * TILES, FLYING, BITS, PIECE)
                sums = self.products_of_held_codes(held, held_x, COUNT, TILES)
        elif len(held) > 0:
            sums = self.products_of_held(held, x, COUNT, TILES)
        elif not is_wide(TILES, BITS):
            w = self.grab(t, g, COUNT * TILES, FLYING, BITS, PIECE)
            sums = self.products_of_held(w, x, COUNT, TILES)
        else:
            sums = self.products_by_tile(t, g, x, COUNT, TILES, FLYING)
        return sums

    @gluon.jit
    def products_of_held(self, w, x, COUNT: gl.constexpr, TILES: gl.constexpr):
        parts, sums = (), ()
        for c in gl.static_range(TILES):
            parts = parts + (words_of_x(x[c]),)
        for r in gl.static_range(COUNT):
            c0 = gl.zeros([8, 8, 4], gl.float32, ONE)
            c1 = c0
            for c in gl.static_range(TILES):
                c0, c1 = multiply(w, (r * TILES + c) * 16, parts[c], c0, c1)
            sums = sums + (c0, c1)
        return sums

    @gluon.jit
    def products_by_tile(
        self, t, g, x, COUNT: gl.constexpr, TILES: gl.constexpr, FLYING: gl.constexpr
    ):
        N: gl.constexpr = group_chunks(TILES)
        sums = ()
        for _ in gl.static_range(COUNT):
            c0 = gl.zeros([8, 8, 4], gl.float32, ONE)
            c1 = c0
            for i in gl.static_range(TILES // N):
                self.wait(t, N, FLYING)
                for c in gl.static_range(N):
                    tile = self.words_at(t + c)
                    c0, c1 = multiply(tile, 0, words_of_x(x[i * N + c]), c0, c1)
                self.release(g)
                t += N
                g += 1
            sums = sums + (c0, c1)
        return sums

    @gluon.jit
    def products_of_held_codes(self, w, held_x, COUNT: gl.constexpr, TILES: gl.constexpr):
        sums = ()
        for r in gl.static_range(COUNT):
            total = gl.zeros([8, 8, 4], gl.float32, ONE)
            for c in gl.static_range(TILES):
                total = self.add_tile(w, (r * TILES + c) * 18, held_x[0], held_x[1], c, total)
            sums = sums + (self.whole(total),)
        return sums

    @gluon.jit
    def products_of_codes(
        self, t, g, x, x_sums, COUNT: gl.constexpr, TILES: gl.constexpr, PIECE: gl.constexpr
    ):
        N: gl.constexpr = group_chunks(TILES)
        sums = ()
        for _ in gl.static_range(COUNT):
            total = gl.zeros([8, 8, 4], gl.float32, ONE)
            for i in gl.static_range(TILES // N):
                self.wait(t, N, self.flying)
                for c in gl.static_range(N):
                    total = self.add_next(t + c, x, x_sums, 2 * (i * N + c), total, PIECE)
                self.release(g)
                t += N
                g += 1
            sums = sums + (self.whole(total),)
        return sums

    @gluon.jit
    def add_next(self, t, x, x_sums, k: gl.constexpr, total, PIECE: gl.constexpr):
        """Add the products of a tile that has come with pieces k and k + 1 of x."""
        factors = load_factors(self.factors.index(t % self.slots), self.bits, PIECE)
        w = self.words_at(t) + factors
        parts = (load_x(x[k], self.bits), load_x(x[k + 1], self.bits))
        own = ()
        if self.bits == 4:
            own = (x_sums[k], x_sums[k + 1])
        return self.add_tile(w, 0, parts, own, 0, total)

    @gluon.jit
    def add_tile(self, w, i: gl.constexpr, parts, x_sums, c: gl.constexpr, total):
        """Add the products of a tile, whose 16 words and 2 of factors begin at i, with x."""
        for a in gl.static_range(2):
            x_sum = total
            if self.bits == 4:
                x_sum = x_sums[2 * c + a]
            x, factor = parts[2 * c + a], w[i + 16 + a]
            total = multiply_codes(w, i + 8 * a, x, x_sum, factor, total, self.bits)
        return total

    @gluon.jit
    def whole(self, total):
        if self.bits == 4:
            total = both_blocks(total)
        return total
