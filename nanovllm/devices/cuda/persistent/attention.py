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


@gluon.jit
def pack(a, b):
    """Pack two float32 into a word of two bfloat16."""
    return gl.inline_asm_elementwise(PACK, "=r,f,f", [a, b], gl.int32, True, 1)


@gluon.jit
def eight_words(t, SEGMENTS: gl.constexpr):
    """Split keys or queries, 8 words per thread, into 8 tensors of one word per thread.

    SEGMENTS is head_dim / 64, here and below.
    """
    a, b = gl.split(gl.reshape(t, [4, 8, SEGMENTS, 4, 4, 2]))
    a0, a2 = gl.split(gl.reshape(a, [4, 8, SEGMENTS, 4, 2, 2]))
    b1, b3 = gl.split(gl.reshape(b, [4, 8, SEGMENTS, 4, 2, 2]))
    w0, w4 = gl.split(a0)
    w2, w6 = gl.split(a2)
    w1, w5 = gl.split(b1)
    w3, w7 = gl.split(b3)
    return w0, w1, w2, w3, w4, w5, w6, w7


@gluon.jit
def finite(x):
    """Replace NaN and infinity by 0: either one times 0, a masked key's probability, is NaN."""
    return gl.where(x * 0.0 == 0.0, x, 0.0)


MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


@gluon.constexpr_function
def score_asm():
    """Return PTX that computes Q K^T for 8 queries and 8 keys.

    A thread gets the scores of one query and two keys. Operands are the two scores, 8 words of
    queries and 8 words of keys.
    """
    code = "{ .reg .f32 c<4>; .reg .b32 z; mov.b32 z, 0; "
    code += "".join(f"mov.f32 c{i}, 0f00000000; " for i in range(4))
    for j in range(4):
        q, k = 2 + 2 * j, 10 + 2 * j
        code += f"{MMA} {{c0, c1, c2, c3}}, {{${q}, z, ${q + 1}, z}}, {{${k}, ${k + 1}}}, "
        code += "{c0, c1, c2, c3}; "
    return code + "mov.f32 $0, c0; mov.f32 $1, c1; }"


@gluon.constexpr_function
def add_values_asm():
    """Return PTX that adds P V of 32 keys to the sums of 8 heads.

    A thread has two columns of 8 value vectors. Operands are the new sums (two for even columns,
    two for odd ones), the old sums, four pairs of probabilities, and a word of each value vector.
    """
    code = "{ .reg .f32 c<4>; .reg .b32 z, l, h; mov.b32 z, 0; "
    for t in range(2):
        code += f"mov.f32 c0, ${4 + 2 * t}; mov.f32 c1, ${5 + 2 * t}; "
        code += "mov.f32 c2, 0f00000000; mov.f32 c3, 0f00000000; "
        for s in range(2):
            p, v, halves = 8 + 2 * s, 12 + 4 * s, ("0x5410", "0x7632")[t]
            code += f"prmt.b32 l, ${v}, ${v + 1}, {halves}; "
            code += f"prmt.b32 h, ${v + 2}, ${v + 3}, {halves}; "
            code += f"{MMA} {{c0, c1, c2, c3}}, {{${p}, z, ${p + 1}, z}}, {{l, h}}, "
            code += "{c0, c1, c2, c3}; "
        code += f"mov.f32 ${2 * t}, c0; mov.f32 ${2 * t + 1}, c1; "
    return code + "}"


@gluon.constexpr_function
def load_values_asm(stride):
    """Return PTX that loads a word of each of 8 value vectors, `stride` bytes apart.

    The last operand is the number of valid vectors; the words of invalid vectors are zero.
    """
    code = "{ .reg .pred p; "
    for j in range(8):
        code += f"mov.b32 ${j}, 0; setp.gt.s32 p, $9, {j}; "
        code += f"@p ld.global.b32 ${j}, [$8 + {j * stride}]; "
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

    Caches are [blocks, block size, KV heads, dim / 2] words of two bfloat16.
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
    def find(self, segment, key):
        """Return the offset of a key in a layer's cache, in words.

        An aligned run of 32 keys lies in one KV-cache block, so the offset of its first key also
        locates the others.
        """
        table = self.tables + segment.slot * self.table_width
        block = gl.load(table + key // self.block_size, mask=key < segment.end, other=0)
        token = block * self.block_size + key % self.block_size
        return (token * self.num_kv_heads + segment.head) * (self.dim // 2)

    @gluon.jit
    def key_index(self):
        """Return the indices of 32 keys, as a tensor [4, 8] in the layout of the keys."""
        K: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, key_layout()))
        row = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, K)), 1)
        return row * 8 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, K)), 0)

    @gluon.jit
    def load_keys(self, cache, offset, num_keys):
        """Load 32 keys at an offset of the cache; those with an index >= `num_keys` are 0."""
        STRIDE: gl.constexpr = self.num_kv_heads * (self.dim // 2)
        KW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, key_layout()))
        segment = gl.expand_dims(gl.arange(0, self.dim // 64, gl.SliceLayout(1, KW)) * 32, 1)
        word = segment + gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, KW)), 0)
        word = gl.expand_dims(gl.expand_dims(word, 0), 0)
        key = gl.expand_dims(gl.expand_dims(self.key_index(), 2), 3)
        return gl.load(cache + (offset + (key * STRIDE + word)), mask=key < num_keys, other=0)

    @gluon.jit
    def load_values(self, cache, offset, num_keys):
        """Load 32 value vectors at an offset of the cache; those with an index >= `num_keys` are 0.

        A thread gets a word of each of 8 value vectors, and a warp 16 dimensions of all 32 vectors.
        """
        STRIDE: gl.constexpr = self.num_kv_heads * (self.dim // 2)
        warp, n, q = thread_indices()
        word = warp % (self.dim // 16) * 8 + n
        addresses = (cache + (offset + (q * (8 * STRIDE) + word))).to(gl.int64)
        return gl.inline_asm_elementwise(
            load_values_asm(4 * STRIDE), registers(8, 1, 1),
            [addresses, num_keys - 8 * q + 0 * word], words_type(8), True, 1,
        )  # fmt: skip

    @gluon.jit
    def prefetch(self, k_cache, v_cache, offset):
        """Prefetch 32 keys and values into L2."""
        key = thread_index() % 32 * (self.num_kv_heads * (self.dim // 2))
        part = thread_index() // 32 % (self.dim // 64) * 32
        cache = gl.where(thread_index() < 128, k_cache, v_cache)
        prefetch(cache + (offset + (key + part)))

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
        """Allocate shared memory for the output of `rotate_heads`: queries, new keys and values."""
        N: gl.constexpr = num_head_vectors(self.group, self.new)
        return gl.allocate_shared_memory(gl.bfloat16, [N, self.dim], S2)

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
        both = gl.join(gl.join(x0, x1), gl.join(y0, y1))  # [vectors, dim / 4, 2, half]
        both = gl.reshape(gl.permute(both, [0, 3, 1, 2]), [VECTORS, D])
        heads.store(finite(both).to(gl.bfloat16))

    @gluon.jit
    def find_unit(self, segment, begin):
        """Return the cache offsets of a unit's first and last 32 keys."""
        return self.find(segment, begin), self.find(segment, begin + 32)

    @gluon.jit
    def load_unit_keys(self, segment, begin, offsets, cache):
        count = segment.end - begin
        first = self.load_keys(cache, offsets[0], count)
        return first, self.load_keys(cache, offsets[1], count - 32)

    @gluon.jit
    def load_unit_values(self, segment, begin, offsets, cache):
        count = segment.end - begin
        first = self.load_values(cache, offsets[0], count)
        return first, self.load_values(cache, offsets[1], count - 32)

    @gluon.jit
    def prefetch_unit(self, offsets, k_cache, v_cache):
        self.prefetch(k_cache, v_cache, offsets[0])
        self.prefetch(k_cache, v_cache, offsets[1])

    @gluon.jit
    def attend(self, segment, heads, k_cache, v_cache, skip, k, v, buffer):
        """Attend to the keys of a segment, and store the partial result of each split.

        k and v are the keys and values of the first unit. The next unit is loaded into the same
        registers while the current one is processed. The same unit of the next layer, `skip` words
        later in the cache, is prefetched into L2.
        """
        SEGMENTS: gl.constexpr = self.dim // 64
        KL: gl.constexpr = key_layout()
        N: gl.constexpr = num_head_vectors(self.group, self.new)
        words = heads._reinterpret(gl.int32, [N, SEGMENTS, 32], S3)
        q = gl.expand_dims(words.slice(0, 8).load(gl.SliceLayout(0, KL)), 0)
        q = eight_words(q + gl.zeros([4, 8, SEGMENTS, 32], gl.int32, KL), SEGMENTS)
        scores = gl.allocate_shared_memory(gl.float32, [2 * SEGMENTS, 8, 4, 8], S4)
        max_score, denominator, sums = empty_softmax()
        for begin in range(segment.first, segment.end, UNIT):
            after = begin + UNIT
            offsets = self.find_unit(segment, after)
            if segment.position - segment.before < after:
                k, v = self.with_new(segment, heads, k, v, begin)
                if segment.position < after:
                    self.store_new(segment, heads, k_cache, v_cache)
            self.score(scores, q, k)
            if after < segment.end:
                k = self.load_unit_keys(segment, after, offsets, k_cache)
                self.prefetch_unit(offsets, k_cache + skip, v_cache + skip)
            max_score, denominator, sums = self.update_softmax(
                segment, scores, v, begin, max_score, denominator, sums
            )
            if after < segment.end:
                v = self.load_unit_values(segment, after, offsets, v_cache)
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
        K: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, key_layout()))
        keys = heads._reinterpret(gl.int32, [N, self.dim // 64, 32], S2)
        values = heads._reinterpret(gl.int32, [N, 8 // COPIES, 8], S2)
        for j in range(segment.before + 1):
            key = segment.position - segment.before + j - begin
            new_k = keys.index(self.group + j).load(K)
            new_k = gl.expand_dims(gl.expand_dims(new_k, 0), 0)
            new_v = values.index(self.group + self.new + j).load(gl.SliceLayout(0, V))
            new_v = gl.expand_dims(new_v, 0) + gl.zeros([COPIES, 8 // COPIES, 8], gl.int32, V)
            new_v = gl.convert_layout(gl.reshape(new_v, [8, 8]), gl.SliceLayout(2, ONE))
            new_v = gl.expand_dims(new_v, 2)
            with_k, with_v = (), ()
            for i in gl.static_range(2):
                is_new = gl.expand_dims(gl.expand_dims(self.key_index() == key - 32 * i, 2), 3)
                with_k = with_k + (gl.where(is_new, new_k, k[i]),)
                words, index_in_thread = (), key - 32 * i - quad_lane() * 8
                for n in gl.static_range(8):
                    words = words + (gl.where(index_in_thread == n, new_v, v[i][n]),)
                with_v = with_v + (words,)
            k, v = with_k, with_v
        return k, v

    @gluon.jit
    def score(self, scores, q, k):
        """Compute Q K^T of a unit: each warp handles 8 of every 32 keys, and 64 dimensions."""
        SEGMENTS: gl.constexpr = self.dim // 64
        operands: gl.constexpr = "=f,=f" + ",r" * 16
        found = ()
        for i in gl.static_range(2):
            words = q + eight_words(k[i], SEGMENTS)
            even, odd = gl.inline_asm_elementwise(
                score_asm(), operands, words, floats_type(2), True, 1
            )
            found = found + (gl.join(even, odd),)
        # [4, 8 heads, dim / 64, 4, 2 keys, 2 halves of the unit]
        pairs = gl.permute(stacked(found), [5, 2, 1, 0, 3, 4])
        scores.store(gl.reshape(pairs, [2 * SEGMENTS, 8, 4, 8]))

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
    def update_softmax(self, segment, scores, v, begin, max_score, denominator, sums):
        """Update the online softmax with the scores and values of a unit."""
        s = self.scores_of(segment, scores, begin, 0), self.scores_of(segment, scores, begin, 1)
        new_max = gl.maximum(max_score, gl.max(gl.max(gl.maximum(s[0], s[1]), 2), 1))
        rescale = gl.exp2(max_score - new_max)
        rescaled = ()
        for n in gl.static_range(4):
            rescaled = rescaled + (sums[n] * broadcast_heads(rescale),)
        sums = rescaled
        total = gl.zeros([8, 4, 8], gl.float32, SCORES)
        for i in gl.static_range(2):
            p = gl.exp2(s[i] - gl.expand_dims(gl.expand_dims(new_max, 1), 2))
            total += p
            sums = self.add_values(sums, p, v[i])
        return new_max, denominator * rescale + gl.sum(gl.sum(total, 2), 1), sums

    @gluon.jit
    def add_values(self, sums, p, v):
        """Add P V for 32 keys to the sums of 8 heads: each warp handles 16 dimensions."""
        p = unpacked(gl.expand_dims(p, 0) + gl.zeros([8, 8, 4, 8], gl.float32, TILE), 8)
        probabilities = ()
        for n in gl.static_range(4):
            probabilities = probabilities + (pack(p[2 * n], p[2 * n + 1]),)
        operands: gl.constexpr = "=&f,=&f,=&f,=&f,f,f,f,f" + ",r" * 12
        return gl.inline_asm_elementwise(
            add_values_asm(), operands, sums + probabilities + v, floats_type(4), True, 1
        )

    @gluon.jit
    def store_new(self, segment, heads, k_cache, v_cache):
        """Store the row's new key and value in the cache."""
        N: gl.constexpr = num_head_vectors(self.group, self.new)
        W: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        wide = heads._reinterpret(gl.int32, [N, self.dim // 2], S1)
        i = self.find(segment, segment.position) + gl.arange(0, self.dim // 2, W)
        vector = self.group + segment.before
        gl.store(k_cache + i, wide.index(vector).load(W))
        gl.store(v_cache + i, wide.index(vector + self.new).load(W))

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
