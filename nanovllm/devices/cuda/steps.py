"""How steps run on CUDA, each the first way that suits it.

| the step has                | ways to run the model, in this order                             |
|-----------------------------|------------------------------------------------------------------|
| one new token in every row  | persistent kernel, graph for shared prefixes, decode graph        |
| prompts                     | prefill graph, eager                                              |

| the model ran as            | ways to sample                                                    |
|-----------------------------|------------------------------------------------------------------|
| persistent or decode graph  | sampler graph, with or without a bitmask, or launched kernels     |
| anything else               | launched kernels                                                  |
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.config import ModelConfig
from nanovllm.devices.cuda.decode_graphs import DecodeGraphs, GraphKey, Replay
from nanovllm.devices.cuda.prefill_graphs import PrefillGraphs
from nanovllm.engine.step import IntColumn, StepPlan
from nanovllm.kernels.cuda.logprobs import token_logprobs
from nanovllm.kernels.cuda.masks import keep_allowed
from nanovllm.kernels.ops import Sampling
from nanovllm.models.decoder import DecoderBody
from nanovllm.worker.forward import EagerForward, Sampled, StepLogits, is_decode

if TYPE_CHECKING:
    from nanovllm.devices.cuda.device import CudaDevice

logger = logging.getLogger(__name__)

# What is captured, the simplest first; a batch is served by the first that has all it asks for.
CAPTURED_SAMPLING = (
    Sampling.GREEDY,
    Sampling.NOISE,
    Sampling.NOISE | Sampling.MIN_P,
    Sampling.NOISE | Sampling.MIN_P | Sampling.TOP,
)

SamplerKey = tuple[GraphKey, Sampling, bool]  # whose logits, and whether a bitmask comes first


class CudaSteps:
    """Captures graphs before the first request where streams have a target, else on first use.

    There are two graphs of each sampler, which take turns and write to host memory of their own: a
    step begins before the host has read the tokens of the one before.
    """

    def __init__(
        self, eager: EagerForward, device: CudaDevice, prefill: PrefillGraphs | None
    ) -> None:
        self.eager, self.device, self.prefill = eager, device, prefill
        self.captures_ahead = device.config.is_for_streams
        self.decode = DecodeGraphs(eager, device)
        self.sampler = device.sampler(eager.tables, eager.model.config.vocab_size)
        # Sampled by graphs. Not in their pool: while it is copied, the next step may run.
        num_slots = eager.tables.num_slots
        self._tokens = torch.zeros(num_slots, dtype=torch.int32, device=device.torch_device)
        self._masks: Tensor | None = None  # pinned host memory, read by the graphs
        self._samplers: dict[SamplerKey, Iterator[tuple[Replay, Tensor]]] = {}

    def __call__(self, plan: StepPlan) -> StepLogits:
        if is_decode(plan):
            self.eager.tables.update(plan)
            self.note(plan)
            decode = self.decode
            return decode.run_persistent(plan) or decode.run_shared(plan) or decode.run_layers(plan)
        logits = (self.prefill and self.prefill(plan)) or self.eager(plan)
        self.note(plan)  # last: the device has work meanwhile
        return logits

    def sample(self, logits: StepLogits, plan: StepPlan) -> Sampled:
        key = self._sampler_of(logits, plan, None)
        return self.sampler(logits, plan) if key is None else self._replay(key, len(plan.slots))

    def replay_masked(self, logits: StepLogits, plan: StepPlan, masks: IntColumn) -> Sampled | None:
        """Sample what masks allow by one graph; None, and nothing done, if there is none for it."""
        key = self._sampler_of(logits, plan, masks)
        return None if key is None else self._replay(key, len(plan.slots))

    def _sampler_of(
        self, logits: StepLogits, plan: StepPlan, masks: IntColumn | None
    ) -> SamplerKey | None:
        """Return the graph that samples a step; None if there is none, nor may be captured."""
        asked = self.eager.tables.sampling(plan)
        sampling = next((each for each in CAPTURED_SAMPLING if asked in each), None)
        if logits.graph is None or sampling is None:
            return None
        if masks is None:
            return logits.graph, sampling, False
        if len(masks) < len(plan.slots) or not self._can_read(masks):
            return None
        key = logits.graph, sampling, True
        return key if key in self._samplers or not self.captures_ahead else None

    def _can_read(self, masks: IntColumn) -> bool:
        """Whether graphs find masks there, which mostly are where they were before."""
        if self._masks is None or self._masks.data_ptr() != masks.ctypes.data:
            if not self.device.is_pinned(masks):
                return False
            self._masks = self.device.readable(masks)
            self._samplers = {key: each for key, each in self._samplers.items() if not key[2]}
        return True

    def _replay(self, key: SamplerKey, num_rows: int) -> Sampled:
        if key not in self._samplers:
            self._capture_sampler(key)
        replay, host = next(self._samplers[key])
        replay()
        is_alone = self.sampler.group.is_alone  # else another rank's tokens come after sampling
        return Sampled(self._tokens[:num_rows], host[:num_rows] if is_alone else None)

    def note(self, plan: StepPlan) -> None:
        """Learn which sequences enter with a plan, also with one that runs elsewhere."""
        self.decode.prefixes.enter(plan.new_rows)

    def has_lost_step(self) -> bool:
        """Whether the persistent kernel gave up; it is not used again then."""
        persistent = self.decode.persistent
        if persistent is None or not persistent.gave_up():
            return False
        logger.warning(
            "A decode step gave up waiting for the rest of the device: its sequences are "
            "recomputed, and all steps run layer by layer from now on"
        )
        self.decode.persistent_tokens.clear()
        return True

    def run_every_size(self) -> None:
        """Launch every kernel that a step may have."""
        model = self.eager.model
        with one_of_each_layer(model.model, model.config):
            self._run_every_size()

    def _run_every_size(self) -> None:
        for step in self.decode.run_every_size():
            logits, host = step.values, self.device.pinned(self._tokens[: len(step.values)])
            if len(logits) == len(self._tokens):
                shape = len(logits), -(-logits.shape[1] // 32)
                masks = self.device.readable(self.device.host_memory(shape))
                keep_allowed(logits, None, masks)  # as after a step with prompts
                keep_allowed(logits, None, masks, step.slots, self.decode.padding)
                token_logprobs(logits, self._tokens, 1)
            for sampling in CAPTURED_SAMPLING:
                self.sampler.sample(step, sampling)  # as after a step with prompts
                self.sampler.sample(step, sampling, None, host)
        if self.prefill is not None:
            self.prefill.run_every_size()

    def capture_all(self) -> None:
        """Load every kernel, then capture every graph that plain requests replay.

        The largest graph comes first, since all of them share its memory.
        `capture_one` adds those for bitmasks and shared prefixes while the engine is idle. Ranks of
        a group have no such moment in common, so theirs are captured here.
        """
        logger.info("Capturing CUDA graphs, so that no request waits for one")
        self.run_every_size()
        for key in self.decode.all_keys():
            for sampling in CAPTURED_SAMPLING:
                self._capture_sampler((key, sampling, False))
        if self.prefill is not None:
            for bucket in reversed(self.prefill.sizes):
                self.prefill.graph(bucket)
        while not self.device.group.is_alone and self.capture_one():
            pass

    def capture_first(self) -> None:
        """Capture the graphs that are used most; others follow when a step first needs them."""
        for key in self.decode.first_keys():
            self.decode.graph(key)
        if self.prefill is not None:
            self.prefill.graph(self.prefill.sizes[-1])

    def capture_one(self) -> bool:
        """Capture one of the graphs that few requests replay; False if none is left to capture."""
        if not self.captures_ahead:
            return False
        if self.decode.capture_one_shared():
            return True
        keys = [(key, each, True) for key in self.decode.graphs for each in CAPTURED_SAMPLING]
        missing = [key for key in keys if key not in self._samplers]
        if self._masks is None or not missing:
            return False
        self._capture_sampler(missing[0])
        return True

    def _capture_sampler(self, key: SamplerKey) -> None:
        """Takes no memory of the graphs' pool, which would be that of the logits."""
        graph, sampling, is_masked = key
        step = self.decode.whole_step(graph)
        tokens = self._tokens[: len(step.values)]
        hosts = [self.device.pinned(tokens) for _ in range(2)]
        masks = self._masks if is_masked else None
        samples = [partial(self._sample, step, masks, sampling, tokens, host) for host in hosts]
        with self.decode.padded():  # sampling would advance sequences
            replays = [self.device.capture(sample)[0] for sample in samples]
        self._samplers[key] = cycle(zip(replays, hosts, strict=True))

    def _sample(
        self,
        step: StepLogits,
        masks: Tensor | None,
        sampling: Sampling,
        tokens: Tensor,
        host: Tensor,
    ) -> Tensor:
        if masks is not None:
            keep_allowed(step.values, None, masks, step.slots, self.decode.padding)
        return self.sampler.sample(step, sampling, tokens, host)


@contextmanager
def one_of_each_layer(body: DecoderBody, config: ModelConfig) -> Iterator[None]:
    """Let a model run its last layer and one of each kind: the others launch the same kernels."""
    layers, ropes = body.layers, body.ropes
    kinds = [
        (config.layers[i], _kind_of(layer), i + 1 == config.num_layers)
        for i, layer in enumerate(layers)
    ]
    chosen = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    body.layers = nn.ModuleList(layers[i] for i in chosen)
    body.ropes = [ropes[i] for i in chosen]
    try:
        yield
    finally:
        body.layers, body.ropes = layers, ropes


def _kind_of(layer: nn.Module) -> object:
    """What a layer consists of, and how its weights are packed: some may stay quantised."""
    packed = [getattr(module, "packed", None) for module in layer.modules()]
    return repr(layer), [_described(each) for each in packed]


def _described(value: object) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    if is_dataclass(value):
        return type(value), [_described(getattr(value, each.name)) for each in fields(value)]
    return type(value)
