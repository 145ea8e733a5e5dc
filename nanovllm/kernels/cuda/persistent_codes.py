"""Weights of the persistent step that stay codes of 8 or 4 bits: how they meet x.

A thread has 8 words of 128 codes, or 256, that share a scale. In registers codes become bfloat16
that the tensor cores take, with as few instructions as there can be: x is staged in the order in
which that gives them, and scales are applied to sums. See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.cuda.persistent_sizes import factor_words, tile_groups

S2, S4, S6 = (
    gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])) for rank in (2, 4, 6)
)
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
    """Words of x that a thread multiplies 8 words of codes with."""
    return 128 // bits


@gluon.jit
def stage(staged, k: gl.constexpr, x, BITS: gl.constexpr):
    """Put chunk k of x, [8, 128], into shared memory, and say so at the end of what is staged.

    For codes a piece is [8 segments, vectors, 4 threads, 8]: what the threads of a segment load
    together lies together. 8 bits have a segment for each 128 of x, 4 bits one for 256.
    """
    if BITS == 16:
        piece = gl.allocate_shared_memory(gl.bfloat16, [16, 64], S2)
        piece.store(gl.reshape(x.to(gl.bfloat16), [16, 64]))
        staged = staged + (piece,)
    elif BITS == 8:
        # A word has the codes of four inputs 32 apart: the first and the third become a pair.
        piece = gl.allocate_shared_memory(gl.bfloat16, [8, 4, 4, 2, 2, 2], S6)
        values = gl.reshape((x * RAISE).to(gl.bfloat16), [8, 2, 2, 4, 4, 2])
        piece.store(gl.permute(values, [0, 4, 3, 5, 2, 1]))
        staged = staged + (piece,)
    else:
        if k % 2 == 0:
            staged = staged + (gl.allocate_shared_memory(gl.bfloat16, [2, 4, 8, 4, 8], S4),)
        # And here of eight, 16 apart, in two blocks: the first and the fifth.
        values = gl.reshape(x.to(gl.bfloat16), [4, 2, 2, 4, 2, 8])
        values = gl.permute(values, [0, 5, 1, 4, 3, 2])
        half = staged[k // 2].index(k % 2)
        half._reinterpret(gl.bfloat16, [4, 8, 2, 2, 4, 2], S6).store(values)
    return staged


@gluon.jit
def load_x(piece, BITS: gl.constexpr):
    """A thread's words of x for one half of a tile, the same for all 8 lines."""
    V: gl.constexpr = x_words(BITS) // 4
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, V, 4], [1, 8, 4, 1, 1], [8, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    words = piece._reinterpret(gl.int32, [8, V, 4, 4], S4).permute([0, 2, 1, 3])
    x = gl.expand_dims(words.load(gl.SliceLayout(1, L)), 1) + gl.zeros([8, 8, 4, V, 4], gl.int32, L)
    if BITS == 8:
        found = sixteen(gl.reshape(x, [8, 8, 4, 16]))
    else:
        even, odd = gl.split(gl.reshape(x, [8, 8, 4, 16, 2]))
        evens, odds = sixteen(even), sixteen(odd)
        keep = own_block()
        found = ()
        for k in gl.static_range(16):
            found = found + (evens[k] & keep, odds[k] & keep)
    return found


@gluon.jit
def own_block():
    """All bits, where a thread's line of A is of the block of its words: lines of A take turns."""
    line = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, ONE)))[None, :, None]
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, ONE)))[None, None, :]
    is_own = gl.zeros([8, 8, 4], gl.int32, ONE) + line % 2 == place // 2
    return gl.where(is_own, -1, 0)


@gluon.jit
def sixteen(t):
    """The 16 words that each thread has, [8, 8, 4, 16], as tensors of one word."""
    a = quarters(t, 16)  # word m is in a[m % 4], at m // 4
    b0, b1, b2, b3 = quarters(a[0], 4), quarters(a[1], 4), quarters(a[2], 4), quarters(a[3], 4)
    words = ()
    for k in gl.static_range(4):
        words = words + (one(b0[k]), one(b1[k]), one(b2[k]), one(b3[k]))
    return words


@gluon.jit
def halves(t, N: gl.constexpr):
    return gl.split(gl.reshape(t, [8, 8, 4, N // 2, 2]))


@gluon.jit
def quarters(t, N: gl.constexpr):
    even, odd = halves(t, N)
    first, third = halves(even, N // 2)
    second, fourth = halves(odd, N // 2)
    return first, second, third, fourth


@gluon.jit
def one(t):
    return gl.convert_layout(gl.reshape(t, [8, 8, 4]), ONE, assert_trivial=True)


@gluon.jit
def load_factors(slot, BITS: gl.constexpr, PIECE: gl.constexpr):
    """Words of factors by half of a tile and by which of a thread's two lines of sums.

    Factors of each PIECE segments begin where the copy engine can write.
    """
    P: gl.constexpr = tile_groups(BITS) // 16  # blocks of a segment, by turns of the lines of A
    N: gl.constexpr = 16 // PIECE
    W: gl.constexpr = PIECE * 8 * P
    STEP: gl.constexpr = factor_words(BITS, PIECE) // N
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2], [8 // P, 1, 4 * P], [1, 8 // PIECE, PIECE], [2, 1, 0]
    )
    pieces = slot.slice(0, N * STEP, 0)._reinterpret(gl.int32, [N, STEP], S2).slice(0, W, 1)
    words = gl.expand_dims(pieces.load(gl.SliceLayout(0, L)), 0)
    words = gl.reshape(words + gl.zeros([8 // P, N, W], gl.int32, L), [8 // P, 2, 8, P, 4, 2])
    words = gl.reshape(gl.permute(words, [2, 0, 3, 4, 1, 5]), [8, 8, 4, 2, 2])
    first, second = gl.split(words)
    first_0, first_1 = gl.split(first)
    second_0, second_1 = gl.split(second)
    return one(first_0), one(second_0), one(first_1), one(second_1)


@gluon.constexpr_function
def accumulators(names):
    """Sums of as many products that do not wait for each other."""
    registers = ", ".join(f"{name}<4>" for name in names)
    zeros = "".join(f"mov.f32 {name}{i}, 0f00000000; " for name in names for i in range(4))
    return f"{{ .reg .f32 {registers}; .reg .b32 z, s, t, p<4>; mov.b32 z, 0; {zeros}"


@gluon.constexpr_function
def product(name, first, second, low, high):
    sums = ", ".join(f"{name}{i}" for i in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, "
        f"{{{first}, z, {second}, z}}, {{{low}, {high}}}, {{{sums}}}; "
    )


@gluon.constexpr_function
def collected():
    code = "".join(f"add.f32 a{i}, a{i}, b{i}; add.f32 c{i}, c{i}, d{i}; " for i in range(2))
    return code + "add.f32 $0, a0, c0; add.f32 $1, a1, c1; }"


@gluon.constexpr_function
def fp8_asm():
    """8 words, whose bytes 0 and 2 are a pair, and 1 and 3. (a & b) | c is table 0xEA."""
    code = accumulators("abcd")
    for j in range(8):
        word = f"${18 + j}"
        code += f"shl.b32 t, {word}, 4; and.b32 t, t, {REST}; shl.b32 s, {word}, 8; "
        code += f"lop3.b32 p0, s, {SIGN}, t, 0xEA; shr.u32 t, {word}, 4; and.b32 t, t, {REST}; "
        code += f"lop3.b32 p1, {word}, {SIGN}, t, 0xEA; "
        code += product("abcd"[j % 4], f"${2 + 2 * j}", f"${3 + 2 * j}", "p0", "p1")
    return code + collected()


@gluon.constexpr_function
def int4_asm():
    """8 words; the codes in bits 4 * n and 16 + 4 * n, each behind the bits of 128, are a pair."""
    code = accumulators("abcd")
    for j in range(8):
        word = f"${34 + j}"
        code += f"lop3.b32 p0, {word}, {NIBBLES}, {MIDDLES}, 0xEA; "
        for n in range(1, 4):
            code += f"shr.u32 t, {word}, {4 * n}; lop3.b32 p{n}, t, {NIBBLES}, {MIDDLES}, 0xEA; "
        x = [f"${2 + 4 * j + n}" for n in range(4)]
        code += product("ac"[j % 2], x[0], x[1], "p0", "p1")
        code += product("bd"[j % 2], x[2], x[3], "p2", "p3")
    return code + collected()


@gluon.constexpr_function
def sum_asm():
    """The sum of what int4_asm multiplies; $1 is the same again."""
    code = accumulators("abcd") + f"mov.b32 p0, {ONES}; "
    for j in range(16):
        code += product("abcd"[j % 4], f"${2 + 2 * j}", f"${3 + 2 * j}", "p0", "p0")
    return code + collected()


@gluon.constexpr_function
def registers(count):
    return "=f,=f," + ",".join(["r"] * count)


@gluon.jit
def sum_of(x):
    """The sum of x over a thread's block of 4-bit codes, as often as lines of A are of it."""
    total, _ = gl.inline_asm_elementwise(
        sum_asm(),
        registers(32),
        [
            x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13],
            x[14], x[15], x[16], x[17], x[18], x[19], x[20], x[21], x[22], x[23], x[24], x[25],
            x[26], x[27], x[28], x[29], x[30], x[31],
        ],
        (gl.float32, gl.float32),
        True,
        1,
    )  # fmt: skip
    return total


@gluon.jit
def multiply_codes(w, i: gl.constexpr, x, x_sum, first, second, sums, BITS: gl.constexpr):
    """Add the products of x with 8 words of codes, from word i on, times their factors."""
    if BITS == 8:
        a, b = gl.inline_asm_elementwise(
            fp8_asm(),
            registers(24),
            [
                x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12],
                x[13], x[14], x[15], w[i], w[i + 1], w[i + 2], w[i + 3], w[i + 4], w[i + 5],
                w[i + 6], w[i + 7],
            ],
            (gl.float32, gl.float32),
            True,
            1,
        )  # fmt: skip
        a *= first.to(gl.float32, bitcast=True)
        b *= second.to(gl.float32, bitcast=True)
    else:
        a, b = gl.inline_asm_elementwise(
            int4_asm(),
            registers(40),
            [
                x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12],
                x[13], x[14], x[15], x[16], x[17], x[18], x[19], x[20], x[21], x[22], x[23], x[24],
                x[25], x[26], x[27], x[28], x[29], x[30], x[31], w[i], w[i + 1], w[i + 2],
                w[i + 3], w[i + 4], w[i + 5], w[i + 6], w[i + 7],
            ],
            (gl.float32, gl.float32),
            True,
            1,
        )  # fmt: skip
        a = (a - lower_half(first) * x_sum) * upper_half(first)
        b = (b - lower_half(second) * x_sum) * upper_half(second)
    return sums[0] + a, sums[1] + b


@gluon.jit
def lower_half(word):
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def upper_half(word):
    return (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def both_blocks(sums):
    """Add what lines of A of the other turn have: the sums of the other blocks of 4-bit codes."""
    asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;"
    first = gl.inline_asm_elementwise(asm, "=f,f", [sums[0]], gl.float32, False, 1)
    second = gl.inline_asm_elementwise(asm, "=f,f", [sums[1]], gl.float32, False, 1)
    return sums[0] + first, sums[1] + second
