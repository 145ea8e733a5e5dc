"""DraftModel: a smaller model that generates draft tokens, which the target model verifies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import DraftUpdate, IntColumn, StepPlan
from nanovllm.errors import ConfigError
from nanovllm.models.registry import read_config
from nanovllm.sampling_params import NO_TOKEN
from nanovllm.worker.device_interface import Device
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.load_model import LoadedModel, load_model
from nanovllm.worker.memory_needs import MemoryNeeds
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.worker import Worker


class DraftModel:
    """Shares the InputBatch of the target model, and has a KV cache with the same block ids.

    The draft model runs every token that the target runs. So its cache is complete wherever the
    target's is: in cached prefixes and after a preemption.
    """

    runner: ModelRunner

    def __init__(self, path: str) -> None:
        self._path = path

    def load(self, worker: Worker) -> MemoryNeeds:
        self._loaded = load_draft_model(
            self._path, worker.config, worker.model_config, worker.device
        )
        return self._loaded.needs

    def profile(self) -> None:
        """Do nothing: its steps are assumed to need less memory than the model's."""

    def attach(self, runner: ModelRunner, num_blocks: int, input_batch: InputBatch) -> None:
        self.runner = self._loaded.runner(num_blocks, input_batch)
        runner.stages.append(self.run)
        runner.all_steps += self.runner.all_steps

    def run(self, plan: StepPlan) -> StepPlan:
        """Generate the draft tokens of a plan; return the plan with which the target verifies them.

        A draft token is sampled with the parameters of its request and the random numbers of its
        position. So the target samples the same token if both models agree.
        """
        num_drafts = np.maximum(plan.num_logits - 1, 0)
        most = int(num_drafts.max(initial=0))
        ends = plan.starts + plan.counts - num_drafts
        step = replace(
            plan,
            counts=plan.counts - num_drafts,
            num_logits=np.minimum(plan.num_logits, 1),
            draft_updates=[replace(update, token_ids=[]) for update in plan.draft_updates],
        )
        for index in range(most):
            self.runner.sampler(self.runner.forward(step), step)
            is_row = num_drafts > index
            step = decode_plan(plan.slots[is_row], ends[is_row] + index)
        # This writes the KV of the last draft tokens or, without draft tokens, of all rows.
        self.runner.forward(step)
        if not most:
            return plan
        # The sampler has also advanced `lengths` of the sampled slots. Reset each to the number of
        # known tokens plus draft tokens, as the target model expects.
        is_sampled = plan.num_logits > 0
        columns = plan.slots[is_sampled], ends[is_sampled], num_drafts[is_sampled]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        updates = [DraftUpdate(slot, end, [NO_TOKEN] * count) for slot, end, count in rows]
        return replace(plan, draft_updates=updates)


def load_draft_model(
    path: str, config: EngineConfig, target: ModelConfig, device: Device
) -> LoadedModel:
    """Load a draft model with the target's options, except revision and quantization."""
    config = replace(config, model=path, revision=None, quantization=None, speculative_config=None)
    has_weights = config.load_format != "dummy"
    checkpoint = find_checkpoint(path, need_weights=has_weights, need_tokenizer=False)
    model_config = read_config(checkpoint.config)
    if model_config.recurrent is not None:
        raise ConfigError(f"the draft model {path} has recurrent layers; use another one")
    if model_config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {path} has {model_config.vocab_size} token ids, but the target "
            f"has {target.vocab_size}; use a draft model with the same vocabulary"
        )
    return load_model(config, model_config, checkpoint, device.for_draft_model(config), target)


def decode_plan(slots: IntColumn, positions: IntColumn) -> StepPlan:
    """Return the plan that runs one token of each slot and samples the next."""
    ones = np.ones_like(slots)
    return StepPlan(slots, positions, ones, ones, [], [], [], len(slots))
