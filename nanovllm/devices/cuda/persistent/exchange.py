"""How the programs of the persistent step hand each other vectors, without barriers.

A value is its own flag: a buffer holds EMPTY, bits that arithmetic never gives, until a value is
stored, and readers poll the values themselves. See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.products import stage, stage_words
from nanovllm.devices.cuda.persistent.sizes import (
    gated_parts,
    gated_room,
    num_chunks,
    num_stored,
    q_width,
    qkv_width,
)

NUM_PROGRAMS = gl.constexpr(128)
NUM_BUFFERS = gl.constexpr(3)  # layers take turns, so that two fences lie between two uses of one
CHUNK = gl.constexpr(1024)  # columns of a tile, and lines of which each program has 8
CHECK_SPINS = gl.constexpr(1 << 12)  # how often who waits looks whether another has given up
MAX_CHECKS = gl.constexpr(1 << 8)  # about a second
# The best score where there are no keys, and its bits
NO_SCORE, NO_SCORE_BITS = gl.constexpr(-1e30), "0xF149F2CA"

S1, S2, S3 = (
    gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])) for rank in (1, 2, 3)
)
THREADS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))  # [8 warps, 32]
EIGHT = gl.constexpr(gl.BlockedLayout([8], [32], [8], [0]))
# [8 parts of a sum, 4 copies, 8 blocks, 8 lines]: a thread adds up one line for one copy
SUMS = gl.constexpr(gl.BlockedLayout([8, 1, 1, 1], [1, 4, 1, 8], [1, 1, 8, 1], [3, 2, 1, 0]))
COPIES = gl.constexpr(gl.SliceLayout(0, SUMS.value))
LINES = gl.constexpr(gl.SliceLayout(0, COPIES.value))  # [8 blocks, 8 lines]

# Weights flow through L2 once; what programs hand each other is to outlast them.
KEEP = gl.constexpr("createpolicy.fractional.L2::evict_last.b64 k, 1.0; ")
FENCE = gl.constexpr("fence.acq_rel.gpu; mov.u32 $0, $1;")
PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
PREFETCH_AND_KEEP = gl.constexpr("prefetch.global.L2::evict_last [$1]; mov.u32 $0, 0;")


@gluon.constexpr_function
def poll_asm(num_loads, stride, words):
    """Load `words` words each from places `stride` bytes apart until no half of one is EMPTY."""
    num_words = num_loads * words
    code = ""
    for load in range(num_loads):
        names = [f"${load * words + word}" for word in range(words)]
        target, vector = (names[0], "") if words == 1 else (f"{{{', '.join(names)}}}", f".v{words}")
        place = f"[${num_words} + {load * stride}]"
        code += f"ld.relaxed.gpu.global.L2::cache_hint{vector}.b32 {target}, {place}, k; "
    for word in range(num_words):  # a half of -1 is the only one that borrows here
        code += f"sub.u32 g, 0xFFFEFFFE, ${word}; and.b32 g, g, ${word}; "
        code += "and.b32 g, g, 0x80008000; or.b32 f, f, g; "
    return spin_asm(code, num_words + 1)


@gluon.constexpr_function
def poll_partials_asm(count):
    """Load the first three words at each of `count` places until none is EMPTY.

    Where an operand behind the flags is 0 there is nothing to load: a sum without a weight.
    """
    code = ""
    for i in range(count):
        total, best, weight = f"${i}", f"${count + i}", f"${2 * count + i}"
        code += f"mov.u32 {total}, 0; mov.u32 {best}, {NO_SCORE_BITS}; mov.u32 {weight}, 0; "
        code += f"setp.ne.u32 q, ${5 * count + i}, 0; "
        names, place = f"{{{total}, {best}, {weight}, g}}", f"[${3 * count + i}]"
        code += f"@q ld.relaxed.gpu.global.L2::cache_hint.v4.b32 {names}, {place}, k; "
    for word in range(3 * count):
        code += f"setp.eq.u32 p, ${word}, -1; selp.u32 g, 1, 0, p; or.b32 f, f, g; "
    return spin_asm(code, 4 * count)


@gluon.constexpr_function
def spin_asm(code, flag):
    """Repeat code, which sets bits of f while something is missing, until none are set.

    Who waited too long says so by operand `flag`, where the others look now and then.
    """
    begin = f"{{ .reg .pred p, q; .reg .b32 i, n, f, g; .reg .b64 k; {KEEP.value} mov.u32 n, 0; "
    code = begin + f"MORE: mov.u32 i, 0; AGAIN: mov.u32 f, 0; {code} setp.ne.u32 p, f, 0; "
    code += "add.u32 i, i, 1; "
    code += f"setp.lt.and.u32 q, i, {CHECK_SPINS.value}, p; @q bra AGAIN; @!p bra DONE; "
    code += f"ld.relaxed.sys.global.u32 g, [${flag}]; setp.ne.u32 p, g, 0; @p bra DONE; "
    code += f"add.u32 n, n, 1; setp.lt.u32 p, n, {MAX_CHECKS.value}; @p bra MORE; mov.u32 g, 1; "
    return code + f"st.relaxed.sys.global.u32 [${flag}], g; DONE: }}"


@gluon.constexpr_function
def registers(num_words, num_places, num_numbers=0):
    # Words are written before the places are read for the last time: these may not share registers.
    return ",".join(["=&r"] * num_words + ["l"] * num_places + ["r"] * num_numbers)


@gluon.constexpr_function
def words_type(count):
    return (gl.int32,) * count


@gluon.jit
def bits_to_float(bits):
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def low(words):
    """The first of the two bfloat16 in each word."""
    return bits_to_float(words << 16)


@gluon.jit
def high(words):
    return bits_to_float(words & -65536)


@gluon.jit
def prefetch(places, ASM: gl.constexpr):
    """Ask for what lies there to be in L2 when it is loaded."""
    gl.inline_asm_elementwise(ASM, "=r,l", [places.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def thread_index():
    warp = gl.arange(0, 8, gl.SliceLayout(1, THREADS))[:, None]
    return warp * 32 + gl.arange(0, 32, gl.SliceLayout(0, THREADS))[None, :]


@gluon.jit
def line_index():
    return gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LINES)), 0)


@gluon.jit
def block_index():
    return gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, LINES)), 1)


@gluon.jit
def fence():
    gl.inline_asm_elementwise(FENCE, "=r,r", [thread_index()], gl.int32, False, 1)


@aggregate
class Exchange:
    """A vector of bfloat16 that every program stores a part of, and every program reads.

    Its memory is [buffers, 2, size]: half of the programs read each copy. Parts of it may each have
    room for more. What no value is stored into is zero, and stays so. In one `of_all` programs,
    those without a value store zeros, so that who has read it has heard of everyone.
    """

    memory: gl.tensor
    flag: gl.tensor  # where who waited too long says so
    sm: gl.tensor
    width: gl.constexpr  # values
    stored: gl.constexpr  # these, and zeros of programs that have none
    part: gl.constexpr  # of these
    room: gl.constexpr  # of a part
    columns: gl.constexpr  # of all parts
    size: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, memory, flag, sm, width, bits, parts=1, room=None, of_all=False):
        self.memory, self.flag, self.sm = memory, flag, sm
        room = width if room is None else room
        self.stored = gl.constexpr(num_stored(width) if of_all else width)
        self.width, self.part = gl.constexpr(width), gl.constexpr(width // parts)
        self.room, self.columns = gl.constexpr(room), gl.constexpr(parts * room)
        self.size = gl.constexpr(num_chunks(parts * room, bits) * 1024)

    @gluon.jit
    def publish(self, y, row, block, now, COUNT: gl.constexpr):
        """Store COUNT blocks of lines from y's `row` on, and empty the buffer before this one."""
        copy = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, COPIES)))[:, None, None]
        i = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, COPIES)))[None, :, None] - row
        line = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, COPIES)))[None, None, :]
        line = (block + i) * CHUNK + self.sm * 8 + line
        self.store(gl.expand_dims(y, 0), copy, line, (i >= 0) & (i < COUNT), now)

    @gluon.jit
    def store(self, y, copy, line, is_ours, now):
        """Store y twice, and EMPTY twice into the buffer before: who is copy 0 to 3 does each."""
        before = gl.where(now == 0, NUM_BUFFERS - 1, now - 1)
        at = (gl.where(copy < 2, now, before) * 2 + copy % 2) * self.size + line
        if self.room > self.part:
            at += line // self.part * (self.room - self.part)
        bits = y.to(gl.bfloat16).to(gl.int16, bitcast=True) | gl.where(copy < 2, 0, -1).to(gl.int16)
        if self.stored > self.width:
            bits = gl.where((line < self.width) | (copy >= 2), bits, 0)
        is_ours = is_ours & (line < self.stored) & (copy < 4)
        gl.store(self.memory + at, bits, mask=is_ours, eviction_policy="evict_last")

    @gluon.jit
    def place(self, now):
        """Where this program reads."""
        return self.memory + (now * 2 + self.sm % 2) * self.size

    @gluon.jit
    def poll(self, now):
        """Read the whole vector: of each chunk, two words in a thread."""
        return self.poll_chunks(now, 0, self.size // CHUNK)

    @gluon.jit
    def poll_chunks(self, now, first: gl.constexpr, N: gl.constexpr):
        return self.poll_from(first * CHUNK + thread_index() * 4, now, N, CHUNK)

    @gluon.jit
    def poll_from(self, column, now, N: gl.constexpr, STEP: gl.constexpr):
        """Read two words from each thread's column on, and N - 1 times more, STEP columns on."""
        places = (self.place(now) + column).to(gl.int64)
        return gl.inline_asm_elementwise(
            poll_asm(N, 2 * STEP, 2),
            registers(2 * N, 2),
            [places, places * 0 + self.flag.to(gl.int64)],
            words_type(2 * N),
            False,
            1,
        )

    @gluon.jit
    def take(self, now, BITS: gl.constexpr):
        """Read the vector into shared memory, in pieces for weights of so many bits."""
        N: gl.constexpr = self.size // CHUNK
        words = self.poll(now)
        staged = ()
        for k in gl.static_range(N):
            first, second = words[2 * k], words[2 * k + 1]
            if BITS == 16:
                staged = stage_words(staged, first, second)
            else:
                staged = stage(staged, k, four_floats(first, second), BITS)
        return staged

    @gluon.jit
    def load_norm(self, weight):
        """Load the norm's weight for `take_normed` ahead of time; it is padded to whole chunks."""
        factors = ()
        for k in gl.static_range(self.size // CHUNK):
            factors = factors + (gl.load(weight + k * 256 + thread_index()),)
        return factors

    @gluon.jit
    def take_normed(self, now, factors, eps, BITS: gl.constexpr):
        """Stage x times the norm's weight; what is left of the norm is the factor returned."""
        N: gl.constexpr = self.size // CHUNK
        words = self.poll(now)
        total = gl.zeros([8], gl.float32, gl.SliceLayout(1, THREADS))
        staged = ()
        for k in gl.static_range(N):
            x = four_floats(words[2 * k], words[2 * k + 1])
            w = four_floats(factors[k].to(gl.int32), (factors[k] >> 32).to(gl.int32))
            staged = stage(staged, k, x * w, BITS)
            total += gl.convert_layout(gl.sum(x * x, 1), gl.SliceLayout(1, THREADS))
        squares = gl.allocate_shared_memory(gl.float32, [8], S1)
        squares.store(total)
        mean = gl.sum(squares.load(EIGHT), 0) / self.width
        return staged, gl.rsqrt(mean + eps)


@gluon.jit
def four_floats(first, second):
    """Four bfloat16 of two words, for each of 256 threads: [8, 128]."""
    pairs = gl.join(gl.join(low(first), low(second)), gl.join(high(first), high(second)))
    return gl.reshape(pairs, [8, 128])


@aggregate
class Exchanges:
    """What programs hand each other in a layer."""

    x: Exchange  # the residual before attention
    qkv: Exchange
    attended: Exchange
    y: Exchange  # the residual before the MLP
    gated: Exchange
    routed: Exchange  # logits of experts; without any, something else

    @gluon.constexpr_function
    def __init__(self, x, qkv, attended, y, gated, routed):
        self.x, self.qkv, self.attended, self.y, self.gated = x, qkv, attended, y, gated
        self.routed = routed


@gluon.jit
def make_exchanges(memories, flag, sm, SHAPE: gl.constexpr):
    x, qkv, _, attended, y, gated, routed = memories
    BITS: gl.constexpr = SHAPE.bits
    return Exchanges(
        Exchange(x, flag, sm, SHAPE.hidden, BITS, of_all=True),
        Exchange(qkv, flag, sm, qkv_width(SHAPE), 16),
        Exchange(attended, flag, sm, q_width(SHAPE), BITS),
        Exchange(y, flag, sm, SHAPE.hidden, BITS, of_all=True),
        Exchange(gated, flag, sm, SHAPE.mlp, BITS, gated_parts(SHAPE), gated_room(SHAPE)),
        Exchange(routed, flag, sm, SHAPE.experts.num_experts, 16),
    )
