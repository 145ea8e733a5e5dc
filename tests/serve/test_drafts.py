"""A server with speculative decoding answers as one without, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm import AsyncLLM
from nanovllm.features.speculation.drafter import StepCosts, Trial
from tests.serve.running import Running, running
from tests.serve.test_chat import as_gathered, gather
from tests.serve.test_constraints import NO_THOUGHTS, SCHEMA, TOOLS

CASES: dict[str, dict[str, Any]] = {
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    },
    "tools": {"tools": TOOLS, "tool_choice": "required"},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"70": 3}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "samples": {"n": 3, "temperature": 0.7},
    "stop": {"stop": ["a", "}"]},
    "greedy": {"temperature": 0},
}


@pytest.fixture(scope="module")
def drafting(server: Running) -> Iterator[Running]:
    """A server whose drafts always pay off, because steps of any size take equally long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCosts, "is_known", lambda self, num_rows: True)
        patch.setattr(StepCosts, "of", lambda self, num_rows: 1.0)
        patch.setattr(Trial, "add", lambda self, num_tokens, seconds: None)
        llm = AsyncLLM(
            server.llm.config.model,
            in_process=True,  # child processes would not be patched
            device="cpu",
            dtype="float32",
            max_model_len=1024,
            kvcache_block_size=16,
            num_kvcache_blocks=256,
            max_num_seqs=16,
            speculative_config={"method": "suffix"},
        )
        try:
            with running(llm) as found:
                yield found
        finally:
            llm.close()


def ask(server: Running, **fields: Any) -> Any:
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 80, "seed": 5, **fields}
    return server.openai.chat.completions.create(model="tiny", **fields, extra_body=NO_THOUGHTS)


def num_accepted(usage: Any) -> int:
    return int(usage.completion_tokens_details.accepted_prediction_tokens)


@pytest.mark.parametrize("case", CASES)
def test_drafts_change_no_response(server: Running, drafting: Running, case: str) -> None:
    """The second response repeats the first one, which the store of outputs can draft."""
    want = [as_gathered(choice) for choice in ask(server, **CASES[case]).choices]
    for _ in range(2):
        response = ask(drafting, **CASES[case])
        assert [as_gathered(choice) for choice in response.choices] == want
    assert num_accepted(response.usage) > 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    choices, usages = gather(ask(drafting, **CASES[case], **options))
    assert [choices[index] for index in range(len(want))] == want
    assert usages[-1].completion_tokens == response.usage.completion_tokens
    assert num_accepted(usages[-1]) > 0


def test_usage_and_metrics_count_the_same_drafts(drafting: Running) -> None:
    def counters() -> list[float]:
        samples = dict(
            line.rsplit(" ", 1) for line in drafting.http.get("/metrics").text.splitlines()
        )
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return [
            sum(
                float(value)
                for key, value in samples.items()
                if key.startswith(f"vllm:spec_decode_num_{name}_total")
            )
            for name in names
        ]

    before = counters()
    usages = [ask(drafting, temperature=0.5, seed=9, n=2).usage for _ in range(3)]
    details = [usage.completion_tokens_details for usage in usages]
    accepted = sum(each.accepted_prediction_tokens for each in details)
    rejected = sum(each.rejected_prediction_tokens for each in details)
    num_rows, num_drafts, num_right = (
        new - old for new, old in zip(counters(), before, strict=True)
    )
    assert 0 < accepted == num_right
    assert accepted + rejected == num_drafts >= num_rows > 0
