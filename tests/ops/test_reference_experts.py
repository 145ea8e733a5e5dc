"""The reference for experts equals transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanovllm.ops.interface import Routing
from nanovllm.ops.torch_experts import route
from nanovllm.ops.torch_ops import TorchOps


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "qwen3-normalized"])
@pytest.mark.parametrize("num_tokens", [1, 30])
def test_equals_transformers(kind: str, num_tokens: int) -> None:
    torch.manual_seed(0)
    if kind == "mixtral":
        mixtral = MixtralConfig(hidden_size=48, intermediate_size=40, num_local_experts=6)
        block, top_k = MixtralSparseMoeBlock(mixtral), mixtral.num_experts_per_tok
    else:
        qwen3 = Qwen3MoeConfig(
            hidden_size=48,
            moe_intermediate_size=40,
            num_experts=12,
            num_experts_per_tok=5,
            norm_topk_prob=kind == "qwen3-normalized",
        )
        block, top_k = Qwen3MoeSparseMoeBlock(qwen3), 5
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(num_tokens, 48)
    gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
    routing = Routing(top_k, is_normalized=kind != "qwen3")
    with torch.inference_mode():
        got = TorchOps().pack_experts(gate_up, down, routing)(x, x @ block.gate.weight.T)
        want = block(x[None])[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_equal_logits_choose_the_lower_index() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 9.0, 0.0]])
    ids, weights = route(logits, Routing(2, is_normalized=True))
    assert ids.tolist() == [[1, 2], [0, 1], [2, 0]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    _, shares = route(logits, Routing(2, is_normalized=False))
    assert shares[1].tolist() == [0.25, 0.25]
