"""Exchange vectors between the CTAs of the persistent step through L2, without barriers.

A value is its own flag: a buffer holds EMPTY (0xFFFF, a NaN that arithmetic never produces) until a
value is stored, and readers poll the values themselves. sizes.py has a glossary. See
docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.sizes import (
    gated_capacity,
    gated_parts,
    num_chunks,
    num_copies,
    num_stored,
    num_sum_blocks,
    q_width,
    qkv_width,
    sums_layout,
)
from nanovllm.devices.cuda.persistent.tile_mma import stacked, stage

NUM_CTAS = gl.constexpr(128)
# Buffers are used in rotation. With three, two fences lie between clearing and reusing a buffer.
NUM_BUFFERS = gl.constexpr(3)
CHUNK = gl.constexpr(1024)  # columns of a chunk, and weight rows of a block
CHECK_SPINS = gl.constexpr(1 << 12)  # polls between checks of the timeout flag
MAX_CHECKS = gl.constexpr(1 << 8)  # checks of the flag before a poll times out: about a second
# Maximum score of a split without keys, and its bits.
NO_SCORE, NO_SCORE_BITS = gl.constexpr(-1e30), "0xF149F2CA"

S1, S2, S3, S4 = (
    gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])) for rank in (1, 2, 3, 4)
)
THREADS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))  # [8 warps, 32]

# Exchanged values must stay in L2: the stream of weights must not evict them.
KEEP = gl.constexpr("createpolicy.fractional.L2::evict_last.b64 k, 1.0; ")
FENCE = gl.constexpr("fence.acq_rel.gpu; mov.u32 $0, $1;")
PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@gluon.constexpr_function
def poll_asm(loads, flag, has_halves=True, predicates=None):
    """Return PTX that loads words, and reloads those that are EMPTY or have an EMPTY half.

    `loads` is a list of (register names, address). `predicates` names an operand for each load:
    if it is 0, nothing is loaded, and the words keep their values. The first loads come before the
    loop: words that are written only inside it would occupy registers from the start of the kernel.
    The warp reconverges at the end.
    """
    begin = f"{{ .reg .b64 k; .reg .pred r; .reg .b32 m<{len(loads)}>; {KEEP.value} "
    tests, again = "", ""
    for j in range(len(loads)):
        names, address = loads[j]
        target, vector = names[0], ""
        if len(names) > 1:
            target, vector = "{" + ", ".join(names) + "}", f".v{len(names)}"
        load = f"ld.relaxed.gpu.global.L2::cache_hint{vector}.b32 {target}, {address}, "
        if predicates is None:
            begin += f"{load} k; "
        else:
            begin += f"setp.ne.u32 r, {predicates[j]}, 0; @r {load} k; "
        tests += missing_asm(names, f"m{j}", has_halves) + f"or.b32 f, f, m{j}; "
        again += f"setp.ne.u32 q, m{j}, 0; @q {load} k; "
    return begin + spin_asm(tests + again, flag) + " bar.warp.sync 0xffffffff; }"


@gluon.constexpr_function
def missing_asm(words, target, has_halves):
    """Return PTX that sets bits of `target` if a word, or a half of one, is EMPTY.

    A half h is EMPTY (0xFFFF) if and only if both h and 0xFFFE - h have their sign bit set.
    """
    code = f"mov.u32 {target}, 0; "
    if not has_halves:
        code += "".join(f"max.u32 {target}, {target}, {word}; " for word in words)
        return code + f"setp.eq.u32 q, {target}, -1; selp.u32 {target}, 1, 0, q; "
    for word in words:
        code += f"sub.u32 g, 0xFFFEFFFE, {word}; lop3.b32 {target}, g, {word}, {target}, 0xEA; "
    return code + f"and.b32 {target}, {target}, 0x80008000; "


@gluon.constexpr_function
def poll_pairs_asm(offsets):
    """Return PTX that polls two words at each byte offset from one address."""
    count = 2 * len(offsets)
    loads = [((f"${2 * j}", f"${2 * j + 1}"), f"[${count} + {o}]") for j, o in enumerate(offsets)]
    return poll_asm(loads, count + 1)


@gluon.constexpr_function
def pair_offsets(rows, size, count, step):
    """Return the byte offsets of `count` pairs of words, `step` columns apart, for each row."""
    return tuple(2 * (row * size + k * step) for row in range(rows) for k in range(count))


@gluon.constexpr_function
def spin_asm(code, flag):
    """Return PTX that repeats `code`, which sets bits of f while a value is missing, until f is 0.

    A poll that times out sets the flag whose address is operand `flag`. All other polls check it
    occasionally, and stop when it is set.
    """
    begin = f"{{ .reg .pred p, q; .reg .b32 i, n, f, g; .reg .b64 k; {KEEP.value} mov.u32 n, 0; "
    code = begin + f"MORE: mov.u32 i, 0; AGAIN: mov.u32 f, 0; {code} setp.ne.u32 p, f, 0; "
    code += "add.u32 i, i, 1; "
    code += f"setp.lt.and.u32 q, i, {CHECK_SPINS.value}, p; @q bra AGAIN; @!p bra DONE; "
    code += f"ld.relaxed.sys.global.u32 g, [${flag}]; setp.ne.u32 p, g, 0; @p bra DONE; "
    code += f"add.u32 n, n, 1; setp.lt.u32 p, n, {MAX_CHECKS.value}; @p bra MORE; mov.u32 g, 1; "
    return code + f"st.relaxed.sys.global.u32 [${flag}], g; DONE: }}"


@gluon.constexpr_function
def registers(num_words, num_addresses, num_numbers=0):
    # Early clobber: words are written before the addresses are read for the last time.
    return ",".join(["=&r"] * num_words + ["l"] * num_addresses + ["r"] * num_numbers)


@gluon.constexpr_function
def words_type(count):
    return (gl.int32,) * count


@gluon.jit
def bits_to_float(bits):
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def low(words):
    """Return the lower of the two bfloat16 in each word, as float32."""
    return bits_to_float(words << 16)


@gluon.jit
def high(words):
    return bits_to_float(words & -65536)


@gluon.jit
def prefetch(addresses):
    """Prefetch the cache lines at the given addresses into L2."""
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [addresses.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def thread_index():
    warp = gl.arange(0, 8, gl.SliceLayout(1, THREADS))[:, None]
    return warp * 32 + gl.arange(0, 32, gl.SliceLayout(0, THREADS))[None, :]


@gluon.jit
def fence():
    gl.inline_asm_elementwise(FENCE, "=r,r", [thread_index()], gl.int32, False, 1)


@gluon.jit
def sum_indices(BLOCKS: gl.constexpr, ROWS: gl.constexpr):
    """Return a thread's blocks, batch rows and weight rows in sums [blocks, rows, 8]."""
    L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, sums_layout(BLOCKS, ROWS)))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return block, row, column


@aggregate
class Exchange:
    """A bfloat16 vector per row; a CTA stores 8 columns of each block, and may read all columns.

    Memory is [buffers, 2 copies, rows, size]: half of the CTAs read each copy. A vector may consist
    of one part per expert, each padded to `capacity` columns. Padding is never written and stays
    zero. With `of_all`, CTAs without values store zeros, so that a reader of the whole vector knows
    that every CTA has reached this exchange.
    """

    memory: gl.tensor
    flag: gl.tensor  # address of the timeout flag
    cta: gl.tensor  # index of this CTA
    width: gl.constexpr  # columns with values
    stored: gl.constexpr  # columns that CTAs store, including zeros beyond the width
    part: gl.constexpr  # columns per part
    capacity: gl.constexpr  # padded columns per part
    columns: gl.constexpr  # padded columns of all parts
    size: gl.constexpr  # columns, padded as in `num_chunks`
    rows: gl.constexpr
    blocks: gl.constexpr  # maximum number of blocks per call of `publish`

    @gluon.constexpr_function
    def __init__(
        self, memory, flag, cta, width, bits, rows, blocks, parts=1, capacity=None, of_all=False
    ):
        self.memory, self.flag, self.cta = memory, flag, cta
        capacity = width if capacity is None else capacity
        self.stored = gl.constexpr(num_stored(width) if of_all else width)
        self.width, self.part = gl.constexpr(width), gl.constexpr(width // parts)
        self.capacity, self.columns = gl.constexpr(capacity), gl.constexpr(parts * capacity)
        self.size = gl.constexpr(num_chunks(parts * capacity, bits) * 1024)
        self.rows, self.blocks = gl.constexpr(rows), gl.constexpr(blocks)

    @gluon.jit
    def publish(self, y, block, buffer, COUNT: gl.constexpr):
        """Store COUNT blocks of y in both copies of `buffer`; clear them in the previous buffer.

        This takes four stores per value. Threads that hold the same y share the stores.
        """
        COPIES: gl.constexpr = num_copies(self.rows)
        L: gl.constexpr = gl.SliceLayout(0, sums_layout(self.blocks, self.rows))
        C: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
        copy = gl.arange(0, COPIES, C)[:, None, None, None]
        i, row, column = sum_indices(self.blocks, self.rows)
        column = (block + i) * CHUNK + self.cta * 8 + column
        bits = y.to(gl.bfloat16).to(gl.int16, bitcast=True)
        if self.stored > self.width:
            bits = gl.where(column < self.width, bits, 0).to(gl.int16)
        offset = row * self.size + column
        if self.capacity > self.part:
            offset += column // self.part * (self.capacity - self.part)
        is_ours = gl.expand_dims((i < COUNT) & (column < self.stored) & (row >= 0), 0)
        bits, offset = gl.expand_dims(bits, 0), gl.expand_dims(offset, 0)
        previous = gl.where(buffer == 0, NUM_BUFFERS - 1, buffer - 1)
        for first in gl.static_range(0, 4, COPIES):
            c = first + copy
            base = (gl.where(c < 2, buffer, previous) * 2 + c % 2) * (self.rows * self.size)
            value = bits | gl.where(c < 2, 0, -1).to(gl.int16)
            gl.store(
                self.memory + (base + offset), value, mask=is_ours & (c >= 0),
                eviction_policy="evict_last",
            )  # fmt: skip

    @gluon.jit
    def address(self, buffer):
        """Return the address of the copy that this CTA reads."""
        return self.memory + (buffer * 2 + self.cta % 2) * (self.rows * self.size)

    @gluon.jit
    def poll(self, buffer, first, N: gl.constexpr):
        """Poll N chunks of all rows, starting at chunk `first`; a thread gets two words of each."""
        return self.poll_from(first * CHUNK + thread_index() * 4, buffer, N, CHUNK)

    @gluon.jit
    def poll_from(self, column, buffer, N: gl.constexpr, STEP: gl.constexpr):
        """Poll N pairs of words of each row, STEP columns apart, starting at `column`."""
        COUNT: gl.constexpr = 2 * N * self.rows
        addresses = (self.address(buffer) + column).to(gl.int64)
        return gl.inline_asm_elementwise(
            poll_pairs_asm(pair_offsets(self.rows, self.size, N, STEP)),
            registers(COUNT, 2),
            [addresses, addresses * 0 + self.flag.to(gl.int64)],
            words_type(COUNT),
            False,
            1,
        )

    @gluon.jit
    def stage_chunks(self, buffer, first, N: gl.constexpr, BITS: gl.constexpr):
        """Poll N chunks and stage them in shared memory, as pieces of x for BITS-bit weights."""
        words = self.poll(buffer, first, N)
        staged = ()
        for k in gl.static_range(N):
            rows = ()
            for r in gl.static_range(self.rows):
                one, other = words[2 * (r * N + k)], words[2 * (r * N + k) + 1]
                rows = rows + (four_floats(one, other),)
            staged = stage(staged, k, rows, BITS)
        return staged

    @gluon.jit
    def load_norm(self, weight):
        """Load the norm's weight, which is padded to whole chunks, for `stage_normed`."""
        norm_weights = ()
        for k in gl.static_range(self.size // CHUNK):
            norm_weights = norm_weights + (gl.load(weight + k * 256 + thread_index()),)
        return norm_weights

    @gluon.jit
    def stage_normed(self, buffer, norm_weights, eps, BITS: gl.constexpr):
        """Poll x and stage it times the norm's weight; return the pieces and each row's 1 / RMS."""
        N: gl.constexpr = self.size // CHUNK
        words = self.poll(buffer, 0, N)
        squares, staged = (), ()
        for _ in gl.static_range(self.rows):
            squares = squares + (gl.zeros([8, 32], gl.float32, THREADS),)
        for k in gl.static_range(N):
            w = four_floats(norm_weights[k].to(gl.int32), (norm_weights[k] >> 32).to(gl.int32))
            rows, more = (), ()
            for r in gl.static_range(self.rows):
                one, other = words[2 * (r * N + k)], words[2 * (r * N + k) + 1]
                more = more + (squares[r] + (square(one) + square(other)),)
                rows = rows + (four_floats(one, other) * w,)
            squares = more
            staged = stage(staged, k, rows, BITS)
        memory = gl.allocate_shared_memory(gl.float32, [self.rows, 8], S2)
        memory.permute([1, 0]).store(gl.sum(stacked(squares), 1))
        L: gl.constexpr = sums_layout(self.blocks, self.rows)
        P: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, L)))
        mean = gl.sum(memory.permute([1, 0]).load(P), 0) / self.width
        SUMS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, L))
        R: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SUMS))
        mean = gl.convert_layout(mean, R, assert_trivial=True)
        return staged, gl.rsqrt(mean + eps)[None, :, None]


@gluon.jit
def square(words):
    """Return the sum of the squares of the two bfloat16 in each word."""
    return low(words) * low(words) + high(words) * high(words)


@gluon.jit
def four_floats(first, second):
    """Unpack the four bfloat16 in two words of each of 256 threads to float32 [8, 128]."""
    pairs = gl.join(gl.join(low(first), low(second)), gl.join(high(first), high(second)))
    return gl.reshape(pairs, [8, 128])


@aggregate
class Exchanges:
    """The vectors that CTAs exchange in a layer."""

    x: Exchange  # residual stream before attention
    qkv: Exchange
    attended: Exchange
    y: Exchange  # residual stream before the MLP
    gated: Exchange
    router_logits: Exchange  # unused if the model has no experts

    @gluon.constexpr_function
    def __init__(self, x, qkv, attended, y, gated, router_logits):
        self.x, self.qkv, self.attended, self.y, self.gated = x, qkv, attended, y, gated
        self.router_logits = router_logits


@gluon.jit
def make_exchanges(memories, flag, cta, SHAPE: gl.constexpr, ROWS: gl.constexpr):
    x, qkv, _, attended, y, gated, router_logits = memories
    BITS: gl.constexpr = SHAPE.bits
    B: gl.constexpr = num_sum_blocks(SHAPE, ROWS)
    PARTS: gl.constexpr = gated_parts(SHAPE)
    return Exchanges(
        Exchange(x, flag, cta, SHAPE.hidden, BITS, ROWS, B, of_all=True),
        Exchange(qkv, flag, cta, qkv_width(SHAPE), 16, ROWS, B),
        Exchange(attended, flag, cta, q_width(SHAPE), BITS, ROWS, B),
        Exchange(y, flag, cta, SHAPE.hidden, BITS, ROWS, B, of_all=True),
        Exchange(gated, flag, cta, SHAPE.mlp, BITS, ROWS, B, PARTS, gated_capacity(SHAPE)),
        Exchange(router_logits, flag, cta, SHAPE.experts.num_experts, 16, ROWS, B),
    )
