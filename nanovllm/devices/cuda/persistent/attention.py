"""Attention of the persistent step: split-KV over all CTAs, followed by a merge of the splits.

A segment is a CTA's range of keys of one row and KV head; sizes.py explains the other terms. See
docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.exchange import (
    KEEP,
    NO_SCORE,
    NO_SCORE_BITS,
    NUM_BUFFERS,
    NUM_CTAS,
    S1,
    S2,
    S3,
    S4,
    Exchange,
    bits_to_float,
    high,
    low,
    poll_asm,
    prefetch,
    registers,
    thread_index,
    words_type,
)
from nanovllm.devices.cuda.persistent.fp8_heads import (
    WEIGHT_EXPONENT,
    hadamard_transform,
    pack_fp8,
    power_of_two,
    scale_rows,
    upcast_asm,
)
from nanovllm.devices.cuda.persistent.sizes import (
    PARTIAL_WORDS,
    UNIT,
    head_vector_layout,
    key_layout,
    merge_groups,
    merge_layout,
    num_head_vectors,
    num_output_groups,
    num_splits,
    score_layout,
)
from nanovllm.devices.cuda.persistent.tile_mma import (
    ONE,
    floats_type,
    quad_lane,
    stacked,
    unpacked,
)

# Layout of a tensor [8 warps, 8 heads or words, 4 threads, 8 keys].
TILE = gl.constexpr(gl.BlockedLayout([1, 1, 1, 8], [1, 8, 4, 1], [8, 1, 1, 1], [3, 2, 1, 0]))
SCORES = gl.constexpr(gl.SliceLayout(0, TILE.value))  # [8 heads, 4 threads, 8 keys]
HEADS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, SCORES.value)))
PACK = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
PACK_FLOAT16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@gluon.jit
def pack(a, b, ASM: gl.constexpr = PACK):
    """Pack two float32 into a word of two bfloat16, or of two float16."""
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [a, b], gl.int32, True, 1)


@gluon.jit
def four_words(t, SEGMENTS: gl.constexpr):
    """Split FP8 keys, 4 words per thread, into 4 tensors of one word per thread.

    SEGMENTS is head_dim / 64, here and below.
    """
    a, b = gl.split(gl.reshape(t, [4, 8, SEGMENTS, 4, 2, 2]))
    w0, w2 = gl.split(a)
    w1, w3 = gl.split(b)
    return w0, w1, w2, w3


@gluon.jit
def eight_words(t, SEGMENTS: gl.constexpr):
    """Split keys or queries, 8 words per thread, into 8 tensors of one word per thread."""
    a, b = gl.split(gl.reshape(t, [4, 8, SEGMENTS, 4, 4, 2]))
    a0, a2 = gl.split(gl.reshape(a, [4, 8, SEGMENTS, 4, 2, 2]))
    b1, b3 = gl.split(gl.reshape(b, [4, 8, SEGMENTS, 4, 2, 2]))
    w0, w4 = gl.split(a0)
    w2, w6 = gl.split(a2)
    w1, w5 = gl.split(b1)
    w3, w7 = gl.split(b3)
    return w0, w1, w2, w3, w4, w5, w6, w7


@gluon.jit
def as_scores(words):
    """Convert words of keys or queries to the layout of scores, which moves no data."""
    found = ()
    for n in gl.static_range(len(words)):
        word = gl.convert_layout(words[n], score_layout(), assert_trivial=True)
        found = found + (word,)
    return found


@gluon.jit
def finite(x):
    """Replace NaN and infinity by 0: either one times 0, a masked key's probability, is NaN."""
    return gl.where(x * 0.0 == 0.0, x, 0.0)


@gluon.constexpr_function
def mma(bits):
    """Return the instruction for a cache of bfloat16 values, or of FP8 values upcast to float16."""
    kind = "bf16.bf16" if bits == 16 else "f16.f16"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32"


@gluon.constexpr_function
def score_asm(bits):
    """Return PTX that computes Q K^T for 8 queries and 8 keys.

    A thread gets the scores of one query and two keys. Operands are the two scores, 8 words of
    queries and 8 words of keys; FP8 keys take 4 words.
    """
    more = "" if bits == 16 else ".reg .b32 k<2>; .reg .b16 l, h; "
    code = f"{{ {more}.reg .f32 c<4>; .reg .b32 z; mov.b32 z, 0; "
    code += "".join(f"mov.f32 c{i}, 0f00000000; " for i in range(4))
    for j in range(4):
        q, k = 2 + 2 * j, (f"${10 + 2 * j}", f"${11 + 2 * j}")
        if bits == 8:
            k = "k0", "k1"
            code += f"mov.b32 {{l, h}}, ${10 + j}; "
            code += upcast_asm("k0", "l") + upcast_asm("k1", "h")
        code += f"{mma(bits)} {{c0, c1, c2, c3}}, {{${q}, z, ${q + 1}, z}}, {{{k[0]}, {k[1]}}}, "
        code += "{c0, c1, c2, c3}; "
    return code + "mov.f32 $0, c0; mov.f32 $1, c1; }"


@gluon.constexpr_function
def add_values_asm(bits):
    """Return PTX that adds P V of 32 keys to the sums of 8 heads.

    A thread has two columns of 8 value vectors. Operands are the new sums (two for even columns,
    two for odd ones), the old sums, four pairs of probabilities, and a word of each value vector,
    of which FP8 values use the lower half.
    """
    more = "" if bits == 16 else ".reg .b32 v<8>; .reg .b16 e; "
    code = f"{{ {more}.reg .f32 c<4>; .reg .b32 z, l, h; mov.b32 z, 0; "
    values = [f"${12 + j}" for j in range(8)]
    if bits == 8:
        for j in range(8):
            code += f"cvt.u16.u32 e, {values[j]}; {upcast_asm(f'v{j}', 'e')}"
        values = [f"v{j}" for j in range(8)]
    for t in range(2):
        code += f"mov.f32 c0, ${4 + 2 * t}; mov.f32 c1, ${5 + 2 * t}; "
        code += "mov.f32 c2, 0f00000000; mov.f32 c3, 0f00000000; "
        for s in range(2):
            p, v, halves = 8 + 2 * s, values[4 * s : 4 * s + 4], ("0x5410", "0x7632")[t]
            code += f"prmt.b32 l, {v[0]}, {v[1]}, {halves}; "
            code += f"prmt.b32 h, {v[2]}, {v[3]}, {halves}; "
            code += f"{mma(bits)} {{c0, c1, c2, c3}}, {{${p}, z, ${p + 1}, z}}, {{l, h}}, "
            code += "{c0, c1, c2, c3}; "
        code += f"mov.f32 ${2 * t}, c0; mov.f32 ${2 * t + 1}, c1; "
    return code + "}"


@gluon.constexpr_function
def load_values_asm(stride, bits):
    """Return PTX that loads two values of each of 8 value vectors, `stride` bytes apart.

    The last operand is the number of valid vectors; the values of invalid vectors are zero.
    """
    kind = "b32" if bits == 16 else "u16"
    code = "{ .reg .pred p; "
    for j in range(8):
        code += f"mov.b32 ${j}, 0; setp.gt.s32 p, $9, {j}; "
        code += f"@p ld.global.{kind} ${j}, [$8 + {j * stride}]; "
    return code + "}"


@gluon.constexpr_function
def poll_heads_asm(count, stride):
    """Return PTX that polls two words, `stride` bytes apart, at each of `count` addresses."""
    loads = []
    for i in range(count):
        loads.append(((f"${i}",), f"[${2 * count + i}]"))
        loads.append(((f"${count + i}",), f"[${2 * count + i} + {stride}]"))
    return poll_asm(loads, 3 * count)


@gluon.constexpr_function
def store_partial_asm():
    """Return PTX that stores four sums, and the head's maximum score and denominator.

    The last two operands are the predicates of the two stores.
    """
    code = f"{{ .reg .b64 k; .reg .pred p; {KEEP.value} setp.ne.u32 p, $9, 0; "
    code += "@p st.relaxed.gpu.global.L2::cache_hint.v4.b32 [$1], {$3, $5, $4, $6}, k; "
    code += "setp.ne.u32 p, $10, 0; "
    code += "@p st.relaxed.gpu.global.L2::cache_hint.v4.b32 [$2], {$7, $8, $7, $8}, k; "
    return code + "mov.u32 $0, 0; }"


@gluon.constexpr_function
def poll_partials_asm(count):
    """Return PTX that polls `count` partials: 8 sums, maximum score and denominator of each.

    A partial whose predicate is 0 is not polled, and has the values of a split without keys.
    """
    loads, predicates, begin = [], [], ""
    for i in range(count):
        words = [f"${n * count + i}" for n in range(10)]
        values = ["0"] * 8 + [NO_SCORE_BITS, "0"]
        begin += "".join(f"mov.u32 {w}, {v}; " for w, v in zip(words, values, strict=True))
        for n in range(3):
            loads.append((tuple(words[4 * n : 4 * n + 4]), f"[${10 * count + i} + {16 * n}]"))
            predicates.append(f"${12 * count + i}")
    return begin + poll_asm(loads, 11 * count, False, predicates)


@gluon.constexpr_function
def clear_partials_asm():
    code = f"{{ .reg .b64 k; .reg .pred p; .reg .b32 e; {KEEP.value} mov.u32 e, -1; "
    code += "setp.ne.u32 p, $2, 0; "
    for n in range(3):
        code += (
            f"@p st.relaxed.gpu.global.L2::cache_hint.v4.b32 [$1 + {16 * n}], {{e, e, e, e}}, k; "
        )
    return code + "mov.u32 $0, $3; }"


@gluon.constexpr_function
def store_eight_asm():
    code = f"{{ .reg .b64 k; .reg .pred p; {KEEP.value} setp.ne.u32 p, $6, 0; "
    code += "@p st.relaxed.gpu.global.L2::cache_hint.v4.b32 [$1], {$2, $3, $4, $5}, k; "
    return code + "mov.u32 $0, 0; }"


@gluon.jit
def thread_indices():
    warp = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, ONE)))[:, None, None]
    head = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, ONE)))[None, :, None]
    return warp, head, quad_lane()


@gluon.jit
def broadcast_heads(t):
    """Broadcast a tensor [8 heads] to the layout of the sums."""
    t = gl.convert_layout(t, gl.SliceLayout(0, gl.SliceLayout(2, ONE)), assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(t, 0), 2)


@gluon.jit
def empty_softmax():
    """Return the initial maximum score, denominator and sums of 8 heads."""
    zero = gl.zeros([8, 8, 4], gl.float32, ONE)
    max_score = gl.full([8], NO_SCORE, gl.float32, HEADS)
    return max_score, gl.zeros([8], gl.float32, HEADS), (zero, zero, zero, zero)


@aggregate
class Segment:
    """A range of keys of one row and KV head that a CTA attends to: one or more splits."""

    row: gl.tensor
    head: gl.tensor
    before: gl.tensor  # number of earlier rows that belong to the same sequence
    position: gl.tensor  # position of the row's token
    oldest: gl.tensor  # first key inside the sliding window
    start: gl.tensor  # first key of the row's first split
    size: gl.tensor  # keys per split
    first: gl.tensor  # first key of the segment
    end: gl.tensor  # end of the segment's keys (exclusive)
    slot: gl.tensor

    @gluon.constexpr_function
    def __init__(self, row, head, before, position, oldest, start, size, first, end, slot):
        self.row, self.head, self.before, self.position = row, head, before, position
        self.oldest, self.start, self.size = oldest, start, size
        self.first, self.end, self.slot = first, end, slot


@aggregate
class Attention:
    """Attention of all rows, divided evenly among the CTAs.

    The splits of a row depend on its own length alone, so that its output is the same in any batch.
    The list of all splits, ordered by row and then by KV head, is divided among the CTAs.
    Rows of one slot are consecutive tokens of its sequence.

    A layer's caches are pointers to words: [blocks, block size, KV heads, dim / 2] words of two
    bfloat16, for keys and for values. An FP8 cache has dim / 4 words of four values, and pointers
    to the exponents of keys and of values, [blocks, KV heads, block size] bytes. Its new keys and
    values are quantized before anything attends to them, like those that are read from the cache.
    """

    slots: gl.tensor
    lengths: gl.tensor
    tables: gl.tensor
    table_width: gl.tensor
    window: gl.tensor
    partials: gl.tensor  # [buffers, rows, columns / 8, splits, words]
    qkv: Exchange
    num_heads: gl.constexpr
    num_kv_heads: gl.constexpr
    group: gl.constexpr  # query heads per KV head
    dim: gl.constexpr
    cache_bits: gl.constexpr  # bits per cached value: 16 or 8
    head_words: gl.constexpr  # 32-bit words of a key or a value in the cache
    block_size: gl.constexpr
    rows: gl.constexpr
    new: gl.constexpr  # maximum number of rows that belong to one sequence
    has_window: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, slots, lengths, tables, table_width, window, partials, qkv, shape, block_size, rows,
        new, has_window,
    ):  # fmt: skip
        self.slots, self.lengths, self.tables = slots, lengths, tables
        self.table_width, self.window = table_width, window
        self.partials, self.qkv = partials, qkv
        self.num_heads = gl.constexpr(shape.num_heads)
        self.num_kv_heads = gl.constexpr(shape.num_kv_heads)
        self.group = gl.constexpr(shape.num_heads // shape.num_kv_heads)
        self.dim, self.block_size = gl.constexpr(shape.head_dim), gl.constexpr(block_size)
        self.cache_bits = gl.constexpr(shape.cache_bits)
        self.head_words = gl.constexpr(shape.head_dim * shape.cache_bits // 32)
        self.rows, self.new = gl.constexpr(rows), gl.constexpr(new)
        self.has_window = gl.constexpr(has_window)

    @gluon.jit
    def position(self, row):
        """Return the position of each row's token in its sequence; negative for padding rows."""
        slot = gl.load(self.slots + row)
        last = gl.load(self.lengths + slot) - 1
        if self.new > 1:
            for r in gl.static_range(self.rows):
                last -= gl.where((gl.load(self.slots + r) == slot) & (row < r), 1, 0)
        return last

    @gluon.jit
    def rows_before(self, row):
        """Return the number of earlier rows in the batch that belong to the same sequence."""
        count = row * 0
        if self.new > 1:
            slot = gl.load(self.slots + row)
            for r in gl.static_range(self.rows):
                count += gl.where((gl.load(self.slots + r) == slot) & (row > r), 1, 0)
        return count

    @gluon.jit
    def oldest(self, position):
        """Return the first key that a token at `position` attends to."""
        first = position * 0
        if self.has_window:
            first = gl.maximum(position + 1 - self.window, 0)
        return first

    @gluon.jit
    def splits(self, position):
        """Return the first key of a row's first split, the keys per split, and the split count."""
        S: gl.constexpr = num_splits(self.num_kv_heads)
        start = self.oldest(position) // 32 * 32
        keys = gl.maximum(position + 1 - start, 0)
        size = gl.maximum((keys + UNIT * S - 1) // (UNIT * S), 1) * UNIT
        return start, size, (keys + size - 1) // size

    @gluon.jit
    def divide_splits(self):
        """Divide the list of all rows' splits among the CTAs.

        Return the end of each row's splits in that list, and this CTA's range of splits.
        """
        ends, total = (), gl.to_tensor(0)
        for r in gl.static_range(self.rows):
            _, _, count = self.splits(self.position(gl.to_tensor(r)))
            total += count * self.num_kv_heads
            ends = ends + (total,)
        cta = self.qkv.cta
        return ends, cta * total // NUM_CTAS, (cta + 1) * total // NUM_CTAS

    @gluon.jit
    def segment(self, ends, item, last):
        """Return the segment that starts at split `item`, and its number of splits.

        The segment ends before split `last`, or earlier with the last split of its row and KV head.
        """
        row, begin = gl.to_tensor(0), gl.to_tensor(0)
        for r in gl.static_range(self.rows - 1):
            row += gl.where(item >= ends[r], 1, 0)
            begin = gl.where(item >= ends[r], ends[r], begin)
        position = self.position(row)
        start, size, count = self.splits(position)
        count = gl.maximum(count, 1)  # avoids division by 0: rows without keys have no segment
        head = gl.minimum((item - begin) // count, self.num_kv_heads - 1)
        split = (item - begin) % count
        count = gl.minimum(count - split, last - item)
        first = start + split * size
        end = gl.minimum(first + count * size, position + 1)
        oldest = self.oldest(position)
        before, slot = self.rows_before(row), gl.load(self.slots + row)
        return (
            Segment(row, head, before, position, oldest, start, size, first, end, slot),
            gl.maximum(count, 1),
        )

    @gluon.jit
    def advance(self, caches, words):
        """Advance the pointers of a layer's caches by a number of words."""
        found = caches[0] + words, caches[1] + words
        if self.cache_bits == 8:
            rows = words // self.head_words  # a row of a head has one exponent
            found = found + (caches[2] + rows, caches[3] + rows)
        return found

    @gluon.jit
    def find(self, segment, key):
        """Return the offset of a key in a layer's cache, in words.

        With FP8, also return the offset of its exponent. An aligned run of 32 keys lies in one
        KV-cache block, so the offset of its first key also locates the others.
        """
        table = self.tables + segment.slot * self.table_width
        block = gl.load(table + key // self.block_size, mask=key < segment.end, other=0)
        token = block * self.block_size + key % self.block_size
        offsets = ((token * self.num_kv_heads + segment.head) * self.head_words,)
        if self.cache_bits == 8:
            head = block * self.num_kv_heads + segment.head
            offsets = offsets + (head * self.block_size + key % self.block_size,)
        return offsets

    @gluon.jit
    def key_index(self):
        """Return the indices of 32 keys, as a tensor [4, 8] in the layout of the keys."""
        K: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, key_layout(self.cache_bits)))
        row = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, K)), 1)
        return row * 8 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, K)), 0)

    @gluon.jit
    def load_keys(self, caches, offset, num_keys):
        """Load 32 keys at an offset of the cache; those with an index >= `num_keys` are 0.

        With FP8, also return the exponents of the keys and of the values.
        """
        STRIDE: gl.constexpr = self.num_kv_heads * self.head_words
        KW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, key_layout(self.cache_bits)))
        W: gl.constexpr = 2 * self.cache_bits  # words of a segment
        segment = gl.expand_dims(gl.arange(0, self.dim // 64, gl.SliceLayout(1, KW)) * W, 1)
        word = segment + gl.expand_dims(gl.arange(0, W, gl.SliceLayout(0, KW)), 0)
        word = gl.expand_dims(gl.expand_dims(word, 0), 0)
        key = gl.expand_dims(gl.expand_dims(self.key_index(), 2), 3)
        k = gl.load(caches[0] + (offset[0] + (key * STRIDE + word)), mask=key < num_keys, other=0)
        found = (k,)
        if self.cache_bits == 8:
            found = found + self.load_exponents(caches[2] + offset[1], num_keys)
            found = found + self.load_exponents(caches[3] + offset[1], num_keys)
        return found

    @gluon.jit
    def scored_key(self):
        """Return the index of the first of the two keys whose scores a thread gets: [4, 4]."""
        L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, score_layout()))
        row = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, L)), 1)
        return row * 8 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, L)), 0) * 2

    @gluon.jit
    def load_exponents(self, exponents, num_keys):
        """Load the exponents of the two keys that a thread scores; past the end they are 127."""
        key = self.scored_key()
        even = gl.load(exponents + key, mask=key < num_keys, other=127)
        odd = gl.load(exponents + (key + 1), mask=key + 1 < num_keys, other=127)
        return even.to(gl.int32), odd.to(gl.int32)

    @gluon.jit
    def load_values(self, caches, offset, num_keys):
        """Load 32 value vectors at an offset of the cache; those with an index >= `num_keys` are 0.

        A thread gets two dimensions of each of 8 value vectors, in a word; a warp gets 16
        dimensions of all 32 vectors.
        """
        STRIDE: gl.constexpr = self.num_kv_heads * self.head_words
        warp, n, q = thread_indices()
        pair = warp % (self.dim // 16) * 8 + n
        if self.cache_bits == 16:
            addresses = (caches[1] + (offset[0] + (q * (8 * STRIDE) + pair))).to(gl.int64)
        else:
            addresses = (caches[1] + (offset[0] + q * (8 * STRIDE))).to(gl.int64) + pair * 2
        return gl.inline_asm_elementwise(
            load_values_asm(4 * STRIDE, self.cache_bits), registers(8, 1, 1),
            [addresses, num_keys - 8 * q + 0 * pair], words_type(8), True, 1,
        )  # fmt: skip

    @gluon.jit
    def prefetch(self, caches, offset):
        """Prefetch 32 keys and values into L2."""
        key = thread_index() % 32 * (self.num_kv_heads * self.head_words)
        is_key = thread_index() < 128
        if self.cache_bits == 16:
            part = thread_index() // 32 % (self.dim // 64) * 32
            prefetch(gl.where(is_key, caches[0], caches[1]) + (offset[0] + (key + part)))
        else:  # a head has at most 128 bytes; odd warps prefetch the exponents
            rows = gl.where(is_key, caches[0], caches[1]) + (offset[0] + key)
            exponents = gl.where(is_key, caches[2], caches[3]) + offset[1]
            is_row = thread_index() // 32 % 2 == 0
            prefetch(gl.where(is_row, rows.to(gl.int64), exponents.to(gl.int64)))

    @gluon.jit
    def vector(self):
        """Return the indices of a thread's head vectors: queries, new keys, new values."""
        N: gl.constexpr = num_head_vectors(self.group, self.new)
        return gl.expand_dims(gl.arange(0, N, gl.SliceLayout(1, head_vector_layout(N))), 1)

    @gluon.jit
    def column(self):
        """Return the indices of a thread's words in half a head vector."""
        L: gl.constexpr = head_vector_layout(num_head_vectors(self.group, self.new))
        return gl.expand_dims(gl.arange(0, self.dim // 4, gl.SliceLayout(0, L)), 0)

    @gluon.jit
    def load_norms(self, norms):
        """Load the norm weights of q and k, for both halves of a head."""
        address = norms + (gl.where(self.vector() < self.group, 0, self.dim // 2) + self.column())
        return gl.load(address), gl.load(address + self.dim // 4)

    @gluon.jit
    def allocate_heads(self):
        """Allocate shared memory for the output of `rotate_heads`: queries, new keys and values.

        With an FP8 cache, these are queries in float16, keys and values in FP8, and the exponents
        of all, each with room for all head vectors.
        """
        N: gl.constexpr = num_head_vectors(self.group, self.new)
        if self.cache_bits == 16:
            heads = (gl.allocate_shared_memory(gl.bfloat16, [N, self.dim], S2),)
        else:
            heads = (
                gl.allocate_shared_memory(gl.float16, [N, self.dim], S2),
                gl.allocate_shared_memory(gl.int16, [N, self.dim // 2], S2),
                gl.allocate_shared_memory(gl.int32, [N], S1),
            )
        return heads

    @gluon.jit
    def rotate_heads(self, segment, heads, norms, parameters, buffer):
        """Poll q, k and v of a segment's row and head; normalize q and k, and apply RoPE to them.

        The k and v of earlier rows of the same sequence are polled and processed as well.
        """
        G: gl.constexpr = self.group
        D: gl.constexpr = self.dim
        VECTORS: gl.constexpr = num_head_vectors(G, self.new)
        vector, is_q, is_v = self.vector(), self.vector() < G, self.vector() >= G + self.new
        # Number of rows by which the row of a new key or value precedes this row.
        behind = segment.before - (vector - gl.where(is_v, G + self.new, G))
        behind = gl.where(is_q | (behind < 0), 0, gl.minimum(behind, segment.before))
        HALF: gl.constexpr = D // 2
        rope = parameters.rope + ((segment.position - behind) * D + self.column() * 2)
        c0, c1 = gl.load(rope), gl.load(rope + 1)
        s0, s1 = gl.load(rope + HALF), gl.load(rope + HALF + 1)
        kv_head = self.num_heads + segment.head + gl.where(is_v, self.num_kv_heads, 0)
        head = gl.where(is_q, segment.head * G + vector, kv_head)
        offset = (segment.row - behind) * self.qkv.size + head * D + self.column() * 2
        addresses = (self.qkv.address(buffer) + offset).to(gl.int64)
        N: gl.constexpr = VECTORS // 8
        a, b = gl.inline_asm_elementwise(  # a thread has two elements of each half of a head
            poll_heads_asm(N, D), registers(2 * N, 2 * N),
            [addresses, addresses * 0 + self.qkv.flag.to(gl.int64)], words_type(2), False, N,
        )  # fmt: skip
        a0, a1, b0, b1 = low(a), high(a), low(b), high(b)
        factor = gl.where(is_q, parameters.scale, 1.0)
        if parameters.has_norm:
            square = gl.sum(a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1, 1)
            factor = factor * gl.expand_dims(gl.rsqrt(square / D + parameters.eps), 1)
        n0, n1, m0, m1 = a0 * factor, a1 * factor, b0 * factor, b1 * factor
        if parameters.has_norm:
            wa, wb = norms
            n0, n1, m0, m1 = n0 * low(wa), n1 * high(wa), m0 * low(wb), m1 * high(wb)
        x0, x1 = gl.where(is_v, a0, n0 * c0 - m0 * s0), gl.where(is_v, a1, n1 * c1 - m1 * s1)
        y0, y1 = gl.where(is_v, b0, m0 * c0 + n0 * s0), gl.where(is_v, b1, m1 * c1 + n1 * s1)
        if self.cache_bits == 16:
            heads[0].store(finite(self.whole_heads(x0, x1, y0, y1)).to(gl.bfloat16))
        else:
            self.quantize_heads(heads, (x0, x1, y0, y1), is_q, is_v)

    @gluon.jit
    def whole_heads(self, x0, x1, y0, y1):
        """Join the elements of all lanes: two adjacent ones of each half of a head vector."""
        both = gl.join(gl.join(x0, x1), gl.join(y0, y1))  # [vectors, dim / 4, 2, half]
        return gl.reshape(gl.permute(both, [0, 3, 1, 2]), [x0.shape[0], self.dim])

    @gluon.jit
    def quantize_heads(self, heads, values, is_q, is_v):
        """Transform queries and keys, and store queries in float16, keys and values in FP8."""
        rounded = ()
        for n in gl.static_range(4):
            rounded = rounded + (finite(values[n]).to(gl.bfloat16).to(gl.float32),)
        mixed = hadamard_transform(
            rounded[0], rounded[1], rounded[2], rounded[3], self.column(), is_q, self.dim
        )
        rows = ()
        for n in gl.static_range(4):
            rows = rows + (gl.where(is_v, rounded[n], mixed[n]),)
        rows, exponents = scale_rows(rows[0], rows[1], rows[2], rows[3])
        queries, quantized, scales = heads
        queries.store(self.whole_heads(rows[0], rows[1], rows[2], rows[3]).to(gl.float16))
        pairs = gl.join(pack_fp8(rows[0], rows[1]), pack_fp8(rows[2], rows[3]))
        pairs = gl.permute(pairs, [0, 2, 1])  # [vectors, half, dim / 4]
        quantized.store(gl.reshape(pairs, [pairs.shape[0], self.dim // 2]))
        scales.store(exponents)

    @gluon.jit
    def find_unit(self, segment, begin):
        """Return the cache offsets of a unit's first and last 32 keys."""
        return self.find(segment, begin), self.find(segment, begin + 32)

    @gluon.jit
    def load_unit_keys(self, segment, begin, offsets, caches):
        count = segment.end - begin
        first = self.load_keys(caches, offsets[0], count)
        return first, self.load_keys(caches, offsets[1], count - 32)

    @gluon.jit
    def load_unit_values(self, segment, begin, offsets, caches):
        count = segment.end - begin
        first = self.load_values(caches, offsets[0], count)
        return first, self.load_values(caches, offsets[1], count - 32)

    @gluon.jit
    def prefetch_unit(self, offsets, caches):
        self.prefetch(caches, offsets[0])
        self.prefetch(caches, offsets[1])

    @gluon.jit
    def attend(self, segment, heads, caches, skip, k, v, buffer):
        """Attend to the keys of a segment, and store the partial result of each split.

        k and v are the keys and values of the first unit. The next unit is loaded into the same
        registers while the current one is processed. The same unit of the next layer, `skip` words
        later in the cache, is prefetched into L2.
        """
        SEGMENTS: gl.constexpr = self.dim // 64
        KL: gl.constexpr = key_layout(16)
        N: gl.constexpr = num_head_vectors(self.group, self.new)
        words = heads[0]._reinterpret(gl.int32, [N, SEGMENTS, 32], S3)
        q = gl.expand_dims(words.slice(0, 8).load(gl.SliceLayout(0, KL)), 0)
        q = eight_words(q + gl.zeros([4, 8, SEGMENTS, 32], gl.int32, KL), SEGMENTS)
        scores = gl.allocate_shared_memory(gl.float32, [2 * SEGMENTS, 8, 4, 8], S4)
        q_scale, scales = (), ()
        if self.cache_bits == 8:
            q = as_scores(q)
            q_scale = (self.load_query_scales(heads),)
            scales = (gl.allocate_shared_memory(gl.float32, [2, 4, 4, 2], S4),)
        max_score, denominator, sums = empty_softmax()
        for begin in range(segment.first, segment.end, UNIT):
            after = begin + UNIT
            offsets = self.find_unit(segment, after)
            if segment.position - segment.before < after:
                k, v = self.with_new(segment, heads, k, v, begin)
                if segment.position < after:
                    self.store_new(segment, heads, caches)
            self.score(scores, scales, q, q_scale, k)
            if after < segment.end:
                k = self.load_unit_keys(segment, after, offsets, caches)
                self.prefetch_unit(offsets, self.advance(caches, skip))
            max_score, denominator, sums = self.update_softmax(
                segment, scores, scales, v, begin, max_score, denominator, sums
            )
            if after < segment.end:
                v = self.load_unit_values(segment, after, offsets, caches)
            ended = after - segment.start
            if (ended % segment.size == 0) | (after >= segment.end):
                self.store_partial(
                    segment, (ended - 1) // segment.size, sums, max_score, denominator, buffer
                )
                max_score, denominator, sums = empty_softmax()

    @gluon.jit
    def with_new(self, segment, heads, k, v, begin):
        """Insert new keys and values into the unit at `begin`: the cache may not hold them yet."""
        N: gl.constexpr = num_head_vectors(self.group, self.new)
        COPIES: gl.constexpr = 128 // self.dim  # number of warps that hold the same values
        VALUES: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, 1], [1, 1, 8, 4], [COPIES, 8 // COPIES, 1, 1], [3, 2, 1, 0]
        )
        V: gl.constexpr = gl.SliceLayout(3, VALUES)
        K: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, key_layout(self.cache_bits)))
        PAIR: gl.constexpr = gl.int32 if self.cache_bits == 16 else gl.int16
        cached = heads[0 if self.cache_bits == 16 else 1]
        keys = cached._reinterpret(gl.int32, [N, self.dim // 64, 2 * self.cache_bits], S2)
        values = cached._reinterpret(PAIR, [N, 8 // COPIES, 8], S2)
        for j in range(segment.before + 1):
            key = segment.position - segment.before + j - begin
            new_k = keys.index(self.group + j).load(K)
            new_k = gl.expand_dims(gl.expand_dims(new_k, 0), 0)
            new_v = values.index(self.group + self.new + j).load(gl.SliceLayout(0, V))
            new_v = new_v.to(gl.int32)
            new_v = gl.expand_dims(new_v, 0) + gl.zeros([COPIES, 8 // COPIES, 8], gl.int32, V)
            new_v = gl.convert_layout(gl.reshape(new_v, [8, 8]), gl.SliceLayout(2, ONE))
            new_v = gl.expand_dims(new_v, 2)
            with_k, with_v = (), ()
            for i in gl.static_range(2):
                is_new = gl.expand_dims(gl.expand_dims(self.key_index() == key - 32 * i, 2), 3)
                with_key = (gl.where(is_new, new_k, k[i][0]),)
                if self.cache_bits == 8:
                    with_key = with_key + self.with_new_exponents(heads, k[i], j, key - 32 * i)
                with_k = with_k + (with_key,)
                words, index_in_thread = (), key - 32 * i - quad_lane() * 8
                for n in gl.static_range(8):
                    words = words + (gl.where(index_in_thread == n, new_v, v[i][n]),)
                with_v = with_v + (words,)
            k, v = with_k, with_v
        return k, v

    @gluon.jit
    def with_new_exponents(self, heads, k, j, new_key):
        """Set the exponents of key j, a new token, and of its value among those of 32 tokens."""
        L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, score_layout())))
        N: gl.constexpr = num_head_vectors(self.group, self.new)
        exponents = heads[2]._reinterpret(gl.int32, [N, 1], S1)
        key, found = self.scored_key(), ()
        for n in gl.static_range(4):  # k holds the keys, then pairs of exponents of keys and values
            vector = self.group + n // 2 * self.new + j
            new = gl.expand_dims(exponents.index(vector).load(L), 0)
            found = found + (gl.where(key + n % 2 == new_key, new, k[1 + n]),)
        return found

    @gluon.jit
    def load_query_scales(self, heads):
        """Load the scales of the queries, in the layout of the scores."""
        L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, score_layout())))
        exponents = heads[2].slice(0, 8, 0).load(L)
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(power_of_two(exponents), 0), 2), 3)

    @gluon.jit
    def score(self, scores, scales, q, q_scale, k):
        """Compute Q K^T of a unit: each warp handles 8 of every 32 keys, and 64 dimensions."""
        SEGMENTS: gl.constexpr = self.dim // 64
        operands: gl.constexpr = "=f,=f" + ",r" * (8 + self.cache_bits // 2)
        found, inverses = (), ()
        for i in gl.static_range(2):
            if self.cache_bits == 16:
                words = q + eight_words(k[i][0], SEGMENTS)
            else:
                words = q + as_scores(four_words(k[i][0], SEGMENTS))
            even, odd = gl.inline_asm_elementwise(
                score_asm(self.cache_bits), operands, words, floats_type(2), True, 1
            )
            if self.cache_bits == 8:
                even = self.scale_scores(even, q_scale[0], k[i][1], k[i][3])
                odd = self.scale_scores(odd, q_scale[0], k[i][2], k[i][4])
                inverse = gl.join(power_of_two(254 - k[i][3]), power_of_two(254 - k[i][4]))
                inverses = inverses + (inverse,)
            found = found + (gl.join(even, odd),)
        # [4, 8 heads, dim / 64, 4, 2 keys, 2 halves of the unit]
        pairs = gl.permute(stacked(found), [5, 2, 1, 0, 3, 4])
        scores.store(gl.reshape(pairs, [2 * SEGMENTS, 8, 4, 8]))
        if self.cache_bits == 8:
            scales[0].store(gl.permute(stacked(inverses), [3, 0, 1, 2]))

    @gluon.jit
    def scale_scores(self, scores, q_scale, k_exponents, v_exponents):
        """Multiply scores by the scales of queries and keys, and add the exponents of the values.

        If two warps have parts of a score, only the first adds the exponents.
        """
        L: gl.constexpr = score_layout()
        SEGMENT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
        segment = gl.arange(0, self.dim // 64, SEGMENT)[None, None, :, None]
        key_scale = gl.expand_dims(gl.expand_dims(power_of_two(k_exponents), 1), 2)
        added = gl.expand_dims(gl.expand_dims((v_exponents - 127).to(gl.float32), 1), 2)
        return scores * q_scale * key_scale + gl.where(segment == 0, added, 0.0)

    @gluon.jit
    def scores_of(self, segment, scores, begin, i: gl.constexpr):
        """Load the scores of 32 keys of a unit into every warp, and mask them."""
        SEGMENTS: gl.constexpr = self.dim // 64
        scores = scores._reinterpret(gl.float32, [2 * SEGMENTS, 8, 4, 8], S3)
        s = scores.index(i * SEGMENTS).load(SCORES)
        if SEGMENTS == 2:
            s += scores.index(i * SEGMENTS + 1).load(SCORES)
        q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, SCORES)))[None, :, None]
        j = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))[None, None, :]
        before = begin + 32 * i + q * 8
        is_seen = j < segment.end - before
        if self.has_window:
            is_seen = is_seen & (j >= segment.oldest - before)
        return gl.where(is_seen, s, float("-inf"))

    @gluon.jit
    def update_softmax(self, segment, scores, scales, v, begin, max_score, denominator, sums):
        """Update the online softmax with the scores and values of a unit.

        With FP8, the probabilities include the scales of the values; the denominator does not.
        """
        s = self.scores_of(segment, scores, begin, 0), self.scores_of(segment, scores, begin, 1)
        new_max = gl.maximum(max_score, gl.max(gl.max(gl.maximum(s[0], s[1]), 2), 1))
        rescale = gl.exp2(max_score - new_max)
        rescaled = ()
        for n in gl.static_range(4):
            rescaled = rescaled + (sums[n] * broadcast_heads(rescale),)
        sums = rescaled
        total = gl.zeros([8, 4, 8], gl.float32, SCORES)
        shift = new_max
        if self.cache_bits == 8:
            shift = new_max - WEIGHT_EXPONENT
        for i in gl.static_range(2):
            p = gl.exp2(s[i] - gl.expand_dims(gl.expand_dims(shift, 1), 2))
            if self.cache_bits == 16:
                total += p
            else:
                inverse = scales[0]._reinterpret(gl.float32, [2, 4, 8], S2).index(i)
                total += p * gl.expand_dims(inverse.load(gl.SliceLayout(0, SCORES)), 0)
            sums = self.add_values(sums, p, v[i])
        return new_max, denominator * rescale + gl.sum(gl.sum(total, 2), 1), sums

    @gluon.jit
    def add_values(self, sums, p, v):
        """Add P V for 32 keys to the sums of 8 heads: each warp handles 16 dimensions."""
        ASM: gl.constexpr = PACK if self.cache_bits == 16 else PACK_FLOAT16
        p = unpacked(gl.expand_dims(p, 0) + gl.zeros([8, 8, 4, 8], gl.float32, TILE), 8)
        probabilities = ()
        for n in gl.static_range(4):
            probabilities = probabilities + (pack(p[2 * n], p[2 * n + 1], ASM),)
        code: gl.constexpr = add_values_asm(self.cache_bits)
        operands: gl.constexpr = "=&f,=&f,=&f,=&f,f,f,f,f" + ",r" * 12
        return gl.inline_asm_elementwise(
            code, operands, sums + probabilities + v, floats_type(4), True, 1
        )

    @gluon.jit
    def store_new(self, segment, heads, caches):
        """Store the row's new key and value in the cache."""
        N: gl.constexpr = num_head_vectors(self.group, self.new)
        W: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        cached = heads[0 if self.cache_bits == 16 else 1]
        wide = cached._reinterpret(gl.int32, [N, self.head_words], S1)
        offset = self.find(segment, segment.position)
        i = offset[0] + gl.arange(0, self.head_words, W)
        vector = self.group + segment.before
        gl.store(caches[0] + i, wide.index(vector).load(W))
        gl.store(caches[1] + i, wide.index(vector + self.new).load(W))
        if self.cache_bits == 8:
            i = offset[1] + gl.arange(0, 1, W)
            exponents = heads[2]._reinterpret(gl.int32, [N, 1], S1)
            gl.store(caches[2] + i, exponents.index(vector).load(W).to(gl.uint8))
            gl.store(caches[3] + i, exponents.index(vector + self.new).load(W).to(gl.uint8))

    @gluon.jit
    def store_partial(self, segment, split, sums, max_score, denominator, buffer):
        """Store the partial result of a split for `merge`; no two threads store the same value."""
        D: gl.constexpr = self.dim
        warp, head, four = thread_indices()
        column = (segment.head * self.group + head) * D + warp * 16 + four * 4
        partial = self.partial_address(buffer, segment.row, column // 8, split)
        is_ours = (head < self.group) & (warp < D // 16) & (four >= 0)
        zero = gl.zeros([8, 8, 4], gl.float32, ONE)
        gl.inline_asm_elementwise(
            store_partial_asm(), "=r,l,l,f,f,f,f,f,f,r,r",
            ((partial + four % 2 * 4).to(gl.int64), (partial + 8).to(gl.int64)) + sums
            + (broadcast_heads(max_score) + zero, broadcast_heads(denominator) + zero,
               gl.where(is_ours, 1, 0), gl.where(is_ours & (four % 2 == 0), 1, 0)),
            gl.int32, False, 1,
        )  # fmt: skip

    @gluon.jit
    def partial_address(self, buffer, row, group, split):
        """Return the address of the partial result of a split for one 8-column group of a row."""
        WIDTH: gl.constexpr = self.num_heads * self.dim
        S: gl.constexpr = num_splits(self.num_kv_heads)
        index = ((buffer * self.rows + row) * num_output_groups(WIDTH) + group) * S + split
        return self.partials + index * PARTIAL_WORDS

    @gluon.jit
    def merge_indices(self):
        """Return the batch row, chunk and split that each thread handles in `merge`."""
        L: gl.constexpr = merge_layout(self.num_kv_heads)
        C: gl.constexpr = merge_groups(self.num_heads * self.dim, self.num_kv_heads, self.rows)
        S: gl.constexpr = num_splits(self.num_kv_heads)
        index = gl.arange(0, C, gl.SliceLayout(1, L))[:, None]
        split = gl.arange(0, S, gl.SliceLayout(0, L))[None, :]
        return index % self.rows, index // self.rows, split

    @gluon.jit
    def active(self):
        """Return the predicate of the splits that `merge` polls: the splits with keys."""
        WIDTH: gl.constexpr = self.num_heads * self.dim
        row, chunk, split = self.merge_indices()
        _, _, count = self.splits(self.position(row))
        group = chunk * NUM_CTAS + self.qkv.cta
        return gl.where((split < count) & (group < WIDTH // 8), 1, 0)

    @gluon.jit
    def merge(self, output, is_active, buffer):
        """Merge the splits of this CTA's 8 columns of each chunk of the attention output.

        Splits without keys have no partial result and are not polled: polling them would keep L2
        busy and delay the partial results of other splits.
        """
        WIDTH: gl.constexpr = self.num_heads * self.dim
        C: gl.constexpr = merge_groups(WIDTH, self.num_kv_heads, self.rows)
        S: gl.constexpr = num_splits(self.num_kv_heads)
        N: gl.constexpr = C * S // 256
        row, chunk, split = self.merge_indices()
        group = chunk * NUM_CTAS + self.qkv.cta
        partials = self.partial_address(
            buffer, row, gl.minimum(group, num_output_groups(WIDTH) - 1), split
        )
        addresses = partials.to(gl.int64)
        found = gl.inline_asm_elementwise(
            poll_partials_asm(N), registers(10 * N, 2 * N, N),
            [addresses, addresses * 0 + self.qkv.flag.to(gl.int64), is_active],
            words_type(10), False, N,
        )  # fmt: skip
        # `found` is an operand so that the partials are cleared after they have been polled.
        gl.inline_asm_elementwise(
            clear_partials_asm(), "=r,l,r,r", [addresses, is_active, found[0]], gl.int32, False, 1
        )
        max_score = bits_to_float(found[8])
        rescale = gl.exp2(max_score - gl.expand_dims(gl.max(max_score, 1), 1))
        denominator = gl.sum(bits_to_float(found[9]) * rescale, 1)
        denominator = gl.where(denominator > 0.0, denominator, 1.0)  # padding rows have no keys
        sums = ()
        for n in gl.static_range(8):
            sums = sums + (gl.sum(bits_to_float(found[n]) * rescale, 1) / denominator,)
        # The first two threads of an 8-column group store the two copies of the output; the next
        # two clear the copies in the previous buffer.
        previous = gl.where(buffer == 0, NUM_BUFFERS - 1, buffer - 1)
        copy = gl.where(split < 2, buffer, previous) * 2 + split % 2
        words = ()
        for n in gl.static_range(4):
            word = gl.expand_dims(pack(sums[2 * n], sums[2 * n + 1]), 1)
            words = words + (word | gl.where(split < 2, 0, -1),)
        offset = (copy * self.rows + row) * output.size + group * 8
        is_ours = gl.where((split < 4) & (group < WIDTH // 8), 1, 0)
        gl.inline_asm_elementwise(
            store_eight_asm(), "=r,l,r,r,r,r,r",
            ((output.memory + offset).to(gl.int64),) + words + (is_ours,), gl.int32, False, 1,
        )  # fmt: skip
