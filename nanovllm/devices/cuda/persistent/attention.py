"""The attention of the persistent step: a program has some keys of one kv head, then joins splits.

See docs/persistent-step.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.exchange import (
    CHUNK,
    KEEP,
    NO_SCORE,
    NUM_PROGRAMS,
    PREFETCH,
    S2,
    S3,
    Exchange,
    bits_to_float,
    high,
    low,
    poll_asm,
    poll_partials_asm,
    prefetch,
    registers,
    thread_index,
    words_type,
)
from nanovllm.devices.cuda.persistent.products import rows_asm
from nanovllm.devices.cuda.persistent.sizes import (
    head_layout,
    head_rows,
    join_layout,
    joined_chunks,
    key_layout,
    num_partials,
    num_splits,
    power_of_two,
    split_layout,
    value_layout,
)

STORE = gl.constexpr(
    f"{{ .reg .b64 k; .reg .pred p; {KEEP.value} setp.ne.u32 p, $5, 0; "
    "@p st.relaxed.gpu.global.L2::cache_hint.v4.b32 [$1], {$2, $3, $4, $2}, k; mov.u32 $0, 0; }"
)


@gluon.jit
def eight_words(t, SEGMENTS: gl.constexpr):
    """The 8 words that each thread has of keys or queries, as tensors of one word."""
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
    """Masked keys are multiplied by zero, which NaN and infinity would survive."""
    return gl.where(x * 0.0 == 0.0, x, 0.0)


@gluon.jit
def store_partial(places, total, best, weight, is_there):
    gl.inline_asm_elementwise(
        STORE, "=r,l,r,r,r,r", [places, total, best, weight, is_there], gl.int32, False, 1
    )


@aggregate
class Attention:
    """A program's keys: from `first` on, a multiple of 32, to `end`, of its kv head.

    Caches are [blocks, block size, kv heads, dim] and hold two numbers in an element.
    """

    table: gl.tensor  # the sequence's line of the block table
    partials: gl.tensor  # [buffers, columns / 8, splits, 8, 4 words]
    qkv: Exchange
    first: gl.tensor
    end: gl.tensor
    oldest: gl.tensor  # the first key that the window shows
    num_active: gl.tensor  # programs of a kv head that have keys
    position: gl.tensor  # of the token that runs
    num_heads: gl.constexpr
    num_kv_heads: gl.constexpr
    dim: gl.constexpr
    block_size: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, table, partials, qkv, first, end, oldest, num_active, position, shape, block_size
    ):
        self.table, self.partials, self.qkv = table, partials, qkv
        self.first, self.end, self.oldest, self.position = first, end, oldest, position
        self.num_active = num_active
        self.num_heads = gl.constexpr(shape.num_heads)
        self.num_kv_heads = gl.constexpr(shape.num_kv_heads)
        self.dim, self.block_size = gl.constexpr(shape.head_dim), gl.constexpr(block_size)

    @gluon.jit
    def head(self):
        return self.qkv.sm // num_splits(self.num_kv_heads)

    @gluon.jit
    def find(self, key):
        """The place of a key in every layer's cache; a tile of 32 keys lies in one block."""
        block = gl.load(self.table + key // self.block_size, mask=key < self.end, other=0)
        line = block * self.block_size + key % self.block_size
        return (line * self.num_kv_heads + self.head()) * (self.dim // 2)

    @gluon.jit
    def key_index(self):
        """Which keys of a tile a thread has: [4, 8]."""
        K: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, key_layout()))
        row = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, K)), 1)
        return row * 8 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, K)), 0)

    @gluon.jit
    def value_index(self):
        """Which values of a tile a thread has: [8, 4]."""
        V: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(0, value_layout(self.dim)))
        row = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, V)), 1)
        return row * 4 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, V)), 0)

    @gluon.jit
    def load_tile(self, k_cache, v_cache, place, num_keys):
        """Load the first of up to 32 keys and values that lie there."""
        LINE: gl.constexpr = self.num_kv_heads * (self.dim // 2)
        KW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, key_layout()))
        segment = gl.expand_dims(gl.arange(0, self.dim // 64, gl.SliceLayout(1, KW)) * 32, 1)
        word = segment + gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, KW)), 0)
        word = gl.expand_dims(gl.expand_dims(word, 0), 0)
        key = gl.expand_dims(gl.expand_dims(self.key_index(), 2), 3)
        k = gl.load(k_cache + place + key * LINE + word, mask=key < num_keys, other=0)
        VW: gl.constexpr = gl.SliceLayout(
            0, gl.SliceLayout(0, gl.SliceLayout(0, value_layout(self.dim)))
        )
        word = gl.expand_dims(gl.expand_dims(gl.arange(0, self.dim // 2, VW), 0), 0)
        key = gl.expand_dims(self.value_index(), 2)
        v = gl.load(v_cache + place + key * LINE + word, mask=key < num_keys, other=0)
        return k, v

    @gluon.jit
    def prefetch(self, k_cache, v_cache, place):
        """Ask for a tile."""
        line = thread_index() % 32 * (self.num_kv_heads * (self.dim // 2))
        part = thread_index() // 32 % (self.dim // 64) * 32
        cache = gl.where(thread_index() < 128, k_cache, v_cache)
        prefetch(cache + place + line + part, PREFETCH)

    @gluon.jit
    def row(self):
        """Which of the lines a thread has."""
        T: gl.constexpr = head_layout(self.num_heads // self.num_kv_heads)
        ROWS: gl.constexpr = head_rows(self.num_heads // self.num_kv_heads)
        return gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, T)), 1)

    @gluon.jit
    def column(self):
        """Words of half a head."""
        T: gl.constexpr = head_layout(self.num_heads // self.num_kv_heads)
        return gl.expand_dims(gl.arange(0, self.dim // 4, gl.SliceLayout(0, T)), 0)

    @gluon.jit
    def load_turn(self, rope):
        """Cosines and sines of the position, two neighbors of each."""
        at = rope + self.column() * 2 + 0 * self.row()
        HALF: gl.constexpr = self.dim // 2
        return gl.load(at), gl.load(at + 1), gl.load(at + HALF), gl.load(at + HALF + 1)

    @gluon.jit
    def load_norms(self, norms):
        """The weights of q's norm or k's, of either half of a head."""
        GROUP: gl.constexpr = self.num_heads // self.num_kv_heads
        at = norms + gl.where(self.row() < GROUP, 0, self.dim // 2) + self.column()
        return gl.load(at), gl.load(at + self.dim // 4)

    @gluon.jit
    def allocate_lines(self):
        """Shared memory for what `turn_heads` makes: the group's queries, its key, its value."""
        ROWS: gl.constexpr = head_rows(self.num_heads // self.num_kv_heads)
        return gl.allocate_shared_memory(gl.bfloat16, [ROWS, self.dim], S2)

    @gluon.jit
    def turn_heads(self, lines, norms, turn, parameters, now):
        """Wait for this group's q, k and v, normalize and turn them."""
        qkv = self.qkv.place(now)
        G: gl.constexpr = self.num_heads // self.num_kv_heads
        D: gl.constexpr = self.dim
        r, h = self.row(), self.head()
        kv_head = self.num_heads + h + gl.where(r == G, 0, self.num_kv_heads)
        places = gl.where(r < G, h * G + r, kv_head) * D + self.column() * 2
        places = (qkv + places).to(gl.int64)
        a, b = gl.inline_asm_elementwise(  # a thread has two neighbors of either half
            poll_asm(2, D, 1), registers(2, 2),
            [places, places * 0 + self.qkv.flag.to(gl.int64)], words_type(2), False, 1,
        )  # fmt: skip
        a0, a1, b0, b1 = low(a), high(a), low(b), high(b)
        factor = gl.where(r < G, parameters.scale, 1.0)
        if parameters.has_norm:
            square = gl.sum(a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1, 1)
            factor = factor * gl.expand_dims(gl.rsqrt(square / D + parameters.eps), 1)
        n0, n1, m0, m1 = a0 * factor, a1 * factor, b0 * factor, b1 * factor
        if parameters.has_norm:
            wa, wb = norms
            n0, n1, m0, m1 = n0 * low(wa), n1 * high(wa), m0 * low(wb), m1 * high(wb)
        c0, c1, s0, s1 = turn
        is_v = r > G
        x0, x1 = gl.where(is_v, a0, n0 * c0 - m0 * s0), gl.where(is_v, a1, n1 * c1 - m1 * s1)
        y0, y1 = gl.where(is_v, b0, m0 * c0 + n0 * s0), gl.where(is_v, b1, m1 * c1 + n1 * s1)
        both = gl.join(gl.join(x0, x1), gl.join(y0, y1))  # [rows, dim / 4, 2, half]
        both = gl.reshape(gl.permute(both, [0, 3, 1, 2]), [head_rows(G), D])
        lines.store(finite(both).to(gl.bfloat16))

    @gluon.jit
    def attend(self, lines, k_cache, v_cache, k, v, later_k, later_v, now):
        """Weigh this program's values, hand the sums on, and store the new key and value."""
        G: gl.constexpr = self.num_heads // self.num_kv_heads
        GP: gl.constexpr = power_of_two(G)
        SEGMENTS: gl.constexpr = self.dim // 64
        KL: gl.constexpr = key_layout()
        VL: gl.constexpr = value_layout(self.dim)
        words = lines._reinterpret(gl.int32, [head_rows(G), SEGMENTS, 32], S3)
        q = gl.expand_dims(words.slice(0, 8).load(gl.SliceLayout(0, KL)), 0)
        q = eight_words(q + gl.zeros([4, 8, SEGMENTS, 32], gl.int32, KL), SEGMENTS)
        scores = gl.allocate_shared_memory(gl.float32, [SEGMENTS * 8, 8, 4], S3)
        best = gl.full([GP, 8], NO_SCORE, gl.float32, gl.SliceLayout(2, gl.SliceLayout(3, VL)))
        weight = gl.zeros([GP, 8], gl.float32, gl.SliceLayout(2, gl.SliceLayout(3, VL)))
        even = gl.zeros([GP, 8, self.dim // 2], gl.float32, gl.SliceLayout(2, VL))
        odd = even
        # Two tiles take turns: while one is used, the other is on its way into the same registers.
        place, later_place = self.find(self.first + 64), self.find(self.first + 96)
        for begin in range(self.first, self.end, 64):
            k, v = self.with_new(lines, k, v, begin)
            best, weight, even, odd = self.weigh(scores, q, k, v, begin, best, weight, even, odd)
            if begin + 64 < self.end:
                k, v = self.load_tile(k_cache, v_cache, place, self.end - begin - 64)
                place = self.find(begin + 128)
            if begin + 32 < self.end:
                later_k, later_v = self.with_new(lines, later_k, later_v, begin + 32)
                best, weight, even, odd = self.weigh(
                    scores, q, later_k, later_v, begin + 32, best, weight, even, odd
                )
                if begin + 96 < self.end:
                    later_k, later_v = self.load_tile(
                        k_cache, v_cache, later_place, self.end - begin - 96
                    )
                    later_place = self.find(begin + 160)
        self.hand_on(gl.reshape(gl.join(even, odd), [GP, 8, self.dim]), best, weight, now)

    @gluon.jit
    def with_new(self, lines, k, v, begin):
        """Put the new key and value into their tile: the cache may not have them yet."""
        if (self.position >= begin) & (self.position < begin + 32):
            G: gl.constexpr = self.num_heads // self.num_kv_heads
            ROWS: gl.constexpr = head_rows(G)
            words = lines._reinterpret(gl.int32, [ROWS, self.dim // 64, 32], S3)
            new_k = gl.expand_dims(words.slice(G, 1).load(gl.SliceLayout(0, key_layout())), 0)
            is_new = self.key_index() == self.position - begin
            k = gl.where(gl.expand_dims(gl.expand_dims(is_new, 2), 3), new_k, k)
            L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, value_layout(self.dim)))
            wide = lines._reinterpret(gl.int32, [ROWS, self.dim // 2], S2)
            new_v = gl.expand_dims(wide.slice(G + 1, 1).load(L), 0)
            is_new = self.value_index() == self.position - begin
            v = gl.where(gl.expand_dims(is_new, 2), new_v, v)
        return k, v

    @gluon.jit
    def weigh(self, scores, q, k, v, begin, best, weight, even, odd):
        """Add a tile of values to the sums, weighed by the softmax of their keys' scores."""
        GP: gl.constexpr = power_of_two(self.num_heads // self.num_kv_heads)
        VL: gl.constexpr = value_layout(self.dim)
        SEGMENTS: gl.constexpr = self.dim // 64
        self.score(scores, q, eight_words(k, SEGMENTS))
        s = scores.slice(0, GP).load(gl.SliceLayout(3, VL))  # [heads, 8, 4]
        if SEGMENTS == 2:
            s += scores.slice(8, GP).load(gl.SliceLayout(3, VL))
        K: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, VL))
        key = gl.convert_layout(self.value_index(), K, assert_trivial=True)
        is_seen = (key < self.end - begin) & (key >= self.oldest - begin)
        s = gl.where(gl.expand_dims(is_seen, 0), s, float("-inf"))
        new_best = gl.maximum(best, gl.max(s, 2))
        fade, p = gl.exp2(best - new_best), gl.exp2(s - gl.expand_dims(new_best, 2))
        weight = weight * fade + gl.sum(p, 2)
        F: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(2, VL))
        fade = gl.expand_dims(gl.convert_layout(fade, F), 2)
        value, p = gl.expand_dims(v, 0), gl.expand_dims(p, 3)
        even = even * fade + gl.sum(p * low(value), 2)
        odd = odd * fade + gl.sum(p * high(value), 2)
        return new_best, weight, even, odd

    @gluon.jit
    def store_new(self, lines, k_cache, v_cache, place):
        """Store the new key and value, if they are this program's."""
        is_here = (self.position >= self.first) & (self.position < self.end)
        if is_here & (self.head() < self.num_kv_heads):
            G: gl.constexpr = self.num_heads // self.num_kv_heads
            W: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
            wide = lines._reinterpret(gl.int32, [head_rows(G), self.dim // 2], S2)
            i = gl.expand_dims(gl.arange(0, self.dim // 2, gl.SliceLayout(0, W)), 0)
            gl.store(k_cache + place + i, wide.slice(G, 1).load(W))
            gl.store(v_cache + place + i, wide.slice(G + 1, 1).load(W))

    @gluon.jit
    def score(self, scores, q, k):
        """Multiply queries and keys: each warp has 8 keys and 64 of the dimensions."""
        SEGMENTS: gl.constexpr = self.dim // 64
        asm: gl.constexpr = "=f,=f" + ",r" * 16
        types: gl.constexpr = (gl.float32, gl.float32)
        even, odd = gl.inline_asm_elementwise(rows_asm(), asm, q + k, types, True, 1)
        pairs = gl.permute(gl.join(even, odd), [2, 1, 0, 3, 4])  # [segments, 8 heads, 4, 4, 2]
        scores.store(gl.reshape(pairs, [SEGMENTS * 8, 8, 4]))

    @gluon.jit
    def hand_on(self, sums, best, weight, now):
        """Join the warps, and store this split's part for the programs that join the splits.

        No value is stored by two threads: the second could come after its reader has emptied it.
        """
        G: gl.constexpr = self.num_heads // self.num_kv_heads
        GP: gl.constexpr = power_of_two(G)
        D: gl.constexpr = self.dim
        S: gl.constexpr = num_splits(self.num_kv_heads)
        J: gl.constexpr = join_layout(GP)
        of_sums = gl.allocate_shared_memory(gl.float32, [GP, 8, D], S3)
        of_best = gl.allocate_shared_memory(gl.float32, [GP, 8], S2)
        of_weight = gl.allocate_shared_memory(gl.float32, [GP, 8], S2)
        of_sums.store(sums)
        of_best.store(best)
        of_weight.store(weight)
        each = of_best.load(gl.SliceLayout(2, J))
        best = gl.max(each, 1)
        share = gl.exp2(each - gl.expand_dims(best, 1))
        weight = gl.sum(of_weight.load(gl.SliceLayout(2, J)) * share, 1)
        total = gl.sum(of_sums.load(J) * gl.expand_dims(share, 2), 1)  # [heads, dim]
        R: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, J))
        best = gl.expand_dims(gl.convert_layout(best, R), 1) + 0.0 * total
        weight = gl.expand_dims(gl.convert_layout(weight, R), 1) + 0.0 * total
        g = gl.expand_dims(gl.arange(0, GP, R), 1)
        d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, J))), 0)
        column = (self.head() * G + g) * D + d
        at = ((column // 8) * S + self.qkv.sm % S) * 8 + column % 8
        at = at + now * num_partials(self.num_heads * D, self.num_kv_heads)
        store_partial(
            (self.partials + at * 4).to(gl.int64),
            total.to(gl.int32, bitcast=True),
            best.to(gl.int32, bitcast=True),
            weight.to(gl.int32, bitcast=True),
            gl.where((g < G) & (d >= 0), 1, 0),
        )

    @gluon.jit
    def join(self, output, now):
        """Join the splits of this program's 8 columns of each chunk of attention's output.

        Those without keys have stored nothing, and nobody polls for them: the less is polled, the
        sooner the others' sums are there.
        """
        WIDTH: gl.constexpr = self.num_heads * self.dim
        S: gl.constexpr = num_splits(self.num_kv_heads)
        C: gl.constexpr = joined_chunks(WIDTH, self.num_kv_heads)
        B: gl.constexpr = split_layout(self.num_kv_heads)
        N: gl.constexpr = C * S // 32 if C * S < 128 else 4  # polled together
        chunk = gl.arange(0, C, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
        split = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
        line = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
        at = ((chunk * NUM_PROGRAMS + self.qkv.sm) * S + split) * 8 + line
        at = at + now * num_partials(WIDTH, self.num_kv_heads)
        places = (self.partials + at * 4).to(gl.int64)
        line = chunk * CHUNK + self.qkv.sm * 8 + line
        is_there = gl.where((split < self.num_active) & (line < WIDTH), 1, 0)
        total, best, weight = gl.inline_asm_elementwise(
            poll_partials_asm(N), registers(3 * N, 2 * N, N),
            [places, places * 0 + self.qkv.flag.to(gl.int64), is_there], words_type(3), False, N,
        )  # fmt: skip
        empty = total | -1  # of what was polled, so that it is stored afterwards
        store_partial(places, empty, empty, empty, is_there)
        share = bits_to_float(best)
        share = gl.exp2(share - gl.expand_dims(gl.max(share, 1), 1))
        y = gl.sum(bits_to_float(total) * share, 1) / gl.sum(bits_to_float(weight) * share, 1)
        output.store(gl.expand_dims(y, 1), split, line, line >= 0, now)
