"""A whole decode step of one sequence as one kernel: the phases of a layer, and their loads.

128 programs stay on a multiprocessor each. One warp of a program asks for its weights, eight do
everything else. docs/persistent-step.md has the picture.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.attention import Attention
from nanovllm.devices.cuda.persistent.exchange import (
    CHUNK,
    NUM_BUFFERS,
    PREFETCH_AND_KEEP,
    S1,
    S3,
    block_index,
    fence,
    line_index,
    make_exchanges,
    prefetch,
    thread_index,
)
from nanovllm.devices.cuda.persistent.experts import ExpertLines, Experts
from nanovllm.devices.cuda.persistent.products import FACTORS
from nanovllm.devices.cuda.persistent.sizes import (
    ExpertsShape,
    StepShape,
    blocks_at_once,
    factor_piece,
    gated_at_once,
    gated_width,
    group_tiles,
    head_blocks_at_once,
    line_of,
    num_blocks,
    num_flying,
    num_head_blocks,
    num_slots,
    num_splits,
    q_width,
    qkv_width,
    slot_factors,
)
from nanovllm.devices.cuda.persistent.stream import (
    HEAD_FLYING,
    LANES,
    NUM_USED,
    RING,
    RING_WORDS,
    Lines,
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
    qkv_bias: gl.tensor  # [layers, q + k + v]; without one, or norms of q and k, something else
    rope: gl.tensor  # this position's cosines and sines
    eps: gl.tensor
    scale: gl.tensor  # of the scores, for powers of two
    has_norm: gl.constexpr  # of q and k
    has_bias: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, norms, final_norm, qk_norms, qkv_bias, rope, eps, scale, has_norm, has_bias):
        self.norms, self.final_norm, self.qk_norms = norms, final_norm, qk_norms
        self.qkv_bias, self.rope, self.eps, self.scale = qkv_bias, rope, eps, scale
        self.has_norm, self.has_bias = gl.constexpr(has_norm), gl.constexpr(has_bias)


@gluon.jit
def next_buffer(now):
    return gl.where(now == NUM_BUFFERS - 1, 0, now + 1)


@gluon.jit
def project_qkv(stream, t, g, given, norm, parameters, layer, now, x_now):
    """x -> q, k and v."""
    B: gl.constexpr = num_blocks(given.qkv.width)
    LINE: gl.constexpr = line_of(given.x.width, stream.bits)
    N: gl.constexpr = blocks_at_once(B, LINE)
    held = stream.grab_early(t, g, B, LINE, stream.flying)
    x, factor = given.x.take_normed(x_now, norm, parameters.eps, stream.bits)
    held_x = stream.hold_x(x, LINE)
    for i in range(B // N):
        sums = stream.products(t, g, held, x, held_x, N, LINE, stream.flying)
        y = add_up(stream.sums, sums, 0, N) * factor
        if parameters.has_bias:
            line = (i * N + block_index()) * CHUNK + stream.sm * 8 + line_index()
            is_ours = (block_index() < N) & (line < given.qkv.width)
            bias = parameters.qkv_bias + layer * given.qkv.width + line
            y += gl.load(bias, mask=is_ours, other=0.0).to(gl.float32)
        given.qkv.publish(y, 0, i * N, now, N)
        t += N * LINE.tiles
        g += N * LINE.tiles // group_tiles(N, LINE)
    return t, g


@gluon.jit
def route(stream, t, g, given, norm, parameters, experts, now):
    """Choose the experts of y, and stage it for them while the logits are on their way."""
    LINE: gl.constexpr = line_of(given.y.width, 16)
    x, factor = given.y.take_normed(now, norm, parameters.eps, 16)
    sums = stream.products(t, g, (), x, ((), ()), 1, LINE, stream.flying)
    given.routed.publish(add_up(stream.sums, sums, 0, 1) * factor, 0, 0, now, 1)
    if stream.bits < 16:
        x, factor = given.y.take_normed(now, norm, parameters.eps, stream.bits)
    experts.choose(given.routed, now)
    return x, factor, t + LINE.tiles, g + LINE.tiles // group_tiles(1, LINE)


@gluon.jit
def project_back(
    stream, t, g, source, target, residual, experts, now, target_now, GATED: gl.constexpr
):
    """Add a projection of source to the residual: o after attention, down after the gate."""
    bits: gl.constexpr = stream.bits
    B: gl.constexpr = num_blocks(target.width)
    LINE: gl.constexpr = line_of(source.columns, bits)
    N: gl.constexpr = blocks_at_once(B, LINE)
    HAS_WEIGHTS: gl.constexpr = GATED and experts.count > 0
    PIECE: gl.constexpr = factor_piece(experts.size, bits) if HAS_WEIGHTS else 8
    held = stream.grab_early(t, g, B, LINE, stream.flying, PIECE)
    x = experts.take(source, now, bits) if HAS_WEIGHTS else source.take(now, bits)
    held_x = stream.hold_x(x, LINE)
    for i in range(B // N):
        sums = stream.products(t, g, held, x, held_x, N, LINE, stream.flying, PIECE)
        added = residual + add_up(stream.sums, sums, i * N, N)
        row = block_index() - i * N
        is_new = (row >= 0) & (row < N)
        residual = gl.where(is_new, added.to(gl.bfloat16).to(gl.float32), residual)
        target.publish(residual, i * N, i * N, target_now, N)
        t += N * LINE.tiles
        g += N * LINE.tiles // group_tiles(N, LINE)
    return residual, t, g


@gluon.jit
def project_gate_up(stream, t, g, given, norm, parameters, experts, now):
    """y -> the gated values: blocks of gate and up lie in turn."""
    if experts.count > 0:
        x, factor, t, g = route(stream, t, g, given, norm, parameters, experts, now)
    B: gl.constexpr = num_blocks(given.gated.width)
    LINE: gl.constexpr = line_of(given.y.width, stream.bits)
    N: gl.constexpr = gated_at_once(B, LINE, experts.count > 0)
    held = stream.grab_early(t, g, 2 * B, LINE, stream.flying)
    if experts.count == 0:
        x, factor = given.y.take_normed(now, norm, parameters.eps, stream.bits)
    held_x = stream.hold_x(x, LINE)
    for i in range(B // N):
        sums = stream.products(t, g, held, x, held_x, 2 * N, LINE, stream.flying)
        spread(stream.sums, sums, 0, 0, 2, N)
        spread(stream.more_sums, sums, 0, 1, 2, N)
        gate, up = total(stream.sums) * factor, total(stream.more_sums) * factor
        given.gated.publish(gate / (1.0 + gl.exp(-gate)) * up, 0, i * N, now, N)
        t += 2 * N * LINE.tiles
        g += 2 * N * LINE.tiles // group_tiles(2 * N, LINE)
    return t, g


@gluon.jit
def project_logits(stream, t, g, given, parameters, x_now, logits, VOCAB: gl.constexpr):
    LINE: gl.constexpr = line_of(given.x.width, 16)
    C: gl.constexpr = LINE.tiles
    N: gl.constexpr = head_blocks_at_once(C)
    norm = given.x.load_norm(parameters.final_norm)
    x, factor = given.x.take_normed(x_now, norm, parameters.eps, 16)
    held_x = stream.hold_x(x, LINE)
    for i in range(num_head_blocks(VOCAB, C) // N):
        sums = stream.products(t, g, (), x, held_x, N, LINE, HEAD_FLYING)
        y = add_up(stream.sums, sums, 0, N) * factor
        line = (i * N + block_index()) * CHUNK + stream.sm * 8 + line_index()
        gl.store(logits + line, y.to(gl.bfloat16), mask=(block_index() < N) & (line < VOCAB))
        t += N * C
        g += N * C // group_tiles(N, LINE)


@gluon.jit
def prefetch_layer(given, attention, parameters, k_cache, v_cache, place, layer, later, stride):
    """Ask for what the next layer loads beside its weights, before they crowd memory."""
    skip = (later - layer).to(gl.int64) * stride
    attention.prefetch(k_cache + skip, v_cache + skip, place)
    NORMS: gl.constexpr = 2 * (given.x.size // CHUNK)  # elements of a thread
    at = parameters.norms + later * (256 * NORMS)
    prefetch(at + thread_index() * NORMS, PREFETCH_AND_KEEP)
    if parameters.has_norm:
        at = parameters.qk_norms + later * attention.dim
        prefetch(at + thread_index() % attention.dim, PREFETCH_AND_KEEP)
    if parameters.has_bias:
        BIAS: gl.constexpr = (given.qkv.width + 255) // 256
        at = gl.minimum(thread_index() * BIAS, given.qkv.width - 1)
        at = parameters.qkv_bias + later * given.qkv.width + at
        prefetch(at, PREFETCH_AND_KEEP)


@gluon.jit
def compute(
    stream, given, attention, parameters, experts, embedding, caches, turns, logits, num_layers,
    VOCAB: gl.constexpr,
):  # fmt: skip
    """What eight warps of a program do."""
    k_caches, v_caches, stride = caches
    now, x_now = gl.load(turns), gl.load(turns + 1)
    D: gl.constexpr = attention.dim
    NORM: gl.constexpr = given.x.size // 4  # elements of a norm's weight
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
        if attention.first < attention.end:
            attention.turn_heads(lines, qk_norms, turn, parameters, now)
            attention.attend(lines, k_cache, v_cache, k, v, later_k, later_v, now)
        attention.join(given.attended, now)
        norm = given.y.load_norm(parameters.norms + (2 * layer + 1) * NORM)
        residual, t, g = project_back(
            stream, t, g, given.attended, given.y, residual, experts, now, now, False
        )
        fence()
        attention.store_new(lines, k_cache, v_cache, new_place)  # when nobody waits for it
        t, g = project_gate_up(stream, t, g, given, norm, parameters, experts, now)
        norm = given.x.load_norm(parameters.norms + later * (2 * NORM))
        x_now = next_buffer(x_now)
        residual, t, g = project_back(
            stream, t, g, given.gated, given.x, residual, experts, now, x_now, True
        )
        now = next_buffer(now)
    project_logits(stream, t, g, given, parameters, x_now, logits, VOCAB)
    if stream.sm == 0:  # the others read them before they had anything to say
        gl.store(turns, now)
        gl.store(turns + 1, next_buffer(x_now))


@gluon.jit
def load(stream, experts, weights, head, num_layers, SHAPE: gl.constexpr):
    """Ask for tiles, across phases and layers, as slots come free."""
    HIDDEN: gl.constexpr = SHAPE.hidden
    QKV: gl.constexpr = qkv_width(SHAPE)
    MLP: gl.constexpr = SHAPE.mlp
    VOCAB: gl.constexpr = SHAPE.vocab
    EXPERTS: gl.constexpr = experts.count
    qkv, o, gate_up, down, router = weights
    # lines
    H: gl.constexpr = line_of(HIDDEN, stream.bits)
    A: gl.constexpr = line_of(q_width(SHAPE), stream.bits)
    M: gl.constexpr = line_of(gated_width(SHAPE), stream.bits)
    V: gl.constexpr = line_of(HIDDEN, 16)
    # blocks of them
    B: gl.constexpr = num_blocks(HIDDEN)
    BQ: gl.constexpr = num_blocks(QKV)
    BM: gl.constexpr = num_blocks(MLP)
    BV: gl.constexpr = num_head_blocks(VOCAB, V.tiles)
    # tiles in a group
    GQ: gl.constexpr = group_tiles(blocks_at_once(BQ, H), H)
    GO: gl.constexpr = group_tiles(blocks_at_once(B, A), A)
    GG: gl.constexpr = group_tiles(2 * gated_at_once(BM, H, EXPERTS > 0), H)
    GD: gl.constexpr = group_tiles(blocks_at_once(B, M), M)
    GR: gl.constexpr = group_tiles(1, V)
    GV: gl.constexpr = group_tiles(head_blocks_at_once(V.tiles), V)
    F: gl.constexpr = stream.flying
    t, g = gl.to_tensor(0), gl.to_tensor(0)
    owners = gl.zeros([32], gl.int32, LANES)
    for layer in range(num_layers):
        lines = Lines(layer * QKV, QKV)
        t, g, owners = stream.fetch(qkv, lines, t, g, owners, BQ, H, 1, GQ, F)
        lines = Lines(layer * HIDDEN, HIDDEN)
        t, g, owners = stream.fetch(o, lines, t, g, owners, B, A, 1, GO, F)
        if EXPERTS == 0:
            gates = Lines(layer * (2 * MLP), MLP)
            t, g, owners = stream.fetch(gate_up, gates, t, g, owners, BM, H, 2, GG, F)
            t, g, owners = stream.fetch(down, lines, t, g, owners, B, M, 1, GD, F)
        else:
            routed = Lines(layer * EXPERTS, EXPERTS)
            t, g, owners = stream.fetch(router, routed, t, g, owners, 1, V, 1, GR, F)
            chosen = experts.wait(layer)
            gates = ExpertLines(chosen, MLP, experts.size)
            t, g, owners = stream.fetch(gate_up, gates, t, g, owners, BM, H, 2, GG, F)
            t, g, owners = experts.fetch_down(stream, down, chosen, t, g, owners, HIDDEN, B, M, GD)
    lines = Lines(gl.to_tensor(0), VOCAB)
    stream.fetch((head, head), lines, t, g, owners, BV, V, 1, GV, HEAD_FLYING)


@gluon.constexpr_function
def shape_of(numbers):
    return StepShape(*numbers[:7], ExpertsShape(*numbers[7:]))


@gluon.jit
def make_stream(sm, SHAPE: gl.constexpr):
    SLOTS: gl.constexpr = num_slots(SHAPE)
    BITS: gl.constexpr = SHAPE.bits
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 16, 8, 64], RING)
    words = ring._reinterpret(gl.int32, [SLOTS, 16, 8, 32], RING_WORDS)
    factors = ring
    if BITS < 16:
        factors = gl.allocate_shared_memory(gl.int32, [SLOTS, slot_factors(SHAPE)], FACTORS)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [NUM_USED, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(NUM_USED):
        mbarrier.init(used.index(i), count=1)
    sums = gl.allocate_shared_memory(gl.float32, [8, 8, 8], S3)
    more_sums = gl.allocate_shared_memory(gl.float32, [8, 8, 8], S3)
    FLYING: gl.constexpr = num_flying(SHAPE.hidden)
    return Stream(ring, words, factors, full, used, sums, more_sums, sm, SLOTS, FLYING, BITS)


@gluon.jit
def make_experts(stream, SHAPE: gl.constexpr):
    ids, weights, chosen = stream.full, stream.full, stream.full  # which nobody uses
    if SHAPE.experts.num_experts > 0:
        ids = gl.allocate_shared_memory(gl.int32, [8, 32], S1)
        weights = gl.allocate_shared_memory(gl.float32, [32, 8], S1)
        chosen = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(chosen, count=1)
    return Experts(ids, weights, chosen, SHAPE)


@gluon.jit
def make_attention(
    table, partials, qkv, length, position, window, SHAPE: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    """Shard the keys of each kv head out: whole tiles of 32, each of which lies in one block."""
    SPLITS: gl.constexpr = num_splits(SHAPE.num_kv_heads)
    oldest = gl.maximum(length - window, 0)
    start = oldest // 32 * 32
    size = (length - start + 32 * SPLITS - 1) // (32 * SPLITS) * 32
    # Without keys it is -1, and no program has any.
    num_active = (length - start + size - 1) // gl.maximum(size, 1)
    first = start + qkv.sm % SPLITS * size
    end = gl.where(qkv.sm < SPLITS * SHAPE.num_kv_heads, gl.minimum(first + size, length), first)
    return Attention(
        table, partials, qkv, first, end, oldest, num_active, position, SHAPE, BLOCK_SIZE
    )


@gluon.jit
def persistent_step(
    qkv, qkv_factors, o, o_factors, gate_up, gate_up_factors, down, down_factors, router, head,
    vectors, caches, tables, signals, memories, outputs, numbers,
    NUMBERS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """`PersistentStep.run` says what the tuples hold. A tuple cannot hold what is described.

    NUMBERS are those of a `StepShape`.
    """
    SHAPE: gl.constexpr = shape_of(NUMBERS)
    HIDDEN: gl.constexpr = SHAPE.hidden
    DIM: gl.constexpr = SHAPE.head_dim
    VOCAB: gl.constexpr = SHAPE.vocab
    gates, downs = (gate_up, gate_up_factors), (down, down_factors)
    weights = ((qkv, qkv_factors), (o, o_factors), gates, downs, (router, router))
    embedding, norms, final_norm, qk_norms, qkv_bias, rope = vectors
    slot, lengths, tokens, tokens_width, block_table, table_width = tables
    turns, flag = signals
    partials = memories[2]
    logits, context_len = outputs
    layer_stride, num_layers, window, eps, scale = numbers
    sm = gl.program_id(0)
    stream = make_stream(sm, SHAPE)
    experts = make_experts(stream, SHAPE)
    given = make_exchanges(memories, flag, sm, SHAPE)
    # A length of 0 is padding: its result is not used, and its key must go nowhere.
    slot = gl.load(slot)
    length = gl.load(lengths + slot)
    position = gl.maximum(length, 1) - 1
    if sm == 0:
        gl.store(context_len, length)
    attention = make_attention(
        block_table + slot * table_width, partials, given.qkv, length, position, window, SHAPE,
        BLOCK_SIZE,
    )  # fmt: skip
    parameters = Parameters(
        norms, final_norm, norms if qk_norms is None else qk_norms,
        norms if qkv_bias is None else qkv_bias, rope + position * DIM, eps, scale,
        qk_norms is not None, qkv_bias is not None,
    )  # fmt: skip
    token = gl.load(tokens + slot.to(gl.int64) * tokens_width + position)
    embedding += token.to(gl.int64) * HIDDEN
    caches = (caches[0], caches[1], layer_stride)
    gl.warp_specialize(
        [
            (
                compute,
                (stream, given, attention, parameters, experts, embedding, caches, turns, logits,
                 num_layers, VOCAB),
            ),
            (
                load,
                (stream, experts, weights, head, num_layers, SHAPE),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
