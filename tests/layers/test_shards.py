"""The shards of all ranks, combined by hand without a process group, equal the whole layer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanovllm.config import ExpertsConfig, ModelConfig, RecurrentConfig
from nanovllm.errors import ConfigError
from nanovllm.layers.build import BuildContext
from nanovllm.layers.gated_delta_net import GatedDeltaNet
from nanovllm.layers.layer_weight import LayerWeight
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Embedding, LMHead, RowParallelLinear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.moe import ExpertNames, SparseMoeBlock
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.layers.shards import Shard, replicated, sharded, split_kv_heads
from nanovllm.models.registry import read_config
from nanovllm.ops.interface import LayerState, Ops, RecurrentRows, ResidualStream
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.ops.tp_group import ALONE, TPGroup
from nanovllm.worker.check_splits import check_splits
from nanovllm.worker.loader import LoadingLayers
from tests.checkpoints import VARIANTS
from tests.devices import cpu_device
from tests.ops.delta_nets import random_state

MODEL = replace(
    read_config(VARIANTS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]}),
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
HIDDEN, HEAD_DIM = MODEL.hidden_size, MODEL.head_dim
EXPERTS = ExpertsConfig(num_experts=5, top_k=2, size=24, is_normalized=True)
RECURRENT = RecurrentConfig(frozenset({0}), 2, 6, key_dim=12, value_dim=8, conv_size=4)
HYBRID = replace(MODEL, recurrent=RECURRENT)
SIZES = pytest.mark.parametrize("size", [1, 2, 4])

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["torch", "compiled"])
def ops(request: pytest.FixtureRequest) -> Ops:
    torch.manual_seed(0)
    return TorchOps() if request.param == "torch" else cpu_device().ops(torch.float32)


def unconnected(size: int) -> list[TPGroup]:
    """Return ranks that do not communicate; the test combines their results."""
    return [TPGroup(rank, size) for rank in range(size)]


def build(ops: Ops, group: TPGroup = ALONE) -> BuildContext:
    return BuildContext(torch.device("cpu"), torch.float32, None, ops, group)  # type: ignore[arg-type]


def stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = LoadingLayers(module, cpu_device()).expected
    return {name: 0.2 * torch.randn(tensor.shape) for name, tensor in tensors.items()}


def load(module: nn.Module, stored: dict[str, Tensor]) -> None:
    """Copy the expected parts of each tensor, as the loader does."""
    layers = LoadingLayers(module, cpu_device())
    assert layers.expected.keys() == stored.keys()
    for name, tensor in stored.items():
        assert layers.expected[name].shape == tensor.shape
        for part in layers.expected[name].parts:
            part.target.copy_(tensor[part.source])
        layers.loaded(name)
    layers.process_rest()


def dense(weight: LayerWeight) -> Tensor:
    values = weight.for_ops()
    assert isinstance(values, Tensor)
    return values


def add_up(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def norm_of(ops: Ops) -> RMSNorm:
    norm = RMSNorm(MODEL, build(ops))
    norm.weight.fill_(1.0)
    return norm


@SIZES
@pytest.mark.parametrize("merged", [None, "gate_up_proj"])
def test_mlp(ops: Ops, size: int, merged: str | None) -> None:
    one = GatedMLP(MODEL, build(ops), merged)
    stored = stored_tensors(one)
    load(one, stored)
    x, norm = torch.randn(5, HIDDEN), norm_of(ops)
    want = one(ResidualStream(x.clone()), norm)
    outputs = []
    for group in unconnected(size):
        mlp = GatedMLP(MODEL, build(ops, group), merged)
        load(mlp, stored)
        hidden = mlp(ResidualStream(x.clone()), norm)
        torch.testing.assert_close(hidden.residual, want.residual)
        outputs.append(hidden.update)
    torch.testing.assert_close(add_up(outputs), want.update)


@pytest.mark.parametrize(("num_kv_heads", "size"), [(4, 2), (4, 4), (2, 4), (1, 2), (1, 4)])
@pytest.mark.parametrize("merged", [None, "qkv_proj"])
def test_attention_projections(ops: Ops, num_kv_heads: int, size: int, merged: str | None) -> None:
    """Every rank has the kv heads of its query heads; ranks share them if there are too few."""
    model = replace(MODEL, num_kv_heads=num_kv_heads)
    one = SelfAttention(model, 0, build(ops), merged=merged)
    stored = stored_tensors(one)
    load(one, stored)
    x, heads = torch.randn(3, HIDDEN), torch.randn(3, 4, HEAD_DIM)
    q, k, v = one.qkv_proj(x).view(3, -1, HEAD_DIM).split([4, num_kv_heads, num_kv_heads], dim=1)
    outputs = []
    for group in unconnected(size):
        attention = SelfAttention(model, 0, build(ops, group), merged=merged)
        load(attention, stored)
        own = range(group.rank * 4 // size, (group.rank + 1) * 4 // size)
        own_kv = sorted({head * num_kv_heads // 4 for head in own})
        want = torch.cat((q[:, own], k[:, own_kv], v[:, own_kv]), dim=1)
        torch.testing.assert_close(attention.qkv_proj(x), want.flatten(1))
        outputs.append(attention.o_proj(heads[:, own].flatten(1)))
    torch.testing.assert_close(add_up(outputs), one.o_proj(heads.flatten(1)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_grouped", [False, True], ids=["apart", "grouped"])
def test_gated_delta_net(ops: Ops, size: int, is_grouped: bool) -> None:
    """Every rank has the states of its key heads, and of the value heads that share them."""
    one = GatedDeltaNet(HYBRID, 0, build(ops), is_grouped)
    stored = stored_tensors(one)
    load(one, stored)
    x, norm = torch.randn(12, HIDDEN), norm_of(ops)
    rows = RecurrentRows(torch.tensor([2, 0, 1]), [5, 1, 6])

    def run(layer: GatedDeltaNet, sizes: RecurrentConfig) -> tuple[Tensor, LayerState]:
        state = random_state(sizes, 3, torch.float32)
        state.recurrent.zero_()
        state.conv.zero_()
        batch: Any = SimpleNamespace(caches=[state], recurrent=rows, sampled=None)
        output, _ = layer(ResidualStream(x.clone()), norm, None, batch)
        return layer.o_proj.packed(output), state

    assert HYBRID.recurrent is not None
    own = replace(
        HYBRID.recurrent,
        num_key_heads=HYBRID.recurrent.num_key_heads // size,
        num_value_heads=HYBRID.recurrent.num_value_heads // size,
    )
    want, whole_state = run(one, HYBRID.recurrent)
    results = []
    for group in unconnected(size):
        layer = GatedDeltaNet(HYBRID, 0, build(ops, group), is_grouped)
        load(layer, stored)
        results.append(run(layer, own))
    torch.testing.assert_close(add_up([y for y, _ in results]), want)
    states = torch.cat([state.recurrent for _, state in results], 1)
    torch.testing.assert_close(states, whole_state.recurrent)


@SIZES
def test_shared_expert(ops: Ops, size: int) -> None:
    model = replace(MODEL, experts=replace(EXPERTS, shared_size=40), mlp_bias=False)
    one = SparseMoeBlock(model, build(ops), ExpertNames())
    stored = stored_tensors(one)
    load(one, stored)
    x, norm = torch.randn(7, HIDDEN), norm_of(ops)
    want = one(ResidualStream(x.clone()), norm).update
    outputs = []
    for group in unconnected(size):
        moe = SparseMoeBlock(model, build(ops, group), ExpertNames())
        load(moe, stored)
        outputs.append(moe(ResidualStream(x.clone()), norm).update)
    torch.testing.assert_close(add_up(outputs), want)


@SIZES
def test_experts(ops: Ops, size: int) -> None:
    model = replace(MODEL, experts=EXPERTS)
    one = SparseMoeBlock(model, build(ops), ExpertNames())
    stored = stored_tensors(one)
    load(one, stored)
    x, norm = torch.randn(7, HIDDEN), norm_of(ops)
    want = one(ResidualStream(x.clone()), norm).update
    outputs = []
    for group in unconnected(size):
        sparse = SparseMoeBlock(model, build(ops, group), ExpertNames())
        load(sparse, stored)
        outputs.append(sparse(ResidualStream(x.clone()), norm).update)
    torch.testing.assert_close(add_up(outputs), want)


VOCABULARIES = pytest.mark.parametrize(
    ("vocab_size", "size"), [(160, 1), (160, 4), (161, 2), (161, 4), (5, 4), (9, 4)]
)


@VOCABULARIES
def test_embedding(ops: Ops, vocab_size: int, size: int) -> None:
    """With a vocabulary of 5 on 4 ranks, one rank holds only padding."""
    table = torch.randn(vocab_size, HIDDEN)
    token_ids = torch.randint(vocab_size, (20,), dtype=torch.int32)
    outputs = []
    for group in unconnected(size):
        embedding = Embedding(vocab_size, HIDDEN, 3.0, build(ops, group))
        load(embedding, {".weight": table})
        outputs.append(embedding(token_ids))
    assert torch.equal(add_up(outputs), 3.0 * table[token_ids])


class Gathered:
    """A group whose other ranks' columns are given."""

    rank, is_alone = 0, False

    def __init__(self, size: int, columns: list[Tensor]) -> None:
        self.size, self.columns = size, columns

    def gather_columns(self, x: Tensor) -> Tensor:
        return torch.cat((x, *self.columns), dim=1)


@VOCABULARIES
@pytest.mark.parametrize("is_tied", [True, False])
def test_lm_head(ops: Ops, vocab_size: int, size: int, is_tied: bool) -> None:
    """The padding of a vocabulary that does not divide evenly does not appear in the logits."""
    weight, x, norm = torch.randn(vocab_size, HIDDEN), torch.randn(3, HIDDEN), norm_of(ops)
    heads = []
    for group in unconnected(size):
        embedding = Embedding(vocab_size, HIDDEN, 1.0, build(ops, group))
        dense(embedding.weight).fill_(torch.inf)  # the padding must not matter
        load(embedding, {".weight": weight})
        head = LMHead(HIDDEN, vocab_size, build(ops, group), embedding if is_tied else None)
        dense(head.weight)[sharded(vocab_size, group).stored.stop :].fill_(torch.inf)
        load(head, {} if is_tied else {"lm_head.weight": weight})
        heads.append(head)
    shards = [head.logits(ResidualStream(x.clone()), norm) for head in heads]
    heads[0].group = Gathered(size, shards[1:])  # type: ignore[assignment]
    logits = heads[0].logits(ResidualStream(x.clone()), norm)
    assert logits.shape == (3, vocab_size)
    assert logits.is_contiguous()
    torch.testing.assert_close(logits, norm(x.clone()) @ weight.t())


class AddsToResidual:
    """A projection that adds its output to the residual in place, like some on CUDA."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * x

    def add_to(self, residual: Tensor, x: Tensor) -> ResidualStream:
        return ResidualStream(residual.add_(2 * x))


@pytest.mark.parametrize("group", [TPGroup(0, 2), TPGroup(1, 2)], ids=["rank-0", "rank-1"])
def test_the_residual_is_left_to_the_norm(ops: Ops, group: TPGroup) -> None:
    """The residual is replicated, so the sum over ranks must not contain it."""
    linear: Any = RowParallelLinear(replicated(HIDDEN), HIDDEN, False, build(ops, group), "o_proj")
    linear.packed = AddsToResidual()
    x, residual = torch.randn(3, HIDDEN), torch.ones(3, HIDDEN)
    hidden = linear.add_to(residual, x)
    assert torch.equal(hidden.update, 2 * x)
    assert torch.equal(hidden.residual, torch.ones(3, HIDDEN))


def test_one_rank_may_add_to_the_residual(ops: Ops) -> None:
    linear: Any = RowParallelLinear(replicated(HIDDEN), HIDDEN, False, build(ops), "o_proj")
    linear.packed = AddsToResidual()
    x, residual = torch.randn(3, HIDDEN), torch.ones(3, HIDDEN)
    hidden = linear.add_to(residual, x)
    assert hidden.update is None
    assert torch.equal(hidden.residual, 1 + 2 * x)


@pytest.mark.parametrize(("size", "num_ranks"), [(12, 1), (12, 4), (13, 4), (5, 4), (3, 8)])
def test_shares_make_up_the_whole(size: int, num_ranks: int) -> None:
    shards = [sharded(size, group) for group in unconnected(num_ranks)]
    assert len({shard.count for shard in shards}) == 1
    places = [i for shard in shards for i in range(size)[shard.stored]]
    assert places == list(range(size))


def test_shares_of_kv_heads() -> None:
    def firsts(num_heads: int, size: int) -> list[Shard]:
        return [split_kv_heads(num_heads, group) for group in unconnected(size)]

    assert firsts(4, 2) == [Shard(4, 0, 2), Shard(4, 2, 2)]
    assert firsts(2, 4) == [Shard(2, 0, 1), Shard(2, 0, 1), Shard(2, 1, 1), Shard(2, 1, 1)]
    assert firsts(1, 3) == [Shard(1, 0, 1)] * 3


GOOD: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({}, 2),
    ({}, 4),
    ({"num_kv_heads": 3, "num_heads": 12, "intermediate_size": 81}, 3),
    ({"vocab_size": 161}, 4),
    ({"experts": EXPERTS, "intermediate_size": 81}, 4),  # no layer has an MLP of that size
]
BAD: list[tuple[dict[str, Any], int, str]] = [
    ({}, 3, "num_attention_heads=4, intermediate_size=80, num_key_value_heads=2"),
    ({}, 8, "num_attention_heads=4"),
    ({"intermediate_size": 81}, 2, "intermediate_size=81"),
    ({"num_heads": 12, "num_kv_heads": 3}, 4, "num_key_value_heads=3"),
    ({"experts": replace(EXPERTS, size=22)}, 4, "the experts' intermediate size=22"),
    ({"experts": replace(EXPERTS, shared_size=5)}, 2, "the shared expert's size=5"),
    ({"recurrent": RECURRENT}, 4, "linear_num_key_heads=2"),
    (
        {"experts": replace(EXPERTS, dense_layers=frozenset({1})), "intermediate_size": 81},
        4,
        "intermediate_size=81",
    ),
]


@pytest.mark.parametrize(("changes", "size"), GOOD)
def test_sizes_that_can_be_split(changes: dict[str, Any], size: int) -> None:
    model: ModelConfig = replace(MODEL, **changes)
    check_splits(model, size)


@pytest.mark.parametrize(("changes", "size", "named"), BAD)
def test_sizes_that_cannot_be_split_are_named(
    changes: dict[str, Any], size: int, named: str
) -> None:
    model: ModelConfig = replace(MODEL, **changes)
    match = f"tensor_parallel_size={size} does not divide this model's {named}$"
    with pytest.raises(ConfigError, match=match):
        check_splits(model, size)


def test_tiled_value_heads_are_not_split() -> None:
    model = replace(HYBRID, recurrent=replace(RECURRENT, is_tiled=True))
    check_splits(model, 1)
    with pytest.raises(ConfigError, match="not supported for GGUF files of this architecture"):
        check_splits(model, 2)
