"""How the weights of the persistent step meet x, whether they are bfloat16 or codes of 8 or 4 bits.

A thread has 8 words of one line in each half of a tile; the codes among them share a scale. As
bfloat16 they are two lines of A, of which each has half of them. Columns of B are x: the even ones
what the upper lines of A are multiplied with, the odd ones what the lower ones are. Scales are
applied to sums. See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.devices.cuda.persistent.sizes import factor_words, segment_groups

S3, S5, S6, S7, S9 = (
    gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1]))
    for rank in (3, 5, 6, 7, 9)
)
# Half of a tile, as words [8 segments, 8 lines, 32], shared out as the tensor cores want it
HALF = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 8, 4], [8, 1, 1], [2, 1, 0]))
ONE = gl.constexpr(gl.BlockedLayout([1, 1, 1], [1, 8, 4], [8, 1, 1], [2, 1, 0]))  # [8, 8, 4]
FACTORS = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))  # of a tile, as they lie in memory
# The bits of an FP8 number, put where bfloat16 has them, are that number times 2**-120. x is made
# larger in turn: up to 2**27 it stays finite, and sums are no smaller than float32 can hold.
RAISE = gl.constexpr(2.0**100)
LOWER = 2.0**20  # by which scales of FP8 are multiplied, for sums to come back
MIDDLE = 128  # that is added to codes of 4 bits, which then are the last bits of a bfloat16
SIGN, REST = "0x80008000", "0x07f007f0"
NIBBLES, MIDDLES, ONES = "0x000f000f", "0x43004300", "0x3f803f80"


@gluon.constexpr_function
def x_words(bits):
    """Words of x that a thread multiplies 8 words of weights with."""
    return 64 // bits


@gluon.constexpr_function
def rows_at_once(bits, rows):
    """Rows of x that one instruction takes: columns 2 r and 2 r + 1 of B are row r.

    With 4-bit codes the other half of the columns is the same rows for the other block.
    """
    return min(rows, 2 if bits == 4 else 4)


@gluon.constexpr_function
def num_sets(bits, rows):
    """Instructions that multiply the same weights with all rows."""
    return rows // rows_at_once(bits, rows)


@gluon.jit
def joined(values):
    """Tensors, one for each row, as one with a last dimension for the rows."""
    N: gl.constexpr = len(values)
    if N == 1:
        found = gl.reshape(values[0], with_last(values[0].shape, 1))
    else:
        evens, odds = (), ()
        for r in gl.static_range(N // 2):
            evens, odds = evens + (values[2 * r],), odds + (values[2 * r + 1],)
        pairs = gl.join(joined(evens), joined(odds))
        found = gl.reshape(pairs, with_last(values[0].shape, N))
    return found


@gluon.constexpr_function
def with_last(shape, size):
    return [*shape, size]


@gluon.jit
def stage(staged, k: gl.constexpr, rows, BITS: gl.constexpr):
    """Put chunk k of x, [8, 128] of each row, into shared memory, and append it to what is staged.

    A piece is what half a tile is multiplied with, [8 segments, rows, vectors, 2 columns of B,
    4 threads, 8]: what the threads of a segment load together lies together. A chunk is two pieces
    for weights of 16 bits, one for 8 bits, and half of one for 4.
    """
    R: gl.constexpr = len(rows)
    x = joined(rows)
    if BITS == 16:
        # Of a thread's words, which lie together, the first and the third are of one line of A.
        both = gl.allocate_shared_memory(gl.bfloat16, [2, 8, R, 2, 4, 4, 2], S7)
        values = gl.reshape(x.to(gl.bfloat16), [2, 8, 4, 4, 2, 2, R])
        both.store(gl.permute(values, [0, 1, 6, 4, 2, 3, 5]))
        staged = staged + two_pieces(both, R)
    elif BITS == 8:
        # A word has the codes of four inputs 32 apart: the first and the third become a pair.
        piece = gl.allocate_shared_memory(gl.bfloat16, [8, R, 2, 2, 4, 4, 2], S7)
        values = gl.reshape((x * RAISE).to(gl.bfloat16), [8, 2, 2, 4, 2, 4, R])
        piece.store(gl.permute(values, [0, 6, 4, 2, 3, 5, 1]))
        staged = staged + (piece,)
    else:
        if k % 2 == 0:
            staged = staged + (gl.allocate_shared_memory(gl.bfloat16, [2, 4, R, 8, 4, 8], S5),)
        # And here of eight, 16 apart, in two blocks: the first and the fifth.
        values = gl.reshape(x.to(gl.bfloat16), [4, 2, 2, 2, 2, 2, 4, 2, R])
        values = gl.permute(values, [0, 8, 6, 4, 1, 5, 7, 3, 2])
        half = staged[k // 2].index(k % 2)
        half._reinterpret(gl.bfloat16, [4, R, 4, 2, 2, 2, 2, 2, 2], S9).store(values)
    return staged


@gluon.jit
def stage_words(staged, rows):
    """Put a chunk into shared memory for 16 bits: of each row, two words of each thread."""
    R: gl.constexpr = len(rows)
    both = gl.allocate_shared_memory(gl.int32, [2, 8, R, 2, 4, 4], S6)
    words = gl.reshape(joined(rows), [2, 8, 4, 4, 2, R])
    both.store(gl.permute(words, [0, 1, 5, 4, 2, 3]))
    return staged + two_pieces(both, R)


@gluon.jit
def two_pieces(both, R: gl.constexpr):
    pieces = both._reinterpret(gl.bfloat16, [2, 8, R, 2, 4, 8], S5)
    return pieces.index(0), pieces.index(1)


@gluon.jit
def load_x(piece, BITS: gl.constexpr, ROWS: gl.constexpr):
    """A thread's words of x for one half of a tile: of the row and the column of B that its line
    counts, for one instruction after another."""
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
        own = each(x, 4 * V)
        if BITS == 4:
            own = of_own_block(own)
        found = found + own
    return found


@gluon.jit
def of_own_block(words):
    """Zeros where a thread's words are not of the block that its column of B is for."""
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, ONE)))[None, :, None]
    is_own = gl.zeros([8, 8, 4], gl.int32, ONE) + column // 4 == place_index() // 2
    keep, own = gl.where(is_own, -1, 0), ()
    for k in gl.static_range(len(words)):
        own = own + (words[k] & keep,)
    return own


@gluon.jit
def place_index():
    """Which of the four threads of a line a thread is."""
    return gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, ONE)))[None, None, :]


@gluon.jit
def each(t, N: gl.constexpr):
    """The words that each thread has, [8, 8, 4, N], as N tensors of one word."""
    words = ()
    if N == 1:
        words = (one(t),)
    else:
        even, odd = gl.split(gl.reshape(t, [8, 8, 4, N // 2, 2]))
        evens, odds = each(even, N // 2), each(odd, N // 2)
        for k in gl.static_range(N // 2):
            words = words + (evens[k], odds[k])
    return words


@gluon.jit
def one(t):
    return gl.convert_layout(gl.reshape(t, [8, 8, 4]), ONE, assert_trivial=True)


@gluon.jit
def load_words(slot, HALVES: gl.constexpr):
    """A thread's words of the halves of a tile, [16 segments, 8 lines, 32 words]."""
    words = ()
    for a in gl.static_range(HALVES):
        half = slot.slice(8 * a, 8, 0).load(HALF)
        words = words + each(gl.reshape(half, [8, 8, 4, 8]), 8)
    return words


@gluon.jit
def load_factors(slot, HALVES: gl.constexpr, BITS: gl.constexpr, PIECE: gl.constexpr):
    """A thread's words of factors, for each half of a tile: of its line, and of its block's sums.

    Factors of each PIECE segments begin where the copy engine can write.
    """
    P: gl.constexpr = segment_groups(BITS)  # blocks of a segment
    N: gl.constexpr = 8 * HALVES // PIECE
    STEP: gl.constexpr = factor_words(BITS, PIECE)
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1], [4 // P, 1, P, 8], [1, 8 // PIECE, PIECE, 1], [0, 2, 3, 1]
    )
    pieces = slot.slice(0, N * STEP, 0)._reinterpret(gl.int32, [N, STEP // 8, 8], S3)
    words = gl.expand_dims(pieces.slice(0, PIECE * P, 1).load(gl.SliceLayout(0, L)), 0)
    words = words + gl.zeros([4 // P, N, PIECE * P, 8], gl.int32, L)
    words = gl.permute(gl.reshape(words, [4 // P, HALVES, 8, P, 8]), [2, 4, 3, 0, 1])
    if HALVES == 2:
        first, second = gl.split(gl.reshape(words, [8, 8, 4, 2]))
        found = one(first), one(second)
    else:
        found = (one(words),)
    return found


@gluon.constexpr_function
def accumulators(sets=1):
    """For each set, two sums of products that do not wait for each other."""
    names = [f"{name}{s}_{i}" for s in range(sets) for name in "ab" for i in range(4)]
    zeros = "".join(f"mov.f32 {name}, 0f00000000; " for name in names)
    return f"{{ .reg .f32 {', '.join(names)}; .reg .b32 s, t, p<4>; {zeros}"


@gluon.constexpr_function
def product(name, low, high):
    sums = ", ".join(f"{name}_{i}" for i in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, "
        f"{{p0, p1, p2, p3}}, {{{low}, {high}}}, {{{sums}}}; "
    )


@gluon.constexpr_function
def products(sets, j, first, words):
    """Multiply p0 to p3 with two words of each set of x, which has `words` from operand `first`."""
    places = [first + s * words for s in range(sets)]
    name = "ab"[j % 2]
    return "".join(product(f"{name}{s}", f"${n}", f"${n + 1}") for s, n in enumerate(places))


@gluon.constexpr_function
def collected(sets, first, second):
    """A thread has sums of two columns of B, for an upper line of A and for a lower one."""
    code = ""
    for s in range(sets):
        code += f"add.f32 a{s}_0, a{s}_{first}, b{s}_{first}; "
        code += f"add.f32 a{s}_1, a{s}_{second}, b{s}_{second}; add.f32 ${s}, a{s}_0, a{s}_1; "
    return code + "}"


@gluon.constexpr_function
def plain_asm(halves, sets):
    """The words of halves of a tile, which are bfloat16 as they are: two for each line of A."""
    code = accumulators(sets)
    for j in range(2 * halves):
        first = sets * (1 + 4 * halves) + 4 * j
        code += "".join(f"mov.b32 p{i}, ${first + i}; " for i in range(4))
        half, rest = divmod(j, 2)
        code += products(sets, j, sets * (1 + 4 * half) + 2 * rest, 4)
    return code + collected(sets, 0, 3)


@gluon.constexpr_function
def fp8_asm(sets):
    """8 words, whose bytes 0 and 2 are a pair, and 1 and 3. (a & b) | c is table 0xEA."""
    code = accumulators(sets)
    for j in range(8):
        word, even, odd = f"${9 * sets + j}", f"p{j % 2 * 2}", f"p{j % 2 * 2 + 1}"
        code += f"shl.b32 t, {word}, 4; and.b32 t, t, {REST}; shl.b32 s, {word}, 8; "
        code += f"lop3.b32 {even}, s, {SIGN}, t, 0xEA; "
        code += f"shr.u32 t, {word}, 4; and.b32 t, t, {REST}; "
        code += f"lop3.b32 {odd}, {word}, {SIGN}, t, 0xEA; "
        if j % 2:
            code += products(sets, j // 2, sets + j - 1, 8)
    return code + collected(sets, 0, 3)


@gluon.constexpr_function
def int4_asm(sets):
    """8 words; the codes in bits 4 * n and 16 + 4 * n, each behind the bits of 128, are a pair."""
    code = accumulators(sets)
    for j in range(8):
        word = f"${17 * sets + j}"
        code += f"lop3.b32 p0, {word}, {NIBBLES}, {MIDDLES}, 0xEA; "
        for n in range(1, 4):
            code += f"shr.u32 t, {word}, {4 * n}; lop3.b32 p{n}, t, {NIBBLES}, {MIDDLES}, 0xEA; "
        code += products(sets, j, sets + 2 * j, 16)
    return code + collected(sets, 0, 3)


@gluon.constexpr_function
def sum_asm():
    """The sum of what int4_asm multiplies, of both columns."""
    code = accumulators() + "".join(f"mov.b32 p{i}, {ONES}; " for i in range(4))
    for j in range(8):
        code += products(1, j, 1 + 2 * j, 16)
    return code + collected(1, 0, 1)


@gluon.constexpr_function
def registers(num_sums, num_words):
    return ",".join(["=f"] * num_sums + ["r"] * num_words)


@gluon.constexpr_function
def floats_type(count):
    return (gl.float32,) * count


@gluon.jit
def run(ASM: gl.constexpr, words, SETS: gl.constexpr):
    """The sums of each set."""
    R: gl.constexpr = registers(SETS, len(words))
    if SETS == 1:
        sums = (gl.inline_asm_elementwise(ASM, R, words, gl.float32, True, 1),)
    else:
        sums = gl.inline_asm_elementwise(ASM, R, words, floats_type(SETS), True, 1)
    return sums


@gluon.jit
def sums_of(x, ROWS: gl.constexpr):
    """The sums of x over a block of 4-bit codes, of each set."""
    sums = ()
    for s in gl.static_range(num_sets(4, ROWS)):
        sums = sums + run(sum_asm(), x[16 * s : 16 * s + 16], 1)
    return sums


@gluon.jit
def multiply(w, x, x_sums, totals, LINE: gl.constexpr):
    """Add the products of a tile with x, of which each half of the tile has a piece.

    w are a thread's words of the tile, and behind them a factor for each half. There is a total for
    each set of rows.
    """
    HALVES: gl.constexpr = LINE.halves
    SETS: gl.constexpr = num_sets(LINE.bits, LINE.rows)
    if LINE.bits == 16:
        all_of_x = x[0] if HALVES == 1 else x[0] + x[1]
        totals = added(totals, run(plain_asm(HALVES, SETS), all_of_x + w, SETS))
    else:
        for a in gl.static_range(HALVES):
            words, factor = w[8 * a : 8 * a + 8], w[8 * HALVES + a]
            scaled = ()
            if LINE.bits == 8:
                sums = run(fp8_asm(SETS), x[a] + words, SETS)
                for s in gl.static_range(SETS):
                    scaled = scaled + (sums[s] * factor.to(gl.float32, bitcast=True),)
            else:
                sums = run(int4_asm(SETS), x[a] + words, SETS)
                for s in gl.static_range(SETS):
                    centred = sums[s] - lower_half(factor) * x_sums[a][s]
                    scaled = scaled + (centred * upper_half(factor),)
            totals = added(totals, scaled)
    return totals


@gluon.jit
def added(totals, sums):
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
    """Sums of lines, such that the four threads of a line have rows 0 to 3, then 4 to 7.

    With 4-bit codes each thread has one of two blocks, of two rows: it adds what another has.
    """
    if BITS == 4:
        whole = ()
        for s in gl.static_range(len(totals)):
            whole = whole + (both_blocks(totals[s]),)
        totals = whole
        if len(whole) > 1:
            totals = ()
            for s in gl.static_range(len(whole) // 2):
                totals = totals + (gl.where(place_index() < 2, whole[2 * s], whole[2 * s + 1]),)
    return totals


@gluon.jit
def both_blocks(total):
    asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;"
    return total + gl.inline_asm_elementwise(asm, "=f,f", [total], gl.float32, False, 1)
