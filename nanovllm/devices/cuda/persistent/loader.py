"""Who loads in the persistent step: one warp of each program, which runs ahead of the others."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.devices.cuda.persistent.experts import GATE_FLYING, ExpertLines
from nanovllm.devices.cuda.persistent.sizes import (
    blocks_at_once,
    gated_at_once,
    gated_width,
    group_tiles,
    head_blocks_at_once,
    line_of,
    num_blocks,
    num_head_blocks,
    q_width,
    qkv_width,
)
from nanovllm.devices.cuda.persistent.stream import HEAD_FLYING, LANES, Lines


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
            t, g, owners = stream.fetch(gate_up, gates, t, g, owners, BM, H, 2, GG, GATE_FLYING)
            t, g, owners = experts.fetch_down(stream, down, chosen, t, g, owners, HIDDEN, B, M, GD)
    lines = Lines(gl.to_tensor(0), VOCAB)
    stream.fetch((head, head), lines, t, g, owners, BV, V, 1, GV, HEAD_FLYING)
