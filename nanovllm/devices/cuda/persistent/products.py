"""How the weights of the persistent step meet x, whether they are bfloat16 or codes of 8 or 4 bits.

A thread has 8 words of one line in each half of a tile; the codes among them share a scale. As
bfloat16 they are two lines of A, of which each has half of them. Columns of B are x: the even ones
what the upper lines of A are multiplied with, the odd ones what the lower ones are. Scales are
applied to sums. See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.devices.cuda.persistent.sizes import factor_words, segment_groups

S3, S4, S5, S6, S8 = (
    gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1]))
    for rank in (3, 4, 5, 6, 8)
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


@gluon.jit
def stage(staged, k: gl.constexpr, x, BITS: gl.constexpr):
    """Put chunk k of x, [8, 128], into shared memory, and say so at the end of what is staged.

    A piece is what half a tile is multiplied with, [8 segments, vectors, 2 columns of B, 4 threads,
    8]: what the threads of a segment load together lies together. A chunk is two pieces for weights
    of 16 bits, one for 8 bits, and half of one for 4.
    """
    if BITS == 16:
        # Of a thread's words, which lie together, the first and the third are of one line of A.
        both = gl.allocate_shared_memory(gl.bfloat16, [2, 8, 2, 4, 4, 2], S6)
        values = gl.reshape(x.to(gl.bfloat16), [2, 8, 4, 4, 2, 2])
        both.store(gl.permute(values, [0, 1, 4, 2, 3, 5]))
        staged = staged + two_pieces(both)
    elif BITS == 8:
        # A word has the codes of four inputs 32 apart: the first and the third become a pair.
        piece = gl.allocate_shared_memory(gl.bfloat16, [8, 2, 2, 4, 4, 2], S6)
        values = gl.reshape((x * RAISE).to(gl.bfloat16), [8, 2, 2, 4, 2, 4])
        piece.store(gl.permute(values, [0, 4, 2, 3, 5, 1]))
        staged = staged + (piece,)
    else:
        if k % 2 == 0:
            staged = staged + (gl.allocate_shared_memory(gl.bfloat16, [2, 4, 8, 4, 8], S4),)
        # And here of eight, 16 apart, in two blocks: the first and the fifth.
        values = gl.reshape(x.to(gl.bfloat16), [4, 2, 2, 2, 2, 2, 4, 2])
        values = gl.permute(values, [0, 6, 4, 1, 5, 7, 3, 2])
        half = staged[k // 2].index(k % 2)
        half._reinterpret(gl.bfloat16, [4, 4, 2, 2, 2, 2, 2, 2], S8).store(values)
    return staged


@gluon.jit
def stage_words(staged, first, second):
    """Put a chunk, of which each thread has two words, into shared memory for 16 bits."""
    both = gl.allocate_shared_memory(gl.int32, [2, 8, 2, 4, 4], S5)
    words = gl.reshape(gl.join(first, second), [2, 8, 4, 4, 2])
    both.store(gl.permute(words, [0, 1, 4, 2, 3]))
    return staged + two_pieces(both)


@gluon.jit
def two_pieces(both):
    pieces = both._reinterpret(gl.bfloat16, [2, 8, 2, 4, 8], S4)
    return pieces.index(0), pieces.index(1)


@gluon.jit
def load_x(piece, BITS: gl.constexpr):
    """A thread's words of x for one half of a tile: of the column of B that its line counts."""
    V: gl.constexpr = x_words(BITS) // 4
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, V, 4], [1, 4, 2, 4, 1, 1], [8, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    words = piece._reinterpret(gl.int32, [8, V, 2, 4, 4], S5).permute([0, 2, 3, 1, 4])
    x = gl.expand_dims(words.load(gl.SliceLayout(1, L)), 1)
    x = gl.reshape(x + gl.zeros([8, 4, 2, 4, V, 4], gl.int32, L), [8, 8, 4, 4 * V])
    found = each(x, 4 * V)
    if BITS == 4:
        keep, own = own_block(), ()
        for k in gl.static_range(16):
            own = own + (found[k] & keep,)
        found = own
    return found


@gluon.jit
def own_block():
    """All bits, where a thread's words are of the block that its column of B is for."""
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, ONE)))[None, :, None]
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, ONE)))[None, None, :]
    is_own = gl.zeros([8, 8, 4], gl.int32, ONE) + column // 2 % 2 == place // 2
    return gl.where(is_own, -1, 0)


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
        [1, 1, 1, 1], [4 // P, 1, P, 8], [1, 8 // PIECE, PIECE, 1], [2, 0, 3, 1]
    )
    pieces = slot.slice(0, N * STEP, 0)._reinterpret(gl.int32, [N, STEP // 8, 8], S3)
    words = gl.expand_dims(pieces.slice(0, PIECE * P, 1).load(gl.SliceLayout(0, L)), 0)
    words = words + gl.zeros([4 // P, N, PIECE * P, 8], gl.int32, L)
    words = gl.permute(gl.reshape(words, [4 // P, HALVES, 8, P, 8]), [2, 4, 0, 3, 1])
    if HALVES == 2:
        first, second = gl.split(gl.reshape(words, [8, 8, 4, 2]))
        found = one(first), one(second)
    else:
        found = (one(words),)
    return found


@gluon.constexpr_function
def accumulators():
    """Sums of products that do not wait for each other."""
    zeros = "".join(f"mov.f32 {name}{i}, 0f00000000; " for name in "ab" for i in range(4))
    return f"{{ .reg .f32 a<4>, b<4>; .reg .b32 s, t, p<4>; {zeros}"


@gluon.constexpr_function
def product(name, low, high):
    sums = ", ".join(f"{name}{i}" for i in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, "
        f"{{p0, p1, p2, p3}}, {{{low}, {high}}}, {{{sums}}}; "
    )


@gluon.constexpr_function
def collected(first, second):
    """A thread has sums of two columns of B, for an upper line of A and for a lower one."""
    return (
        f"add.f32 a0, a{first}, b{first}; add.f32 a1, a{second}, b{second}; add.f32 $0, a0, a1; }}"
    )


@gluon.constexpr_function
def plain_asm(halves):
    """The words of halves of a tile, which are bfloat16 as they are: two for each line of A."""
    code = accumulators()
    for j in range(2 * halves):
        first = 1 + 4 * halves + 4 * j
        code += "".join(f"mov.b32 p{i}, ${first + i}; " for i in range(4))
        code += product("ab"[j % 2], f"${1 + 2 * j}", f"${2 + 2 * j}")
    return code + collected(0, 3)


@gluon.constexpr_function
def fp8_asm():
    """8 words, whose bytes 0 and 2 are a pair, and 1 and 3. (a & b) | c is table 0xEA."""
    code = accumulators()
    for j in range(8):
        word, even, odd = f"${9 + j}", f"p{j % 2 * 2}", f"p{j % 2 * 2 + 1}"
        code += f"shl.b32 t, {word}, 4; and.b32 t, t, {REST}; shl.b32 s, {word}, 8; "
        code += f"lop3.b32 {even}, s, {SIGN}, t, 0xEA; "
        code += f"shr.u32 t, {word}, 4; and.b32 t, t, {REST}; "
        code += f"lop3.b32 {odd}, {word}, {SIGN}, t, 0xEA; "
        if j % 2:
            code += product("ab"[j // 2 % 2], f"${j}", f"${j + 1}")
    return code + collected(0, 3)


@gluon.constexpr_function
def int4_asm():
    """8 words; the codes in bits 4 * n and 16 + 4 * n, each behind the bits of 128, are a pair."""
    code = accumulators()
    for j in range(8):
        word = f"${17 + j}"
        code += f"lop3.b32 p0, {word}, {NIBBLES}, {MIDDLES}, 0xEA; "
        for n in range(1, 4):
            code += f"shr.u32 t, {word}, {4 * n}; lop3.b32 p{n}, t, {NIBBLES}, {MIDDLES}, 0xEA; "
        code += product("ab"[j % 2], f"${1 + 2 * j}", f"${2 + 2 * j}")
    return code + collected(0, 3)


@gluon.constexpr_function
def sum_asm():
    """The sum of what int4_asm multiplies, of both columns."""
    code = accumulators() + "".join(f"mov.b32 p{i}, {ONES}; " for i in range(4))
    for j in range(8):
        code += product("ab"[j % 2], f"${1 + 2 * j}", f"${2 + 2 * j}")
    return code + collected(0, 1)


@gluon.constexpr_function
def rows_asm():
    """8 words of lines of A, whose lower half is zero, and 8 of B: what each line has with two."""
    code = accumulators() + "mov.b32 p1, 0; mov.b32 p3, 0; "
    for j in range(4):
        code += f"mov.b32 p0, ${2 + 2 * j}; mov.b32 p2, ${3 + 2 * j}; "
        code += product("ab"[j % 2], f"${10 + 2 * j}", f"${11 + 2 * j}")
    return code + "add.f32 $0, a0, b0; add.f32 $1, a1, b1; }"


@gluon.constexpr_function
def registers(count):
    return "=f," + ",".join(["r"] * count)


@gluon.jit
def sum_of(x):
    """The sum of x over a block of 4-bit codes."""
    return run(sum_asm(), registers(16), x)


@gluon.jit
def run(ASM: gl.constexpr, REGISTERS: gl.constexpr, words):
    return gl.inline_asm_elementwise(ASM, REGISTERS, words, gl.float32, True, 1)


@gluon.jit
def multiply(w, x, x_sums, total, HALVES: gl.constexpr, BITS: gl.constexpr):
    """Add the products of a tile with x, of which each half of the tile has a piece.

    w are a thread's words of the tile, and behind them a factor for each half.
    """
    if BITS == 16:
        all_of_x = x[0] if HALVES == 1 else x[0] + x[1]
        total += run(plain_asm(HALVES), registers(12 * HALVES), all_of_x + w)
    else:
        for a in gl.static_range(HALVES):
            words, factor = w[8 * a : 8 * a + 8], w[8 * HALVES + a]
            if BITS == 8:
                products = run(fp8_asm(), registers(16), x[a] + words)
                total += products * factor.to(gl.float32, bitcast=True)
            else:
                products = run(int4_asm(), registers(24), x[a] + words)
                total += (products - lower_half(factor) * x_sums[a]) * upper_half(factor)
    return total


@gluon.jit
def lower_half(word):
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def upper_half(word):
    return (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def both_blocks(total):
    """Add what the next thread has: the sum of the other blocks of 4-bit codes."""
    asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;"
    return total + gl.inline_asm_elementwise(asm, "=f,f", [total], gl.float32, False, 1)
