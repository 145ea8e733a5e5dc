"""Multiply weight tiles by x on tensor cores, for weights in bfloat16, FP8 or 4 bits.

sizes.py has a glossary. For each half of a tile, a thread holds 8 words of one weight row i. If
they are quantized, they share a scale and are converted to bfloat16. Half of the values go to row i
of the MMA operand A, and half to row i + 8. The even columns of operand B hold the x for rows 0 to
7 of A, the odd columns the x for rows 8 to 15. Scales are applied to the sums. See
docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.devices.cuda.persistent.sizes import scale_words, segment_groups

S3, S5, S6, S7, S9 = (
    gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1]))
    for rank in (3, 5, 6, 7, 9)
)
# Layout of half a tile, as words [8 segments, 8 weight rows, 32], for an operand of `mma`.
HALF = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 8, 4], [8, 1, 1], [2, 1, 0]))
# Layout with one word per thread: [8 segments, 8 weight rows, 4 threads].
ONE = gl.constexpr(gl.BlockedLayout([1, 1, 1], [1, 8, 4], [8, 1, 1], [2, 1, 0]))
SCALES = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))  # scales of a tile, not swizzled
# The bits of an FP8 value, moved to their positions in bfloat16, are that value times 2**-120. To
# compensate, x is scaled up. Any |x| < 2**27 stays finite, and float32 sums do not underflow.
FP8_X_SCALE = gl.constexpr(2.0**100)
FP8_SCALE_FACTOR = 2.0**20  # FP8 scales are multiplied by the remaining factor
INT4_OFFSET = 128  # added to 4-bit values, by setting the low mantissa bits of the bfloat16 128
SIGNS, EXPONENT_AND_MANTISSA = "0x80008000", "0x07f007f0"
NIBBLES, OFFSETS, ONES = "0x000f000f", "0x43004300", "0x3f803f80"


@gluon.constexpr_function
def x_words(bits):
    """Return the number of words of x that a thread needs for its 8 words of weights."""
    return 64 // bits


@gluon.constexpr_function
def rows_at_once(bits, rows):
    """Return the number of rows of x per `mma`: columns 2 r and 2 r + 1 of B hold row r.

    With 4-bit weights, half of the columns of B hold the same rows of x for a second quant group.
    """
    return min(rows, 2 if bits == 4 else 4)


@gluon.constexpr_function
def num_sets(bits, rows):
    """Return the number of sets of rows; each set has its own `mma` with the same weights."""
    return rows // rows_at_once(bits, rows)


@gluon.jit
def stacked(values):
    """Stack tensors, whose number is a power of two, along a new last dimension."""
    N: gl.constexpr = len(values)
    if N == 1:
        found = gl.reshape(values[0], with_last(values[0].shape, 1))
    else:
        evens, odds = (), ()
        for r in gl.static_range(N // 2):
            evens, odds = evens + (values[2 * r],), odds + (values[2 * r + 1],)
        pairs = gl.join(stacked(evens), stacked(odds))
        found = gl.reshape(pairs, with_last(values[0].shape, N))
    return found


@gluon.constexpr_function
def with_last(shape, size):
    return [*shape, size]


@gluon.jit
def stage(staged, k: gl.constexpr, rows, BITS: gl.constexpr):
    """Store chunk k of x, [8, 128] for each row, in shared memory, and append it to `staged`.

    `staged` is a tuple of pieces of x. A chunk is two pieces for 16-bit weights, one piece for
    8-bit weights, and half a piece for 4-bit weights. The shape of a piece is [8 segments, rows,
    vectors, 2 columns of B, 4 threads, 8], so that the threads of a segment load contiguous memory.
    """
    R: gl.constexpr = len(rows)
    x = stacked(rows)
    if BITS == 16:
        # A thread holds consecutive words of a weight row. Even words go to row i of operand A, odd
        # words to row i + 8. So x is stored with its even words in the even columns of B, and its
        # odd words in the odd columns.
        both = gl.allocate_shared_memory(gl.bfloat16, [2, 8, R, 2, 4, 4, 2], S7)
        values = gl.reshape(x.to(gl.bfloat16), [2, 8, 4, 4, 2, 2, R])
        both.store(gl.permute(values, [0, 1, 6, 4, 2, 3, 5]))
        pieces = both._reinterpret(gl.bfloat16, [2, 8, R, 2, 4, 8], S5)
        staged = staged + (pieces.index(0), pieces.index(1))
    elif BITS == 8:
        # A word holds four weights, 32 columns apart. The first and the third become a pair, as do
        # the second and the fourth.
        piece = gl.allocate_shared_memory(gl.bfloat16, [8, R, 2, 2, 4, 4, 2], S7)
        values = gl.reshape((x * FP8_X_SCALE).to(gl.bfloat16), [8, 2, 2, 4, 2, 4, R])
        piece.store(gl.permute(values, [0, 6, 4, 2, 3, 5, 1]))
        staged = staged + (piece,)
    else:
        if k % 2 == 0:
            staged = staged + (gl.allocate_shared_memory(gl.bfloat16, [2, 4, R, 8, 4, 8], S5),)
        # A word holds eight weights, 16 columns apart. The first and the fifth become a pair, as do
        # the second and the sixth, and so on.
        values = gl.reshape(x.to(gl.bfloat16), [4, 2, 2, 2, 2, 2, 4, 2, R])
        values = gl.permute(values, [0, 8, 6, 4, 1, 5, 7, 3, 2])
        half = staged[k // 2].index(k % 2)
        half._reinterpret(gl.bfloat16, [4, R, 4, 2, 2, 2, 2, 2, 2], S9).store(values)
    return staged


@gluon.jit
def load_x(piece, BITS: gl.constexpr, ROWS: gl.constexpr):
    """Load a thread's words of x for half a tile, for all sets of rows.

    A thread's index among the 8 weight rows selects its column of B, and so its row of x.
    """
    V: gl.constexpr = x_words(BITS) // 4
    N: gl.constexpr = rows_at_once(BITS, ROWS)
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 1, V, 4], [1, 4 // N, N, 2, 4, 1, 1], [8, 1, 1, 1, 1, 1, 1],
        [6, 5, 4, 3, 2, 1, 0],
    )  # fmt: skip
    words = piece._reinterpret(gl.int32, [8, ROWS, V, 2, 4, 4], S6).permute([0, 1, 3, 4, 2, 5])
    found = ()
    for s in gl.static_range(num_sets(BITS, ROWS)):
        x = gl.expand_dims(words.slice(s * N, N, 1).load(gl.SliceLayout(1, L)), 1)
        x = gl.reshape(x + gl.zeros([8, 4 // N, N, 2, 4, V, 4], gl.int32, L), [8, 8, 4, 4 * V])
        own = unpacked(x, 4 * V)
        if BITS == 4:
            own = mask_quant_group(own)
        found = found + own
    return found


@gluon.jit
def mask_quant_group(words):
    """Zero a thread's words of x if its weights are not in the quant group of its column of B."""
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, ONE)))[None, :, None]
    is_own = gl.zeros([8, 8, 4], gl.int32, ONE) + column // 4 == quad_lane() // 2
    keep, own = gl.where(is_own, -1, 0), ()
    for k in gl.static_range(len(words)):
        own = own + (words[k] & keep,)
    return own


@gluon.jit
def quad_lane():
    """Return the index of a thread among the four threads of a weight row."""
    return gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, ONE)))[None, None, :]


@gluon.jit
def unpacked(t, N: gl.constexpr):
    """Split a tensor [8, 8, 4, N] with N words per thread into N tensors, one word per thread."""
    words = ()
    if N == 1:
        words = (as_words(t),)
    else:
        even, odd = gl.split(gl.reshape(t, [8, 8, 4, N // 2, 2]))
        evens, odds = unpacked(even, N // 2), unpacked(odd, N // 2)
        for k in gl.static_range(N // 2):
            words = words + (evens[k], odds[k])
    return words


@gluon.jit
def as_words(t):
    return gl.convert_layout(gl.reshape(t, [8, 8, 4]), ONE, assert_trivial=True)


@gluon.jit
def load_words(slot, HALVES: gl.constexpr):
    """Load a thread's words of a tile, [16 segments, 8 weight rows, 32 words]."""
    words = ()
    for a in gl.static_range(HALVES):
        half = slot.slice(8 * a, 8, 0).load(HALF)
        words = words + unpacked(gl.reshape(half, [8, 8, 4, 8]), 8)
    return words


@gluon.jit
def load_scales(slot, HALVES: gl.constexpr, BITS: gl.constexpr, PIECE: gl.constexpr):
    """Load the scale word of a thread's weight row and quant group, for each half of a tile.

    The scales of PIECE segments are contiguous, and start at an offset that is aligned for TMA.
    """
    P: gl.constexpr = segment_groups(BITS)
    N: gl.constexpr = 8 * HALVES // PIECE
    STEP: gl.constexpr = scale_words(BITS, PIECE)
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1], [4 // P, 1, P, 8], [1, 8 // PIECE, PIECE, 1], [0, 2, 3, 1]
    )
    pieces = slot.slice(0, N * STEP, 0)._reinterpret(gl.int32, [N, STEP // 8, 8], S3)
    words = gl.expand_dims(pieces.slice(0, PIECE * P, 1).load(gl.SliceLayout(0, L)), 0)
    words = words + gl.zeros([4 // P, N, PIECE * P, 8], gl.int32, L)
    words = gl.permute(gl.reshape(words, [4 // P, HALVES, 8, P, 8]), [2, 4, 3, 0, 1])
    if HALVES == 2:
        first, second = gl.split(gl.reshape(words, [8, 8, 4, 2]))
        found = as_words(first), as_words(second)
    else:
        found = (as_words(words),)
    return found


@gluon.constexpr_function
def accumulators_asm(sets=1):
    """Return PTX that declares and zeroes two independent accumulators for each set of rows."""
    names = [f"{name}{s}_{i}" for s in range(sets) for name in "ab" for i in range(4)]
    zeros = "".join(f"mov.f32 {name}, 0f00000000; " for name in names)
    return f"{{ .reg .f32 {', '.join(names)}; .reg .b32 s, t, p<4>; {zeros}"


@gluon.constexpr_function
def mma_asm(name, low, high):
    """Return PTX that adds A (p0 to p3) times B (`low`, `high`) to the accumulator `name`."""
    sums = ", ".join(f"{name}_{i}" for i in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, "
        f"{{p0, p1, p2, p3}}, {{{low}, {high}}}, {{{sums}}}; "
    )


@gluon.constexpr_function
def mmas_asm(sets, j, first, words):
    """Return PTX that multiplies A (p0 to p3) by two words of x for each set.

    The first set's words are operands `first` and `first + 1`; those of each following set are
    `words` operands later. The parity of `j` selects the accumulator.
    """
    operands = [first + s * words for s in range(sets)]
    name = "ab"[j % 2]
    return "".join(mma_asm(f"{name}{s}", f"${n}", f"${n + 1}") for s, n in enumerate(operands))


@gluon.constexpr_function
def collect_sums_asm(sets, first, second):
    """Return PTX that adds up elements `first` and `second` of both accumulators of each set."""
    code = ""
    for s in range(sets):
        code += f"add.f32 a{s}_0, a{s}_{first}, b{s}_{first}; "
        code += f"add.f32 a{s}_1, a{s}_{second}, b{s}_{second}; add.f32 ${s}, a{s}_0, a{s}_1; "
    return code + "}"


@gluon.constexpr_function
def bf16_asm(halves, sets):
    """Return PTX that multiplies bfloat16 weights; an `mma` takes four words, two per row of A."""
    code = accumulators_asm(sets)
    for j in range(2 * halves):
        first = sets * (1 + 4 * halves) + 4 * j
        code += "".join(f"mov.b32 p{i}, ${first + i}; " for i in range(4))
        half, rest = divmod(j, 2)
        code += mmas_asm(sets, j, sets * (1 + 4 * half) + 2 * rest, 4)
    return code + collect_sums_asm(sets, 0, 3)


@gluon.constexpr_function
def fp8_asm(sets):
    """Return PTX that multiplies 8 words of FP8 weights.

    Bytes 0 and 2 of a word form a pair, and so do bytes 1 and 3. The lookup table 0xEA of `lop3` is
    (a & b) | c.
    """
    code = accumulators_asm(sets)
    for j in range(8):
        word, even, odd = f"${9 * sets + j}", f"p{j % 2 * 2}", f"p{j % 2 * 2 + 1}"
        code += (
            f"shl.b32 t, {word}, 4; and.b32 t, t, {EXPONENT_AND_MANTISSA}; shl.b32 s, {word}, 8; "
        )
        code += f"lop3.b32 {even}, s, {SIGNS}, t, 0xEA; "
        code += f"shr.u32 t, {word}, 4; and.b32 t, t, {EXPONENT_AND_MANTISSA}; "
        code += f"lop3.b32 {odd}, {word}, {SIGNS}, t, 0xEA; "
        if j % 2:
            code += mmas_asm(sets, j // 2, sets + j - 1, 8)
    return code + collect_sums_asm(sets, 0, 3)


@gluon.constexpr_function
def int4_asm(sets):
    """Return PTX that multiplies 8 words of 4-bit weights.

    The values at bits 4 * n and 16 + 4 * n of a word form a pair. Combined with the bits of 128,
    they become the bfloat16 of 128 + value.
    """
    code = accumulators_asm(sets)
    for j in range(8):
        word = f"${17 * sets + j}"
        code += f"lop3.b32 p0, {word}, {NIBBLES}, {OFFSETS}, 0xEA; "
        for n in range(1, 4):
            code += f"shr.u32 t, {word}, {4 * n}; lop3.b32 p{n}, t, {NIBBLES}, {OFFSETS}, 0xEA; "
        code += mmas_asm(sets, j, sets + 2 * j, 16)
    return code + collect_sums_asm(sets, 0, 3)


@gluon.constexpr_function
def x_sum_asm():
    """Return PTX that sums the x operands of `int4_asm`, over the two columns of B for a row."""
    code = accumulators_asm() + "".join(f"mov.b32 p{i}, {ONES}; " for i in range(4))
    for j in range(8):
        code += mmas_asm(1, j, 1 + 2 * j, 16)
    return code + collect_sums_asm(1, 0, 1)


@gluon.constexpr_function
def registers(num_sums, num_words):
    return ",".join(["=f"] * num_sums + ["r"] * num_words)


@gluon.constexpr_function
def floats_type(count):
    return (gl.float32,) * count


@gluon.jit
def run(ASM: gl.constexpr, words, SETS: gl.constexpr):
    """Run inline PTX; return one sum for each set."""
    R: gl.constexpr = registers(SETS, len(words))
    if SETS == 1:
        sums = (gl.inline_asm_elementwise(ASM, R, words, gl.float32, True, 1),)
    else:
        sums = gl.inline_asm_elementwise(ASM, R, words, floats_type(SETS), True, 1)
    return sums


@gluon.jit
def sums_of(x, ROWS: gl.constexpr):
    """Sum x over a quant group of 4-bit weights, for each set of rows."""
    sums = ()
    for s in gl.static_range(num_sets(4, ROWS)):
        sums = sums + run(x_sum_asm(), x[16 * s : 16 * s + 16], 1)
    return sums


@gluon.jit
def multiply(w, x, x_sums, totals, FORMAT: gl.constexpr):
    """Multiply a tile by its pieces of x, one for each half, and add the results to `totals`.

    `w` holds a thread's words of the tile, followed by a scale word for each half if the weights
    are quantized. `totals` has an element for each set of rows.
    """
    HALVES: gl.constexpr = FORMAT.halves
    SETS: gl.constexpr = num_sets(FORMAT.bits, FORMAT.rows)
    if FORMAT.bits == 16:
        all_of_x = x[0] if HALVES == 1 else x[0] + x[1]
        totals = add_all(totals, run(bf16_asm(HALVES, SETS), all_of_x + w, SETS))
    else:
        for a in gl.static_range(HALVES):
            words, scale = w[8 * a : 8 * a + 8], w[8 * HALVES + a]
            scaled = ()
            if FORMAT.bits == 8:
                sums = run(fp8_asm(SETS), x[a] + words, SETS)
                for s in gl.static_range(SETS):
                    scaled = scaled + (sums[s] * scale.to(gl.float32, bitcast=True),)
            else:
                sums = run(int4_asm(SETS), x[a] + words, SETS)
                for s in gl.static_range(SETS):
                    centered = sums[s] - lower_half(scale) * x_sums[a][s]
                    scaled = scaled + (centered * upper_half(scale),)
            totals = add_all(totals, scaled)
    return totals


@gluon.jit
def add_all(totals, sums):
    found = ()
    for s in gl.static_range(len(totals)):
        found = found + (totals[s] + sums[s],)
    return found


@gluon.jit
def lower_half(word):
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def upper_half(word):
    return (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def by_row(totals, BITS: gl.constexpr):
    """Arrange the sums so that the four threads of a weight row hold one batch row each.

    The first result holds batch rows 0 to 3, the second rows 4 to 7. With 4-bit weights, a thread
    starts with the sum over one of two quant groups, for one of two rows. The sum over the other
    quant group is added.
    """
    if BITS == 4:
        whole = ()
        for s in gl.static_range(len(totals)):
            whole = whole + (add_other_group(totals[s]),)
        totals = whole
        if len(whole) > 1:
            totals = ()
            for s in gl.static_range(len(whole) // 2):
                totals = totals + (gl.where(quad_lane() < 2, whole[2 * s], whole[2 * s + 1]),)
    return totals


@gluon.jit
def add_other_group(total):
    asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;"
    return total + gl.inline_asm_elementwise(asm, "=f,f", [total], gl.float32, False, 1)
