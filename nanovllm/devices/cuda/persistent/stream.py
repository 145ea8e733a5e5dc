"""The stream of weight tiles of the persistent step: TMA copies, and multiplication by x.

sizes.py defines tiles, groups and pieces. See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.exchange import CHUNK
from nanovllm.devices.cuda.persistent.sizes import (
    is_resident,
    is_wide,
    num_copies,
    power_of_two,
    scale_words,
    segment_groups,
    sums_layout,
    tile_bytes,
    tile_scales,
    tile_words,
    tiles_in_flight,
    wide_group_tiles,
)
from nanovllm.devices.cuda.persistent.tile_mma import (
    ONE,
    by_row,
    load_scales,
    load_words,
    load_x,
    multiply,
    num_sets,
    quad_lane,
    stacked,
    sums_of,
)

HEAD_IN_FLIGHT = gl.constexpr(4)  # maximum tiles of the LM head in flight
OUT_OF_BOUNDS = gl.constexpr(1 << 30)  # index beyond any weight, for which TMA writes zeros
NUM_USED = gl.constexpr(16)  # number of mbarriers for consumed groups; exceeds the number of slots
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
RING = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
RING_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 3))

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name in Triton 3.6


@gluon.jit
def store_sums(
    memory, sums, first: gl.constexpr, step: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr
):
    """Store each warp's sums of N blocks in shared memory, where `reduce_sums` adds them up.

    The blocks are every `step`-th element of `sums`, starting at `first`.
    """
    # Each of the four threads of a weight row holds the sums of one batch row, or of two if ROWS is
    # 8. If ROWS is 1 or 2, threads hold the same sums, and each of them stores some of the blocks.
    COPIES: gl.constexpr = num_copies(ROWS)
    FOURS: gl.constexpr = len(sums[0])
    BLOCKS: gl.constexpr = max(power_of_two(N), COPIES)
    EACH: gl.constexpr = BLOCKS // COPIES
    copy = quad_lane() // (4 // COPIES)
    stored = ()
    for b in gl.static_range(EACH):
        fours = ()
        for f in gl.static_range(FOURS):
            value = sums[first + min(b, N - 1) * step][f]
            for c in gl.static_range(1, COPIES):
                if c * EACH + b < N:
                    value = gl.where(copy == c, sums[first + (c * EACH + b) * step][f], value)
            fours = fours + (value,)
        stored = stored + (stacked(fours),)
    values = gl.reshape(stacked(stored), [8, 8, COPIES, 4 // COPIES, FOURS, EACH])
    values = gl.permute(values, [0, 2, 5, 4, 3, 1])
    memory.slice(0, BLOCKS, 1).store(gl.reshape(values, [8, BLOCKS, ROWS, 8]))


@gluon.jit
def reduce_sums(memory, BLOCKS: gl.constexpr, ROWS: gl.constexpr):
    """Return the sums over all warps: [blocks, rows, 8 weight rows]."""
    L: gl.constexpr = sums_layout(BLOCKS, ROWS)
    sums = gl.sum(memory.load(gl.SliceLayout(1, L)), 0)
    return gl.convert_layout(sums, gl.SliceLayout(0, gl.SliceLayout(0, L)), assert_trivial=True)


@aggregate
class WeightRows:
    """The weight rows of one layer's projection, within the tensor of all layers."""

    first: gl.tensor
    count: gl.constexpr  # weight rows per part; gate_up has two parts, other projections one
    part_stride: gl.constexpr  # weight rows from one part to the next

    @gluon.constexpr_function
    def __init__(self, first, count):
        self.first, self.count, self.part_stride = first, gl.constexpr(count), gl.constexpr(count)

    @gluon.jit
    def find(self, weight_row):
        return self.first + weight_row


@aggregate
class Stream:
    """This CTA's tiles of all weights, in the order of use.

    The tiles of a group are consumed together, and their slots become free together. A position in
    the stream is a pair (t, g): t counts tiles, g counts groups. The loading warp and the compute
    warps each track their own position. FORMAT is a `RowFormat` of sizes.py.
    """

    ring: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor  # the memory of the ring, as int32 words
    scales: gl.shared_memory_descriptor  # scales of quantized weights, for each slot
    full: gl.shared_memory_descriptor  # mbarrier per slot; completes when its tile has arrived
    used: gl.shared_memory_descriptor  # mbarriers of groups, in rotation; completed by `release`
    sums: gl.shared_memory_descriptor  # the warps' sums: [8 warps, blocks, rows, 8 weight rows]
    more_sums: gl.shared_memory_descriptor  # like `sums`, for `up` while `sums` has `gate`
    cta: gl.tensor  # index of this CTA
    blocks: gl.constexpr  # maximum number of blocks whose sums are reduced together
    rows: gl.constexpr
    slots: gl.constexpr
    in_flight: gl.constexpr  # maximum tiles in flight: more would slow down the exchanges
    bits: gl.constexpr  # bits per weight, except in the LM head and the router

    @gluon.constexpr_function
    def __init__(
        self,
        ring,
        words,
        scales,
        full,
        used,
        sums,
        more_sums,
        cta,
        blocks,
        rows,
        slots,
        in_flight,
        bits,
    ):
        self.ring, self.words, self.scales = ring, words, scales
        self.full, self.used = full, used
        self.sums, self.more_sums = sums, more_sums
        self.cta, self.slots, self.in_flight = cta, gl.constexpr(slots), gl.constexpr(in_flight)
        self.blocks, self.rows, self.bits = (
            gl.constexpr(blocks),
            gl.constexpr(rows),
            gl.constexpr(bits),
        )

    @gluon.jit
    def reduce(self, sums, N: gl.constexpr):
        store_sums(self.sums, sums, 0, 1, N, self.rows)
        return reduce_sums(self.sums, self.blocks, self.rows)

    @gluon.jit
    def fetch(
        self, weights, weight_rows, t, g, owners, BLOCKS: gl.constexpr, FORMAT: gl.constexpr,
        PARTS: gl.constexpr, GROUP: gl.constexpr, IN_FLIGHT: gl.constexpr,
        COLUMNS: gl.constexpr = 0,
    ):  # fmt: skip
        """Start the TMA copies of this CTA's tiles of a projection in one layer.

        With two PARTS, blocks of gate and of up alternate. With COLUMNS, the first COLUMNS tiles of
        all blocks come before the next COLUMNS tiles of all blocks. Return the next position (t, g)
        and the new `owners` (see `claim`).
        """
        TILES: gl.constexpr = COLUMNS if COLUMNS > 0 else FORMAT.tiles
        N: gl.constexpr = PARTS * TILES
        for turn in range(BLOCKS * (FORMAT.tiles // TILES)):
            block, before = turn % BLOCKS, turn // BLOCKS * TILES
            weight_row = block * CHUNK + self.cta * 8
            first = weight_rows.find(weight_row)
            for i in range(N):
                row, tile = first + i // TILES * weight_rows.part_stride, before + i % TILES
                owners = self.claim(t, g + (turn * N + i) // GROUP, owners, FORMAT, IN_FLIGHT)
                scale_offset = (row // 8 * FORMAT.tiles + tile) * tile_scales(FORMAT)
                is_in_bounds = weight_row < weight_rows.count
                self.copy(
                    weights, t, is_in_bounds, row, tile * 16, scale_offset, 0, 8 * FORMAT.halves,
                    FORMAT,
                )  # fmt: skip
                t += 1
        return t, g + BLOCKS * PARTS * FORMAT.tiles // GROUP, owners

    @gluon.jit
    def copy(
        self, weights, t, is_in_bounds, row, segment, scale_offset, target: gl.constexpr,
        N: gl.constexpr, FORMAT: gl.constexpr,
    ):  # fmt: skip
        """Start the TMA copies of N segments of each of 8 weight rows, and of their scales.

        The segments are written to the slot of tile t, starting at segment `target` of that tile.
        """
        weight, scales = weights
        slot = t % self.slots
        full, destination = self.full.index(slot), self.ring.index(slot).slice(target, N, 0)
        coordinates = [segment, gl.where(is_in_bounds, row, OUT_OF_BOUNDS), 0]
        tma.async_copy_global_to_shared(weight, coordinates, full, destination)
        if FORMAT.bits < 16:
            STEP: gl.constexpr = scale_words(FORMAT.bits, N)
            COUNT: gl.constexpr = N * 8 * segment_groups(FORMAT.bits)
            destination = self.scales.index(slot).slice(target // N * STEP, COUNT, 0)
            coordinates = [gl.where(is_in_bounds, scale_offset, OUT_OF_BOUNDS)]
            tma.async_copy_global_to_shared(scales, coordinates, full, destination)

    @gluon.jit
    def claim(self, t, g, owners, FORMAT: gl.constexpr, IN_FLIGHT: gl.constexpr):
        """Wait for tile t's slot, and until few enough tiles are in flight; then expect its bytes.

        `owners` holds, for each slot, the group of its tile. Return it with tile t's slot set to g.
        """
        owners = self.take_slot(t, g, owners)
        before = t - tiles_in_flight(FORMAT, IN_FLIGHT, self.slots)
        if before >= 0:
            mbarrier.wait(self.full.index(before % self.slots), (before // self.slots) & 1)
        mbarrier.expect(self.full.index(t % self.slots), tile_bytes(FORMAT))
        return owners

    @gluon.jit
    def take_slot(self, t, g, owners):
        """Wait until the previous tile in tile t's slot is consumed; return the new `owners`."""
        slot = t % self.slots
        lane = gl.arange(0, 32, LANES)
        if t >= self.slots:
            owner = gl.sum(gl.where(lane == slot, owners, 0), 0)
            mbarrier.wait(self.used.index(owner % NUM_USED), (owner // NUM_USED) & 1)
        return gl.where(lane == slot, g, owners)

    @gluon.jit
    def wait(self, t, N: gl.constexpr, IN_FLIGHT: gl.constexpr):
        """Wait until tiles t to t + N - 1 have arrived.

        Only the last IN_FLIGHT tiles can still be in flight: the loading warp waits for the earlier
        ones before it starts to copy the last tile.
        """
        for k in gl.static_range(N):
            if k >= N - IN_FLIGHT:
                mbarrier.wait(self.full.index((t + k) % self.slots), ((t + k) // self.slots) & 1)

    @gluon.jit
    def release(self, g):
        """Free the slots of group g once all warps have loaded its tiles."""
        barrier()
        mbarrier.arrive(self.used.index(g % NUM_USED), count=1)

    @gluon.jit
    def tile_at(self, t, FORMAT: gl.constexpr, PIECE: gl.constexpr):
        """Load a thread's words of tile t, followed by their scales if weights are quantized."""
        w = load_words(self.words.index(t % self.slots), FORMAT.halves)
        if FORMAT.bits < 16:
            w = w + load_scales(
                self.scales.index(t % self.slots), FORMAT.halves, FORMAT.bits, PIECE
            )
        return w

    @gluon.jit
    def load_tiles(
        self, t, g, N: gl.constexpr, FORMAT: gl.constexpr, IN_FLIGHT: gl.constexpr,
        PIECE: gl.constexpr,
    ):  # fmt: skip
        """Load a group of N tiles into registers, each with its scales."""
        self.wait(t, N, tiles_in_flight(FORMAT, IN_FLIGHT, self.slots))
        w = ()
        for k in gl.static_range(N):
            w = w + self.tile_at(t + k, FORMAT, PIECE)
        self.release(g)
        return w

    @gluon.jit
    def load_tiles_early(
        self, t, g, BLOCKS: gl.constexpr, FORMAT: gl.constexpr, IN_FLIGHT: gl.constexpr,
        PIECE: gl.constexpr = 8,
    ):  # fmt: skip
        """Load a projection's tiles into registers before x arrives; () if there are too many."""
        w = ()
        if is_resident(BLOCKS, FORMAT):
            w = self.load_tiles(t, g, BLOCKS * FORMAT.tiles, FORMAT, IN_FLIGHT, PIECE)
        return w

    @gluon.jit
    def load_x_registers(self, x, FORMAT: gl.constexpr):
        """Return x in registers, or () if it does not fit, and its sums over quant groups.

        Only 4-bit weights need the sums; for other weights, they are ().
        """
        parts, totals = (), ()
        for k in gl.static_range(len(x)):
            if FORMAT.bits == 4 or not is_wide(FORMAT):
                part = load_x(x[k], FORMAT.bits, FORMAT.rows)
                if FORMAT.bits == 4:
                    totals = totals + (sums_of(part, FORMAT.rows),)
                if not is_wide(FORMAT):
                    parts = parts + (part,)
        return parts, totals

    @gluon.jit
    def multiply_blocks(
        self, t, g, resident, x, x_registers, COUNT: gl.constexpr, FORMAT: gl.constexpr,
        IN_FLIGHT: gl.constexpr, PIECE: gl.constexpr = 8,
    ):  # fmt: skip
        """Multiply COUNT blocks by x; return this warp's sums of each block, as in `by_row`.

        `resident` holds the tiles that are already in registers, if any. The scales of PIECE
        segments are contiguous in a slot.
        """
        sums = ()
        if len(resident) == 0 and is_wide(FORMAT):
            N: gl.constexpr = wide_group_tiles(FORMAT.tiles)
            for _ in gl.static_range(COUNT):
                totals = no_sums(FORMAT)
                for i in gl.static_range(FORMAT.tiles // N):
                    totals = self.add_tiles(
                        t, g, x, x_registers, i * N, N, totals, FORMAT, IN_FLIGHT, PIECE
                    )
                    t += N
                    g += 1
                sums = sums + (by_row(totals, FORMAT.bits),)
        else:
            if len(resident) == 0:
                resident = self.load_tiles(t, g, COUNT * FORMAT.tiles, FORMAT, IN_FLIGHT, PIECE)
            sums = self.multiply_resident(resident, x, x_registers, COUNT, FORMAT)
        return sums

    @gluon.jit
    def multiply_resident(self, w, x, x_registers, COUNT: gl.constexpr, FORMAT: gl.constexpr):
        TILES: gl.constexpr = FORMAT.tiles
        WORDS: gl.constexpr = tile_words(FORMAT)
        sums = ()
        for r in gl.static_range(COUNT):
            totals = no_sums(FORMAT)
            for c in gl.static_range(TILES):
                tile = w[(r * TILES + c) * WORDS : (r * TILES + c + 1) * WORDS]
                totals = self.add_tile(tile, x, x_registers, c, totals, FORMAT)
            sums = sums + (by_row(totals, FORMAT.bits),)
        return sums

    @gluon.jit
    def add_tiles(
        self, t, g, x, x_registers, first: gl.constexpr, N: gl.constexpr, totals,
        FORMAT: gl.constexpr, IN_FLIGHT: gl.constexpr, PIECE: gl.constexpr,
    ):  # fmt: skip
        """Multiply N tiles of a weight row, starting at tile `first`; add the sums to `totals`."""
        self.wait(t, N, tiles_in_flight(FORMAT, IN_FLIGHT, self.slots))
        for c in gl.static_range(N):
            w = self.tile_at(t + c, FORMAT, PIECE)
            totals = self.add_tile(w, x, x_registers, first + c, totals, FORMAT)
        self.release(g)
        return totals

    @gluon.jit
    def add_tile(self, w, x, x_registers, c: gl.constexpr, totals, FORMAT: gl.constexpr):
        """Multiply tile c of a weight row by its one or two pieces of x, and add to `totals`."""
        parts, x_sums = (), ()
        for k in gl.static_range(c * FORMAT.halves, (c + 1) * FORMAT.halves):
            if len(x_registers[0]) > 0:
                parts = parts + (x_registers[0][k],)
            else:
                parts = parts + (load_x(x[k], FORMAT.bits, FORMAT.rows),)
            if FORMAT.bits == 4:
                x_sums = x_sums + (x_registers[1][k],)
        return multiply(w, parts, x_sums, totals, FORMAT)


@gluon.jit
def no_sums(FORMAT: gl.constexpr):
    totals = ()
    for _ in gl.static_range(num_sets(FORMAT.bits, FORMAT.rows)):
        totals = totals + (gl.zeros([8, 8, 4], gl.float32, ONE),)
    return totals
