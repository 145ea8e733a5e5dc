"""Cases for the expert kernels: run by Triton's interpreter on the CPU, compiled on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import torch

from nanovllm.devices.cuda import ops as cuda_ops
from nanovllm.devices.cuda.kernels import experts_grouped
from nanovllm.devices.cuda.kernels.experts_grouped import grouped_config
from nanovllm.devices.cuda.kernels.experts_pairs import route
from nanovllm.devices.cuda.ops import TritonOps
from nanovllm.ops.interface import (
    Activation,
    NormWeights,
    PackedLinear,
    ResidualStream,
    Routing,
    SharedExpert,
)
from nanovllm.ops.torch_experts import route as reference_route
from nanovllm.ops.torch_ops import TorchOps
from tests.ops.expert_layers import LAYERS, Layer

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EVEN_LAYER = Layer(10, 2, 2, 128, 64)  # fills the tiles


def check_routing(dtype: torch.dtype, device: str) -> None:
    """Experts equal the reference's, in the same order; pairs of an expert have unique ranks."""
    for layer in LAYERS:
        _, logits = layer.inputs(dtype, device)
        counts = torch.zeros(layer.num_experts, device=device, dtype=torch.int32)
        ids, weights, ranks = route(logits, layer.routing, counts)
        want_ids, want_weights = reference_route(logits, layer.routing)
        assert torch.equal(ids, want_ids.int())
        torch.testing.assert_close(weights, want_weights.float(), rtol=1e-2, atol=TOLERANCE[dtype])
        assert torch.equal(counts, ids.flatten().bincount(minlength=layer.num_experts).int())
        for expert in range(layer.num_experts):
            assert sorted(ranks[ids == expert].tolist()) == list(range(int(counts[expert])))


def check_routing_of_strange_logits(device: str) -> None:
    """Zeros of both signs are equal; NaN and infinity still choose valid experts."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[-0.0, 0.0, -1.0], [nan, 1.0, 2.0], [-nan, -nan, -nan], [-inf, -inf, -inf], [1, inf, inf]],
        device=device,
    )
    ids, _, _ = route(logits, Routing(2, is_normalized=True))
    assert ids[0].tolist() == [0, 1]
    assert ids[3].tolist() == [0, 1]
    assert ids[4].tolist() == [1, 2]
    for chosen in ids.tolist():
        assert len(set(chosen)) == 2
        assert set(chosen) <= {0, 1, 2}


def check_experts(
    dtype: torch.dtype, device: str, layers: Sequence[Layer] = LAYERS, max_pair_tokens: int = 10
) -> None:
    """Check every layer with sorted pairs and, if it has few tokens, with single pairs."""
    for layer in (*layers, EVEN_LAYER):
        with patch.object(cuda_ops, "MAX_PAIR_TOKENS", 0):
            check_layer(layer, dtype, device)
        if layer.num_tokens <= 10:
            few = replace(layer, num_tokens=min(layer.num_tokens, max_pair_tokens))
            with patch.object(cuda_ops, "MAX_PAIR_TOKENS", max_pair_tokens):
                check_layer(few, dtype, device)


def check_every_tile(dtype: torch.dtype, device: str) -> None:
    """Check the configurations for many tokens; float32 has fewer."""
    like = torch.empty(0, dtype=dtype, device=device)
    for rows_per_expert in (16, 32, 128):
        config = grouped_config(rows_per_expert, like)
        with patch.object(experts_grouped, "grouped_config", lambda *_, c=config: c):
            for layer in (EVEN_LAYER, Layer(140, 1, 1, 72, 20)):
                check_layer(layer, dtype, device)


def check_a_broken_token_changes_no_other(dtype: torch.dtype, device: str) -> None:
    layer = Layer(3, 6, 3, 40, 24)
    experts = TritonOps().pack_experts(*layer.weights(dtype, device), layer.routing)
    for max_pair_tokens in (0, 3):
        with patch.object(cuda_ops, "MAX_PAIR_TOKENS", max_pair_tokens):
            x, logits = layer.inputs(dtype, device)
            want = experts(x, logits)
            x[1], logits[1] = float("nan"), float("nan")
            got = experts(x, logits)
        assert torch.equal(got[::2], want[::2])
        assert bool(got[1].isnan().all())


def check_layer(layer: Layer, dtype: torch.dtype, device: str) -> None:
    weights, inputs = layer.weights(dtype, device), layer.inputs(dtype, device)
    want, got = (
        ops.pack_experts(*weights, layer.routing)(*inputs) for ops in (TorchOps(), TritonOps())
    )
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_after_norm(device: str) -> None:
    """Experts after a norm equal the reference, with and without an update or a shared expert.

    The dtype is float32, because rounding could otherwise choose a different expert.
    """
    dtype = torch.float32
    one, many, two = Layer(1, 6, 1, 40, 24), Layer(1, 60, 8, 70, 33, False), Layer(2, 5, 2, 48, 16)
    for layer, has_update, has_shared in (
        (one, False, True),
        (one, True, False),
        (many, False, False),
        (two, True, True),
    ):
        x, _ = layer.inputs(dtype, device)
        generator = torch.Generator().manual_seed(5)
        router = torch.randn(layer.num_experts, layer.hidden, generator=generator).to(device, dtype)
        norm = NormWeights(torch.rand(layer.hidden, generator=generator).to(device) + 0.5, 1e-6)
        results = []
        for ops in (TorchOps(), TritonOps()):
            if isinstance(ops, TritonOps):
                linear = cuda_ops.CudaLinear(ops, router, None, None)
            else:
                linear = ops.pack_linear(router, None, None, allow_copy=False)
            experts = ops.pack_experts(*layer.weights(dtype, device), layer.routing)
            shared = None
            if has_shared:
                shared = shared_expert(ops, layer.size, layer.hidden, dtype, device)
            for _ in range(1 + has_update):  # the second run shows that no state is left behind
                hidden = ResidualStream(x.clone(), x.flip(1) if has_update else None)
                result = experts.after_norm(hidden, norm, linear, shared)
            results.append(result)
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_shared_expert(dtype: torch.dtype, device: str) -> None:
    """A shared expert as large as the others, which runs with them, or of another size."""
    for size, max_pair_tokens in ((24, 3), (24, 0), (16, 3)):
        layer = Layer(3, 6, 2, 40, 24)
        experts = TritonOps().pack_experts(*layer.weights(dtype, device), layer.routing)
        x, logits = layer.inputs(dtype, device)
        want = TorchOps().pack_experts(*layer.weights(dtype, device), layer.routing)
        reference = shared_expert(TorchOps(), size, 40, dtype, device)
        with patch.object(cuda_ops, "MAX_PAIR_TOKENS", max_pair_tokens):
            got = experts(x, logits, shared_expert(TritonOps(), size, 40, dtype, device))
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            got, want(x, logits, reference), rtol=tolerance, atol=2 * tolerance
        )


def shared_expert(
    ops: TorchOps | TritonOps, size: int, hidden: int, dtype: torch.dtype, device: str
) -> SharedExpert:
    """Return a shared expert with random weights, the same for all ops."""
    generator = torch.Generator().manual_seed(size)
    linears: tuple[tuple[int, int, Activation | None], ...]
    linears = (2 * size, hidden, "silu"), (hidden, size, None), (1, hidden, None)
    packed: list[PackedLinear] = []
    for num_out, num_in, activation in linears:
        weight = (0.3 * torch.randn(num_out, num_in, generator=generator)).to(device, dtype)
        if isinstance(ops, TritonOps):
            packed.append(cuda_ops.CudaLinear(ops, weight, None, activation))
        else:
            packed.append(ops.pack_linear(weight, None, activation, allow_copy=False))
    return SharedExpert(*packed)


def check_graph(layer: Layer) -> None:
    """A replay reads new inputs, which are routed to other experts."""
    dtype = torch.bfloat16
    experts = TritonOps().pack_experts(*layer.weights(dtype, "cuda"), layer.routing)
    x, logits = layer.inputs(dtype, "cuda")
    static = x.clone(), logits.clone()
    experts(*static)  # compiles the kernels before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*static)
    for shift in (0, 7, 0):
        static[0].copy_(x.roll(shift, dims=1))
        static[1].copy_(logits.roll(shift, dims=1))
        graph.replay()
        assert torch.equal(out, experts(*static))


def main(which: str) -> None:
    if which == "rest":
        # The routing check covers all layers; the interpreter is slow, because each pair is a CTA.
        check_experts(torch.float32, "cpu", LAYERS[::2], max_pair_tokens=2)
        check_every_tile(torch.float16, "cpu")
        check_a_broken_token_changes_no_other(torch.float32, "cpu")
        return
    check_routing(torch.float16, "cpu")
    check_routing_of_strange_logits("cpu")
    check_after_norm("cpu")
    check_shared_expert(torch.float32, "cpu")


if __name__ == "__main__":
    main(sys.argv[1])
