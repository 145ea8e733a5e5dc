"""A whole decode step of one sequence as one kernel: the phases of a layer, and who loads for them.

128 programs stay on a multiprocessor each. One warp of a program asks for its weights, eight do
everything else. docs/persistent-step.md has the picture.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from nanovllm.kernels.cuda.persistent_attention import Attention
from nanovllm.kernels.cuda.persistent_exchange import (
    CHUNK,
    NUM_BUFFERS,
    PREFETCH_AND_KEEP,
    S3,
    Exchange,
    block_index,
    fence,
    line_index,
    prefetch,
    thread_index,
)
from nanovllm.kernels.cuda.persistent_sizes import (
    blocks_at_once,
    group_tiles,
    head_blocks_at_once,
    num_blocks,
    num_chunks,
    num_head_blocks,
    num_splits,
)
from nanovllm.kernels.cuda.persistent_stream import (
    LANES,
    NUM_USED,
    RING,
    RING_WORDS,
    Stream,
    add_up,
    spread,
    total,
)


@aggregate
class Parameters:
    """The small ones; hidden sizes are padded to whole chunks."""

    norms: gl.tensor  # [layers, 2, hidden], four bfloat16 in an element
    final_norm: gl.tensor
    qk_norms: gl.tensor  # [layers, 2, dim], two bfloat16 in an element
    qkv_bias: gl.tensor  # [layers, q + k + v]
    rope: gl.tensor  # this position's cosines and sines
    eps: gl.tensor
    scale: gl.tensor  # of the scores, for powers of two
    has_bias: gl.constexpr
    gate_linear: gl.constexpr  # gate * sigmoid(gate * (linear + cubic * gate * gate))
    gate_cubic: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, norms, final_norm, qk_norms, qkv_bias, rope, eps, scale, has_bias, gate_linear,
        gate_cubic,
    ):  # fmt: skip
        self.norms, self.final_norm, self.qk_norms = norms, final_norm, qk_norms
        self.qkv_bias, self.rope, self.eps, self.scale = qkv_bias, rope, eps, scale
        self.has_bias = gl.constexpr(has_bias)
        self.gate_linear, self.gate_cubic = gl.constexpr(gate_linear), gl.constexpr(gate_cubic)


@aggregate
class Exchanges:
    """What programs hand each other in a layer."""

    x: Exchange  # the residual before attention
    qkv: Exchange
    attended: Exchange
    y: Exchange  # the residual before the MLP
    gated: Exchange

    @gluon.constexpr_function
    def __init__(self, x, qkv, attended, y, gated):
        self.x, self.qkv, self.attended, self.y, self.gated = x, qkv, attended, y, gated


@gluon.jit
def next_buffer(now):
    return gl.where(now == NUM_BUFFERS - 1, 0, now + 1)


@gluon.jit
def project_qkv(stream, t, g, given, norm, parameters, layer, now, x_now):
    """x -> q, k and v."""
    B: gl.constexpr = num_blocks(given.qkv.width)
    C: gl.constexpr = num_chunks(given.x.width)
    N: gl.constexpr = blocks_at_once(B, C)
    held = stream.grab_early(t, g, B, C)
    x, factor = given.x.take_normed(x_now, norm, parameters.eps)
    for i in range(B // N):
        sums = stream.products(t, g, held, x, N, C, stream.flying)
        y = add_up(stream.sums, sums, 0, N) * factor
        if parameters.has_bias:
            line = (i * N + block_index()) * CHUNK + stream.sm * 8 + line_index()
            is_ours = (block_index() < N) & (line < given.qkv.width)
            bias = parameters.qkv_bias + layer * given.qkv.width + line
            y += gl.load(bias, mask=is_ours, other=0.0).to(gl.float32)
        given.qkv.publish(y, 0, i * N, now, N)
        t += N * C
        g += N * C // group_tiles(N, C)
    return t, g


@gluon.jit
def project_back(stream, t, g, source, target, residual, now, target_now):
    """Add a projection of source to the residual: o after attention, down after the gate."""
    B: gl.constexpr = num_blocks(target.width)
    C: gl.constexpr = num_chunks(source.width)
    N: gl.constexpr = blocks_at_once(B, C)
    held = stream.grab_early(t, g, B, C)
    x = source.take(now)
    for i in range(B // N):
        sums = stream.products(t, g, held, x, N, C, stream.flying)
        added = residual + add_up(stream.sums, sums, i * N, N)
        row = block_index() - i * N
        is_new = (row >= 0) & (row < N)
        residual = gl.where(is_new, added.to(gl.bfloat16).to(gl.float32), residual)
        target.publish(residual, i * N, i * N, target_now, N)
        t += N * C
        g += N * C // group_tiles(N, C)
    return residual, t, g


@gluon.jit
def project_gate_up(stream, t, g, given, norm, parameters, now):
    """y -> the gated values: blocks of gate and up lie in turn."""
    B: gl.constexpr = num_blocks(given.gated.width)
    C: gl.constexpr = num_chunks(given.y.width)
    N: gl.constexpr = blocks_at_once(B, 2 * C)
    held = stream.grab_early(t, g, 2 * B, C)
    x, factor = given.y.take_normed(now, norm, parameters.eps)
    for i in range(B // N):
        sums = stream.products(t, g, held, x, 2 * N, C, stream.flying)
        spread(stream.sums, sums, 0, 0, 2, N)
        spread(stream.more_sums, sums, 0, 1, 2, N)
        gate, up = total(stream.sums) * factor, total(stream.more_sums) * factor
        slope = parameters.gate_linear + parameters.gate_cubic * gate * gate
        given.gated.publish(gate / (1.0 + gl.exp(-gate * slope)) * up, 0, i * N, now, N)
        t += 2 * N * C
        g += 2 * N * C // group_tiles(2 * N, C)
    return t, g


@gluon.jit
def project_logits(stream, t, g, given, parameters, x_now, logits, VOCAB: gl.constexpr):
    C: gl.constexpr = num_chunks(given.x.width)
    N: gl.constexpr = head_blocks_at_once(given.x.width)
    norm = given.x.load_norm(parameters.final_norm)
    x, factor = given.x.take_normed(x_now, norm, parameters.eps)
    for i in range(num_head_blocks(VOCAB, given.x.width) // N):
        sums = stream.products(t, g, (), x, N, C, stream.head_flying)
        y = add_up(stream.sums, sums, 0, N) * factor
        line = (i * N + block_index()) * CHUNK + stream.sm * 8 + line_index()
        gl.store(logits + line, y.to(gl.bfloat16), mask=(block_index() < N) & (line < VOCAB))
        t += N * C
        g += N * C // group_tiles(N, C)


@gluon.jit
def prefetch_layer(given, attention, parameters, k_cache, v_cache, place, layer, later, stride):
    """Ask for what the next layer loads beside its weights, before they crowd memory."""
    skip = (later - layer).to(gl.int64) * stride
    attention.prefetch(k_cache + skip, v_cache + skip, place)
    NORMS: gl.constexpr = 2 * num_chunks(given.x.width)  # elements of a thread
    at = parameters.norms + later * (256 * NORMS)
    prefetch(at + thread_index() * NORMS, PREFETCH_AND_KEEP)
    if attention.has_norm:
        at = parameters.qk_norms + later * attention.dim
        prefetch(at + thread_index() % attention.dim, PREFETCH_AND_KEEP)
    if parameters.has_bias:
        BIAS: gl.constexpr = (given.qkv.width + 255) // 256
        at = gl.minimum(thread_index() * BIAS, given.qkv.width - 1)
        at = parameters.qkv_bias + later * given.qkv.width + at
        prefetch(at, PREFETCH_AND_KEEP)


@gluon.jit
def compute(
    stream, given, attention, parameters, embedding, caches, turns, logits, num_layers,
    VOCAB: gl.constexpr,
):  # fmt: skip
    """What eight warps of a program do."""
    k_caches, v_caches, stride = caches
    now, x_now = gl.load(turns), gl.load(turns + 1)
    D: gl.constexpr = attention.dim
    NORM: gl.constexpr = num_chunks(given.x.width) * 256  # elements of a norm's weight
    line = block_index() * CHUNK + stream.sm * 8 + line_index()
    residual = gl.load(embedding + line, mask=line < given.x.width, other=0.0).to(gl.float32)
    given.x.publish(residual, 0, 0, x_now, 8)
    lines = attention.allocate_lines()
    turn = attention.load_turn(parameters.rope)
    place, new_place = attention.find(attention.first), attention.find(attention.position)
    later_place = attention.find(attention.first + 32)
    t, g = gl.to_tensor(0), gl.to_tensor(0)
    norm = given.x.load_norm(parameters.norms)
    for layer in range(num_layers):
        offset = layer.to(gl.int64) * stride
        k_cache, v_cache = k_caches + offset, v_caches + offset
        later = gl.minimum(layer + 1, num_layers - 1)
        num_keys = attention.end - attention.first
        k, v = attention.load_tile(k_cache, v_cache, place, num_keys)
        qk_norms = attention.load_norms(parameters.qk_norms + layer * D)
        t, g = project_qkv(stream, t, g, given, norm, parameters, layer, now, x_now)
        later_k, later_v = k, v
        if num_keys > 32:
            later_k, later_v = attention.load_tile(k_cache, v_cache, later_place, num_keys - 32)
        prefetch_layer(given, attention, parameters, k_cache, v_cache, place, layer, later, stride)
        if attention.head() < attention.num_kv_heads:
            qkv = given.qkv.place(now)
            attention.turn_heads(lines, qkv, qk_norms, turn, parameters)
            attention.attend(lines, k_cache, v_cache, k, v, later_k, later_v, now)
        attention.join(given.attended, now)
        norm = given.y.load_norm(parameters.norms + (2 * layer + 1) * NORM)
        residual, t, g = project_back(stream, t, g, given.attended, given.y, residual, now, now)
        fence()
        attention.store_new(lines, k_cache, v_cache, new_place)  # when nobody waits for it
        t, g = project_gate_up(stream, t, g, given, norm, parameters, now)
        norm = given.x.load_norm(parameters.norms + later * (2 * NORM))
        x_now = next_buffer(x_now)
        residual, t, g = project_back(stream, t, g, given.gated, given.x, residual, now, x_now)
        now = next_buffer(now)
    project_logits(stream, t, g, given, parameters, x_now, logits, VOCAB)
    if stream.sm == 0:  # the others read them before they had anything to say
        gl.store(turns, now)
        gl.store(turns + 1, next_buffer(x_now))


@gluon.jit
def load(
    stream, qkv, o, gate_up, down, head, num_layers, HIDDEN: gl.constexpr, Q: gl.constexpr,
    QKV: gl.constexpr, MLP: gl.constexpr, VOCAB: gl.constexpr,
):  # fmt: skip
    """What the ninth warp does: ask for tiles, across phases and layers, as slots come free."""
    H: gl.constexpr = num_chunks(HIDDEN)
    A: gl.constexpr = num_chunks(Q)
    M: gl.constexpr = num_chunks(MLP)
    B: gl.constexpr = num_blocks(HIDDEN)
    BQ: gl.constexpr = num_blocks(QKV)
    BM: gl.constexpr = num_blocks(MLP)
    BV: gl.constexpr = num_head_blocks(VOCAB, HIDDEN)
    # tiles in a group
    GQ: gl.constexpr = group_tiles(blocks_at_once(BQ, H), H)
    GO: gl.constexpr = group_tiles(blocks_at_once(B, A), A)
    GG: gl.constexpr = group_tiles(2 * blocks_at_once(BM, 2 * H), H)
    GD: gl.constexpr = group_tiles(blocks_at_once(B, M), M)
    GV: gl.constexpr = group_tiles(head_blocks_at_once(HIDDEN), H)
    F: gl.constexpr = stream.flying
    t, g = gl.to_tensor(0), gl.to_tensor(0)
    owners = gl.zeros([32], gl.int32, LANES)
    for layer in range(num_layers):
        t, g, owners = stream.fetch(qkv, t, g, owners, layer, QKV, BQ, H, 1, GQ, F)
        t, g, owners = stream.fetch(o, t, g, owners, layer, HIDDEN, B, A, 1, GO, F)
        t, g, owners = stream.fetch(gate_up, t, g, owners, layer, MLP, BM, H, 2, GG, F)
        t, g, owners = stream.fetch(down, t, g, owners, layer, HIDDEN, B, M, 1, GD, F)
    stream.fetch(head, t, g, owners, 0, VOCAB, BV, H, 1, GV, stream.head_flying)


@gluon.jit
def make_stream(sm, SLOTS: gl.constexpr, FLYING: gl.constexpr, HEAD_FLYING: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 16, 8, 64], RING)
    words = ring._reinterpret(gl.int32, [SLOTS, 16, 8, 32], RING_WORDS)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [NUM_USED, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(NUM_USED):
        mbarrier.init(used.index(i), count=1)
    sums = gl.allocate_shared_memory(gl.float32, [8, 8, 8], S3)
    more_sums = gl.allocate_shared_memory(gl.float32, [8, 8, 8], S3)
    return Stream(ring, words, full, used, sums, more_sums, sm, SLOTS, FLYING, HEAD_FLYING)


@gluon.jit
def make_attention(
    table, partials, flag, sm, length, position, window, NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Share the keys of each kv head out: whole tiles of 32, each of which lies in one block."""
    SPLITS: gl.constexpr = num_splits(NUM_KV_HEADS)
    oldest = gl.maximum(length - window, 0)
    start = oldest // 32 * 32
    size = (length - start + 32 * SPLITS - 1) // (32 * SPLITS) * 32
    first = start + sm % SPLITS * size
    end = gl.where(sm < SPLITS * NUM_KV_HEADS, gl.minimum(first + size, length), first)
    return Attention(
        table, partials, flag, sm, first, end, oldest, position, NUM_HEADS, NUM_KV_HEADS, DIM,
        BLOCK_SIZE, HAS_NORM,
    )  # fmt: skip


@gluon.jit
def persistent_step(
    qkv, o, gate_up, down, head, embedding, norms, final_norm, qk_norms, qkv_bias, rope,
    k_cache, v_cache, slot, lengths, tokens, tokens_width, block_table, table_width, turns, flag,
    x_memory, qkv_memory, partials, attended_memory, y_memory, gated_memory, logits,
    context_len, layer_stride, num_layers, window, eps, scale,
    HIDDEN: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, MLP: gl.constexpr, VOCAB: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr, GATE_LINEAR: gl.constexpr,
    GATE_CUBIC: gl.constexpr, SLOTS: gl.constexpr, FLYING: gl.constexpr,
    HEAD_FLYING: gl.constexpr,
):  # fmt: skip
    sm = gl.program_id(0)
    Q: gl.constexpr = NUM_HEADS * DIM
    QKV: gl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
    stream = make_stream(sm, SLOTS, FLYING, HEAD_FLYING)
    given = Exchanges(
        Exchange(x_memory, flag, sm, HIDDEN),
        Exchange(qkv_memory, flag, sm, QKV),
        Exchange(attended_memory, flag, sm, Q),
        Exchange(y_memory, flag, sm, HIDDEN),
        Exchange(gated_memory, flag, sm, MLP),
    )
    # A length of 0 is padding: its result is not used, and its key must go nowhere.
    slot = gl.load(slot)
    length = gl.load(lengths + slot)
    position = gl.maximum(length, 1) - 1
    if sm == 0:
        gl.store(context_len, length)
    attention = make_attention(
        block_table + slot * table_width, partials, flag, sm, length, position, window, NUM_HEADS,
        NUM_KV_HEADS, DIM, BLOCK_SIZE, HAS_NORM,
    )  # fmt: skip
    parameters = Parameters(
        norms, final_norm, qk_norms, qkv_bias, rope + position * DIM, eps, scale, HAS_BIAS,
        GATE_LINEAR, GATE_CUBIC,
    )  # fmt: skip
    token = gl.load(tokens + slot.to(gl.int64) * tokens_width + position)
    embedding += token.to(gl.int64) * HIDDEN
    caches = (k_cache, v_cache, layer_stride)
    gl.warp_specialize(
        [
            (
                compute,
                (stream, given, attention, parameters, embedding, caches, turns, logits,
                 num_layers, VOCAB),
            ),
            (
                load,
                (stream, qkv, o, gate_up, down, head, num_layers, HIDDEN, Q, QKV, MLP, VOCAB),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
