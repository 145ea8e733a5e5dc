"""Force an engine to generate given tokens, and record its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.engine.step import StepPlan
from nanovllm.worker.forward import Forward, StepLogits, sampled_rows
from tests.devices import runner_of

Ids = list[list[int]]


def forced_logits(llm: LLM, prompts: Ids, answers: Ids) -> list[Tensor]:
    """Return the logits of each completion's tokens, [len(completion), vocab_size] each."""
    runner = runner_of(llm)
    before = runner.forward
    forced = ForcedTokens(before, [p + a for p, a in zip(prompts, answers, strict=True)])
    params = [
        SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True, seed=index)
        for index, answer in enumerate(answers)
    ]
    runner.forward = forced
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        runner.forward = before
    assert [output.token_ids for output in outputs] == answers
    return [torch.stack(rows) for rows in forced.logits]


class ForcedTokens:
    """A Forward that records logits, then masks all tokens but the required next one.

    `sequences` holds each prompt with its completion; a request's seed is its index there.
    """

    def __init__(self, forward: Forward, sequences: Ids) -> None:
        self.forward = forward
        self.sequences = sequences
        self.logits: list[list[Tensor]] = [[] for _ in sequences]
        self._owners: dict[int, int] = {}  # slot -> index

    def __call__(self, plan: StepPlan) -> StepLogits:
        for row in plan.new_rows:
            self._owners[row.slot] = row.seed
        step = self.forward(plan)
        captured = step.values.to("cpu", torch.float64, copy=True)
        step.values.fill_(-torch.inf)
        slots, positions = (column.tolist() for column in sampled_rows(plan))
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            index = self._owners[slot]
            self.logits[index].append(captured[row])
            step.values[row, self.sequences[index][position]] = 0.0
        return step
