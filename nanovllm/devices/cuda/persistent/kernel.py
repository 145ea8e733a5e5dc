"""The persistent kernel: the phases of a layer, and the order in which weights are loaded.

Each of the 128 CTAs stays on its SM for the whole step. One warp of a CTA starts the TMA copies of
its weights; the other eight do everything else. See the picture in docs/persistent-step.md. Phases
that multiply by weights take a position (t, g) in the weight stream; all but the last return the
next position (see `Stream`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from nanovllm.devices.cuda.persistent.attention import Attention
from nanovllm.devices.cuda.persistent.exchange import (
    CHUNK,
    NUM_BUFFERS,
    S1,
    S4,
    fence,
    make_exchanges,
    sum_indices,
)
from nanovllm.devices.cuda.persistent.experts import ExpertRows, Experts
from nanovllm.devices.cuda.persistent.sizes import (
    ExpertsShape,
    StepShape,
    blocks_at_once,
    format_of,
    gate_blocks_at_once,
    gated_width,
    group_tiles,
    head_blocks_at_once,
    num_blocks,
    num_head_blocks,
    num_in_flight,
    num_slots,
    num_sum_blocks,
    output_group,
    q_width,
    qkv_width,
    scale_piece,
    slot_scales,
    tiles_at_once,
)
from nanovllm.devices.cuda.persistent.stream import (
    HEAD_IN_FLIGHT,
    LANES,
    NUM_USED,
    RING,
    RING_WORDS,
    Stream,
    WeightRows,
    no_sums,
    reduce_sums,
    store_sums,
)
from nanovllm.devices.cuda.persistent.tile_mma import SCALES, by_row


@aggregate
class Parameters:
    """Norm weights, biases and constants of the model; norms are padded to whole chunks."""

    norms: gl.tensor  # [layers, 2, hidden], four bfloat16 per element
    final_norm: gl.tensor
    qk_norms: gl.tensor  # [layers, 2, dim], two bfloat16 per element; unused if not has_norm
    qkv_bias: gl.tensor  # [layers, q + k + v]; unused if not has_bias
    rope: gl.tensor  # [positions, 2, dim / 2]: cosines and sines
    eps: gl.tensor
    scale: gl.tensor  # softmax scale times log2(e), for exp2
    has_norm: gl.constexpr  # whether q and k are normalized
    has_bias: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, norms, final_norm, qk_norms, qkv_bias, rope, eps, scale, has_norm, has_bias):
        self.norms, self.final_norm, self.qk_norms = norms, final_norm, qk_norms
        self.qkv_bias, self.rope, self.eps, self.scale = qkv_bias, rope, eps, scale
        self.has_norm, self.has_bias = gl.constexpr(has_norm), gl.constexpr(has_bias)


@gluon.jit
def next_buffer(buffer):
    return gl.where(buffer == NUM_BUFFERS - 1, 0, buffer + 1)


@gluon.jit
def project_qkv(stream, t, g, exchanges, norm, parameters, layer, buffer, x_buffer):
    """Compute q, k and v from the normalized x, and publish them to all CTAs."""
    B: gl.constexpr = num_blocks(exchanges.qkv.width)
    FORMAT: gl.constexpr = format_of(exchanges.x.width, stream.bits, stream.rows)
    N: gl.constexpr = blocks_at_once(B, FORMAT)
    resident = stream.load_tiles_early(t, g, B, FORMAT, stream.in_flight)
    x, inv_rms = exchanges.x.stage_normed(x_buffer, norm, parameters.eps, stream.bits)
    x_registers = stream.load_x_registers(x, FORMAT)
    for i in range(B // N):
        sums = stream.multiply_blocks(t, g, resident, x, x_registers, N, FORMAT, stream.in_flight)
        y = stream.reduce(sums, N) * inv_rms
        if parameters.has_bias:
            block, row, column = sum_indices(stream.blocks, stream.rows)
            column = (i * N + block) * CHUNK + stream.cta * 8 + column
            is_ours = (block < N) & (column < exchanges.qkv.width) & (row >= 0)
            bias = parameters.qkv_bias + layer * exchanges.qkv.width + column + row * 0
            y += gl.load(bias, mask=is_ours, other=0.0).to(gl.float32)
        exchanges.qkv.publish(y, i * N, buffer, N)
        t += N * FORMAT.tiles
        g += N * FORMAT.tiles // group_tiles(N, FORMAT)
    return t, g


@gluon.jit
def route(stream, t, g, exchanges, norm, parameters, experts, buffer):
    """Compute the router logits of y, and choose its experts; return the staged y and its 1 / RMS.

    If the weights are quantized, y is staged for them while the logits are exchanged.
    """
    FORMAT: gl.constexpr = format_of(exchanges.y.width, 16)
    x, inv_rms = exchanges.y.stage_normed(buffer, norm, parameters.eps, 16)
    sums = stream.multiply_blocks(t, g, (), x, ((), ()), 1, FORMAT, stream.in_flight)
    exchanges.router_logits.publish(stream.reduce(sums, 1) * inv_rms, 0, buffer, 1)
    if stream.bits < 16:
        x, inv_rms = exchanges.y.stage_normed(buffer, norm, parameters.eps, stream.bits)
    experts.choose(exchanges.router_logits, buffer)
    return x, inv_rms, t + FORMAT.tiles, g + FORMAT.tiles // group_tiles(1, FORMAT)


@gluon.jit
def project_output(
    stream, t, g, source, target, residual, experts, buffer, target_buffer, GATED: gl.constexpr
):
    """Add a projection of `source` to the residual, and publish the sum.

    The weight is `down` if GATED, otherwise `o`.
    """
    bits: gl.constexpr = stream.bits
    B: gl.constexpr = num_blocks(target.width)
    FORMAT: gl.constexpr = format_of(source.columns, bits, stream.rows)
    OF_EXPERTS: gl.constexpr = GATED and experts.count > 0
    PIECE: gl.constexpr = scale_piece(experts.size, bits) if OF_EXPERTS else 8
    resident = stream.load_tiles_early(t, g, B, FORMAT, stream.in_flight, PIECE)
    sums = ()
    if len(resident) > 0:
        x = (
            experts.stage_gated(source, buffer, bits)
            if OF_EXPERTS
            else stage_all(source, buffer, bits)
        )
        sums = stream.multiply_blocks(
            t, g, resident, x, stream.load_x_registers(x, FORMAT), B, FORMAT, stream.in_flight,
            PIECE,
        )  # fmt: skip
        g += 1
    else:
        N: gl.constexpr = tiles_at_once(B, FORMAT)
        CHUNKS: gl.constexpr = N * source.size // CHUNK // FORMAT.tiles
        totals = ()
        for _ in gl.static_range(B):
            totals = totals + (no_sums(FORMAT),)
        if OF_EXPERTS:
            x = experts.stage_gated(source, buffer, bits)
            PIECES: gl.constexpr = N * FORMAT.halves
            for i in gl.static_range(FORMAT.tiles // N):
                part = x[i * PIECES : (i + 1) * PIECES]
                totals, g = add_columns(stream, t + i * N * B, g, part, totals, N, FORMAT, PIECE)
        else:
            for i in range(FORMAT.tiles // N):
                part = source.stage_chunks(buffer, i * CHUNKS, CHUNKS, bits)
                totals, g = add_columns(stream, t + i * N * B, g, part, totals, N, FORMAT, PIECE)
        for b in gl.static_range(B):
            sums = sums + (by_row(totals[b], bits),)
    residual = (residual + stream.reduce(sums, B)).to(gl.bfloat16).to(gl.float32)
    target.publish(residual, 0, target_buffer, num_blocks(target.stored))
    return residual, t + B * FORMAT.tiles, g


@gluon.jit
def stage_all(source, buffer, BITS: gl.constexpr):
    return source.stage_chunks(buffer, 0, source.size // CHUNK, BITS)


@gluon.jit
def add_columns(
    stream, t, g, x, totals, N: gl.constexpr, FORMAT: gl.constexpr, PIECE: gl.constexpr
):
    """Multiply the next N tiles of every block by the staged x, and add the results to `totals`."""
    x_registers = stream.load_x_registers(x, FORMAT)
    # The loop is not unrolled: the code of all phases must fit into the instruction cache.
    for b in range(len(totals)):
        own = totals[0]
        for k in gl.static_range(1, len(totals)):
            own = select(b == k, totals[k], own)
        own = stream.add_tiles(
            t + b * N, g + b, x, x_registers, 0, N, own, FORMAT, stream.in_flight, PIECE
        )
        found = ()
        for k in gl.static_range(len(totals)):
            found = found + (select(b == k, own, totals[k]),)
        totals = found
    return totals, g + len(totals)


@gluon.jit
def select(condition, ours, others):
    """Apply `where` to each pair of tensors of two tuples."""
    found = ()
    for k in gl.static_range(len(ours)):
        found = found + (gl.where(condition, ours[k], others[k]),)
    return found


@gluon.jit
def project_gate_up(stream, t, g, exchanges, norm, parameters, experts, buffer):
    """Compute gate and up from the normalized y, block by block, and publish silu(gate) * up."""
    if experts.count > 0:
        x, inv_rms, t, g = route(stream, t, g, exchanges, norm, parameters, experts, buffer)
    B: gl.constexpr = num_blocks(exchanges.gated.width)
    FORMAT: gl.constexpr = format_of(exchanges.y.width, stream.bits, stream.rows)
    N: gl.constexpr = gate_blocks_at_once(B, FORMAT, experts.count > 0)
    resident = stream.load_tiles_early(t, g, 2 * B, FORMAT, stream.in_flight)
    if experts.count == 0:
        x, inv_rms = exchanges.y.stage_normed(buffer, norm, parameters.eps, stream.bits)
    x_registers = stream.load_x_registers(x, FORMAT)
    for i in range(B // N):
        sums = stream.multiply_blocks(
            t, g, resident, x, x_registers, 2 * N, FORMAT, stream.in_flight
        )
        store_sums(stream.sums, sums, 0, 2, N, stream.rows)
        store_sums(stream.more_sums, sums, 1, 2, N, stream.rows)
        gate = reduce_sums(stream.sums, stream.blocks, stream.rows) * inv_rms
        up = reduce_sums(stream.more_sums, stream.blocks, stream.rows) * inv_rms
        exchanges.gated.publish(gate / (1.0 + gl.exp(-gate)) * up, i * N, buffer, N)
        t += 2 * N * FORMAT.tiles
        g += 2 * N * FORMAT.tiles // group_tiles(2 * N, FORMAT)
    return t, g


@gluon.jit
def project_logits(stream, t, g, exchanges, parameters, x_buffer, logits, VOCAB: gl.constexpr):
    FORMAT: gl.constexpr = format_of(exchanges.x.width, 16, stream.rows)
    C: gl.constexpr = FORMAT.tiles
    N: gl.constexpr = head_blocks_at_once(C)
    norm = exchanges.x.load_norm(parameters.final_norm)
    x, inv_rms = exchanges.x.stage_normed(x_buffer, norm, parameters.eps, 16)
    x_registers = stream.load_x_registers(x, FORMAT)
    for i in range(num_head_blocks(VOCAB, C) // N):
        sums = stream.multiply_blocks(t, g, (), x, x_registers, N, FORMAT, HEAD_IN_FLIGHT)
        y = stream.reduce(sums, N) * inv_rms
        block, row, column = sum_indices(stream.blocks, stream.rows)
        column = (i * N + block) * CHUNK + stream.cta * 8 + column
        is_ours = (block < N) & (column < VOCAB) & (row >= 0)
        gl.store(logits + (row * VOCAB + column), y, mask=is_ours)
        t += N * C
        g += N * C // group_tiles(N, FORMAT)


@gluon.jit
def embed(stream, exchanges, attention, embedding, tokens, tokens_width, context_lens):
    """Load the embeddings of the rows' tokens, and store the context length of each row."""
    block, row, column = sum_indices(stream.blocks, stream.rows)
    column = block * CHUNK + stream.cta * 8 + column
    position = attention.position(row)
    slot = gl.load(attention.slots + row).to(gl.int64)
    offset = slot * tokens_width + position
    token = gl.load(tokens + offset, mask=position >= 0, other=0).to(gl.int64)
    offset = token * exchanges.x.width + column
    if stream.cta == 0:
        is_first = (block == 0) & (column == 0) & (row >= 0)
        gl.store(
            context_lens + row + 0 * column, gl.maximum(position + 1, 0) + 0 * column, mask=is_first
        )
    return gl.load(embedding + offset, mask=column < exchanges.x.width, other=0.0).to(gl.float32)


@gluon.jit
def compute(
    stream, exchanges, attention, parameters, experts, sources, caches, buffer_indices, logits,
    num_layers, VOCAB: gl.constexpr,
):  # fmt: skip
    """Run all layers and the LM head, in eight warps of a CTA."""
    all_caches, stride = caches
    buffer, x_buffer = gl.load(buffer_indices), gl.load(buffer_indices + 1)
    D: gl.constexpr = attention.dim
    NORM: gl.constexpr = exchanges.x.size // 4  # int64 elements per norm weight
    embedding, tokens, tokens_width, context_lens = sources
    residual = embed(stream, exchanges, attention, embedding, tokens, tokens_width, context_lens)
    exchanges.x.publish(residual, 0, x_buffer, num_blocks(exchanges.x.stored))
    heads = attention.allocate_heads()
    ends, first_split, last_split = attention.divide_splits()
    first_segment, num_first_splits = attention.segment(ends, first_split, last_split)
    offsets = attention.find_unit(first_segment, first_segment.first)
    is_active = attention.active()
    t, g = gl.to_tensor(0), gl.to_tensor(0)
    norm = exchanges.x.load_norm(parameters.norms)
    for layer in range(num_layers):
        layer_caches = attention.advance(all_caches, layer.to(gl.int64) * stride)
        next_layer = gl.minimum(layer + 1, num_layers - 1)
        skip = (next_layer - layer).to(gl.int64) * stride
        num_keys = first_segment.end - first_segment.first
        first_k = attention.load_keys(layer_caches, offsets[0], num_keys)
        first_v = attention.load_values(layer_caches, offsets[0], num_keys)
        qk_norms = attention.load_norms(parameters.qk_norms + layer * D)
        t, g = project_qkv(stream, t, g, exchanges, norm, parameters, layer, buffer, x_buffer)
        k = first_k, attention.load_keys(layer_caches, offsets[1], num_keys - 32)
        v = first_v, attention.load_values(layer_caches, offsets[1], num_keys - 32)
        if num_keys > 0:
            attention.prefetch_unit(offsets, attention.advance(layer_caches, skip))
        split, segment, count = first_split, first_segment, num_first_splits
        while split < last_split:
            attention.rotate_heads(segment, heads, qk_norms, parameters, buffer)
            attention.attend(segment, heads, layer_caches, skip, k, v, buffer)
            split += count
            if split < last_split:
                segment, count = attention.segment(ends, split, last_split)
                begin, found = segment.first, attention.find_unit(segment, segment.first)
                k = attention.load_unit_keys(segment, begin, found, layer_caches)
                v = attention.load_unit_values(segment, begin, found, layer_caches)
                attention.prefetch_unit(found, attention.advance(layer_caches, skip))
        attention.merge(exchanges.attended, is_active, buffer)
        norm = exchanges.y.load_norm(parameters.norms + (2 * layer + 1) * NORM)
        residual, t, g = project_output(
            stream, t, g, exchanges.attended, exchanges.y, residual, experts, buffer, buffer, False
        )
        fence()
        t, g = project_gate_up(stream, t, g, exchanges, norm, parameters, experts, buffer)
        norm = exchanges.x.load_norm(parameters.norms + next_layer * (2 * NORM))
        x_buffer = next_buffer(x_buffer)
        residual, t, g = project_output(
            stream, t, g, exchanges.gated, exchanges.x, residual, experts, buffer, x_buffer, True
        )
        buffer = next_buffer(buffer)
    project_logits(stream, t, g, exchanges, parameters, x_buffer, logits, VOCAB)
    # Every CTA has read the buffer indices by now, since this CTA has polled values from all CTAs.
    if stream.cta == 0:
        gl.store(buffer_indices, buffer)
        gl.store(buffer_indices + 1, next_buffer(x_buffer))


@gluon.jit
def load(stream, experts, weights, head, num_layers, SHAPE: gl.constexpr):
    """Start the TMA copies of all weight tiles, in the order of use, as slots become free."""
    HIDDEN: gl.constexpr = SHAPE.hidden
    QKV: gl.constexpr = qkv_width(SHAPE)
    MLP: gl.constexpr = SHAPE.mlp
    VOCAB: gl.constexpr = SHAPE.vocab
    EXPERTS: gl.constexpr = experts.count
    qkv, o, gate_up, down, router = weights
    # Layouts of weight rows, named after their width: hidden (H), q (A) and gated (M). V is the
    # layout of the LM head and the router: as wide as hidden, always 16 bits.
    ROWS: gl.constexpr = stream.rows
    H: gl.constexpr = format_of(HIDDEN, stream.bits, ROWS)
    A: gl.constexpr = format_of(q_width(SHAPE), stream.bits, ROWS)
    M: gl.constexpr = format_of(gated_width(SHAPE), stream.bits, ROWS)
    V: gl.constexpr = format_of(HIDDEN, 16, ROWS)
    # Number of blocks of each projection
    B: gl.constexpr = num_blocks(HIDDEN)
    BQ: gl.constexpr = num_blocks(QKV)
    BM: gl.constexpr = num_blocks(MLP)
    BV: gl.constexpr = num_head_blocks(VOCAB, V.tiles)
    # Number of tiles per group, for each projection
    GQ: gl.constexpr = group_tiles(blocks_at_once(BQ, H), H)
    GO: gl.constexpr = output_group(B, A)
    GG: gl.constexpr = group_tiles(2 * gate_blocks_at_once(BM, H, EXPERTS > 0), H)
    GD: gl.constexpr = output_group(B, M)
    GR: gl.constexpr = group_tiles(1, V)
    GV: gl.constexpr = group_tiles(head_blocks_at_once(V.tiles), V)
    # For `o` and `down`: number of tiles loaded from a block before those of the next block
    CO: gl.constexpr = tiles_at_once(B, A)
    CD: gl.constexpr = tiles_at_once(B, M)
    F: gl.constexpr = stream.in_flight
    t, g = gl.to_tensor(0), gl.to_tensor(0)
    owners = gl.zeros([32], gl.int32, LANES)
    for layer in range(num_layers):
        weight_rows = WeightRows(layer * QKV, QKV)
        t, g, owners = stream.fetch(qkv, weight_rows, t, g, owners, BQ, H, 1, GQ, F)
        weight_rows = WeightRows(layer * HIDDEN, HIDDEN)
        t, g, owners = stream.fetch(o, weight_rows, t, g, owners, B, A, 1, GO, F, CO)
        if EXPERTS == 0:
            gates = WeightRows(layer * (2 * MLP), MLP)
            t, g, owners = stream.fetch(gate_up, gates, t, g, owners, BM, H, 2, GG, F)
            t, g, owners = stream.fetch(down, weight_rows, t, g, owners, B, M, 1, GD, F, CD)
        else:
            router_rows = WeightRows(layer * EXPERTS, EXPERTS)
            t, g, owners = stream.fetch(router, router_rows, t, g, owners, 1, V, 1, GR, F)
            chosen = experts.wait(layer)
            gates = ExpertRows(chosen, MLP, experts.size)
            t, g, owners = stream.fetch(gate_up, gates, t, g, owners, BM, H, 2, GG, F)
            t, g, owners = experts.fetch_down(
                stream, down, chosen, t, g, owners, HIDDEN, B, M, GD, CD
            )
    weight_rows = WeightRows(gl.to_tensor(0), VOCAB)
    stream.fetch((head, head), weight_rows, t, g, owners, BV, V, 1, GV, HEAD_IN_FLIGHT)


@gluon.constexpr_function
def shape_of(numbers):
    return StepShape(*numbers[:7], ExpertsShape(*numbers[8:]), numbers[7])


@gluon.jit
def make_stream(cta, SHAPE: gl.constexpr, ROWS: gl.constexpr):
    SLOTS: gl.constexpr = num_slots(SHAPE, ROWS)
    BITS: gl.constexpr = SHAPE.bits
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 16, 8, 64], RING)
    words = ring._reinterpret(gl.int32, [SLOTS, 16, 8, 32], RING_WORDS)
    scales = ring
    if BITS < 16:
        scales = gl.allocate_shared_memory(gl.int32, [SLOTS, slot_scales(SHAPE)], SCALES)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [NUM_USED, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(NUM_USED):
        mbarrier.init(used.index(i), count=1)
    BLOCKS: gl.constexpr = num_sum_blocks(SHAPE, ROWS)
    sums = gl.allocate_shared_memory(gl.float32, [8, BLOCKS, ROWS, 8], S4)
    more_sums = gl.allocate_shared_memory(gl.float32, [8, BLOCKS, ROWS, 8], S4)
    IN_FLIGHT: gl.constexpr = num_in_flight(SHAPE.hidden)
    return Stream(
        ring, words, scales, full, used, sums, more_sums, cta, BLOCKS, ROWS, SLOTS, IN_FLIGHT, BITS
    )


@gluon.jit
def make_experts(stream, SHAPE: gl.constexpr):
    # Placeholders for models without experts, which never use them.
    ids, weights, chosen = stream.full, stream.full, stream.full
    if SHAPE.experts.num_experts > 0:
        ids = gl.allocate_shared_memory(gl.int32, [8, 32], S1)
        weights = gl.allocate_shared_memory(gl.float32, [32, 8], S1)
        chosen = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(chosen, count=1)
    return Experts(ids, weights, chosen, SHAPE)


@gluon.jit
def persistent_step(
    qkv, qkv_scales, o, o_scales, gate_up, gate_up_scales, down, down_scales, router, head,
    vectors, caches, tables, signals, memories, outputs, numbers,
    NUMBERS: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, NEW: gl.constexpr,
):  # fmt: skip
    """Run a decode step; `PersistentStep.run` passes the arguments.

    Tensor descriptors are separate arguments, because an argument that is a tuple cannot contain
    them. NUMBERS is `StepShape.numbers`, BLOCK_SIZE is that of the KV cache, and NEW is the maximum
    number of rows that belong to one sequence.
    """
    SHAPE: gl.constexpr = shape_of(NUMBERS)
    VOCAB: gl.constexpr = SHAPE.vocab
    gates, downs = (gate_up, gate_up_scales), (down, down_scales)
    weights = ((qkv, qkv_scales), (o, o_scales), gates, downs, (router, router))
    embedding, norms, final_norm, qk_norms, qkv_bias, rope = vectors
    slots, lengths, tokens, tokens_width, block_table, table_width = tables
    buffer_indices, flag = signals
    logits, context_lens = outputs
    layer_stride, num_layers, window, eps, scale = numbers
    cta = gl.program_id(0)
    stream = make_stream(cta, SHAPE, ROWS)
    experts = make_experts(stream, SHAPE)
    exchanges = make_exchanges(memories, flag, cta, SHAPE, ROWS)
    attention = Attention(
        slots, lengths, block_table, table_width, num_layers if window is None else window,
        memories[2], exchanges.qkv, SHAPE, BLOCK_SIZE, ROWS, NEW, window is not None,
    )  # fmt: skip
    parameters = Parameters(
        norms, final_norm, norms if qk_norms is None else qk_norms,
        norms if qkv_bias is None else qkv_bias, rope, eps, scale,
        qk_norms is not None, qkv_bias is not None,
    )  # fmt: skip
    sources = (embedding, tokens, tokens_width, context_lens)
    caches = (caches, layer_stride)
    gl.warp_specialize(
        [
            (
                compute,
                (stream, exchanges, attention, parameters, experts, sources, caches, buffer_indices,
                 logits, num_layers, VOCAB),
            ),
            (
                load,
                (stream, experts, weights, head, num_layers, SHAPE),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
