"""Run steps on CUDA. Each step uses the first option that supports it:

| the step has                | options to run the model, in this order                          |
|-----------------------------|------------------------------------------------------------------|
| only decode rows            | persistent kernel, graph for shared prefixes, decode graph       |
| prefill rows                | prefill graph, eager                                             |

| the model ran as            | options to sample                                                |
|-----------------------------|------------------------------------------------------------------|
| persistent or decode graph  | sampler graph (with or without a bitmask), eager                 |
| anything else               | eager                                                            |
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import cycle, product
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.config import ModelConfig
from nanovllm.devices.cuda.decode_graphs import DecodeBucket, DecodeGraphs
from nanovllm.devices.cuda.graph_pool import Graph
from nanovllm.devices.cuda.kernels.masks import apply_token_bitmask
from nanovllm.devices.cuda.kernels.token_logprobs import token_logprobs
from nanovllm.devices.cuda.prefill_graphs import PrefillGraphs
from nanovllm.engine.step import IntColumn, StepPlan
from nanovllm.models.decoder import DecoderBody, DecoderModel
from nanovllm.ops.interface import Sampling
from nanovllm.worker.forward import EagerForward, Sampled, StepLogits, is_decode

if TYPE_CHECKING:
    from nanovllm.devices.cuda.device import CudaDevice

logger = logging.getLogger(__name__)

# Combinations of sampling features that are captured, simplest first. A batch uses the first
# combination that includes all features it needs.
CAPTURED_SAMPLING = (
    Sampling.GREEDY,
    Sampling.RANDOM,
    Sampling.RANDOM | Sampling.MIN_P,
    Sampling.RANDOM | Sampling.MIN_P | Sampling.TOP_K_TOP_P,
)

# (bucket whose graphs compute the logits, sampling features, whether a bitmask is applied)
SamplerKey = tuple[DecodeBucket, Sampling, bool]


class CudaSteps:
    """Replays CUDA graphs.

    With a latency target, most graphs are captured at startup; otherwise, most on first use.

    Each sampler is captured twice. The two graphs alternate and write to separate host buffers,
    because a step starts before the host has read the tokens of the previous step.
    """

    def __init__(
        self, eager: EagerForward, device: CudaDevice, prefill: PrefillGraphs | None
    ) -> None:
        self.eager, self.device, self.prefill = eager, device, prefill
        self.captures_ahead = device.config.optimizes_latency
        self.decode = DecodeGraphs(eager, device)
        self.sampler = device.sampler(eager.input_batch, eager.model.config.vocab_size)
        # Output of the sampler graphs, which must not allocate (see `_capture_sampler`).
        num_slots = eager.input_batch.num_slots
        self._tokens = torch.zeros(num_slots, dtype=torch.int32, device=device.torch_device)
        self._masks: Tensor | None = None  # bitmasks in pinned host memory, read by the graphs
        self._samplers: dict[SamplerKey, Iterator[tuple[Graph, Tensor]]] = {}

    def __call__(self, plan: StepPlan) -> StepLogits:
        if is_decode(plan):
            self.eager.input_batch.update(plan)
            self.note(plan)
            decode = self.decode
            return decode.run_persistent(plan) or decode.run_shared(plan) or decode.run_layers(plan)
        logits = (self.prefill and self.prefill(plan)) or self.eager(plan)
        self.note(plan)  # after the launch, so that the device does not wait for it
        return logits

    def sample(self, logits: StepLogits, plan: StepPlan) -> Sampled:
        return self._replay_sampler(logits, plan, is_masked=False) or self.sampler(logits, plan)

    def replay_masked(self, logits: StepLogits, plan: StepPlan, masks: IntColumn) -> Sampled | None:
        """Apply bitmasks and sample with one graph; return None if there is no such graph."""
        if logits.graph is None or len(masks) < len(plan.slots) or not self._can_read(masks):
            return None
        return self._replay_sampler(logits, plan, is_masked=True)

    def _replay_sampler(
        self, logits: StepLogits, plan: StepPlan, *, is_masked: bool
    ) -> Sampled | None:
        asked = self.eager.input_batch.sampling(plan)
        sampling = next((each for each in CAPTURED_SAMPLING if asked in each), None)
        if logits.graph is None or sampling is None:
            return None
        key = logits.graph, sampling, is_masked
        if key not in self._samplers:
            if is_masked and self.captures_ahead:
                return None
            self._capture_sampler(key)
        graph, host = next(self._samplers[key])
        graph.replay()
        num_rows = len(plan.slots)
        is_alone = self.sampler.group.is_alone  # tensor-parallel ranks do not fill `host`
        return Sampled(self._tokens[:num_rows], host[:num_rows] if is_alone else None)

    def _can_read(self, masks: IntColumn) -> bool:
        """Return whether graphs can read these bitmasks: whether they are in pinned memory.

        If the address of the bitmasks changed, drop the graphs that read the old address.
        """
        if self._masks is None or self._masks.data_ptr() != masks.ctypes.data:
            if not self.device.is_pinned(masks):
                return False
            self._masks = self.device.readable(masks)
            self._samplers = {key: each for key, each in self._samplers.items() if not key[2]}
        return True

    def note(self, plan: StepPlan) -> None:
        """Record the KV-cache blocks of new sequences, to find shared prefixes in later steps."""
        self.decode.prefixes.enter(plan.new_rows)

    def has_lost_step(self) -> bool:
        """Return whether the persistent kernel timed out; if so, disable it."""
        persistent = self.decode.persistent
        if persistent is None or not persistent.gave_up():
            return False
        logger.warning(
            "The persistent decode kernel timed out waiting for its other CTAs: the sequences of "
            "the step are recomputed, and from now on decode steps run layer by layer"
        )
        self.decode.persistent_tokens.clear()
        return True

    def warm_up(self) -> None:
        """Launch the kernels of decode steps, samplers and, with prefill graphs, prefill steps."""
        model = self.eager.model
        if not isinstance(model, DecoderModel):
            return self._warm_up()
        with one_of_each_layer(model.model, model.config):
            self._warm_up()

    def _warm_up(self) -> None:
        for step in self.decode.warm_up():
            logits, host = step.values, self.device.pinned(self._tokens[: len(step.values)])
            if len(logits) == len(self._tokens):
                shape = len(logits), -(-logits.shape[1] // 32)
                masks = self.device.readable(self.device.host_memory(shape))
                apply_token_bitmask(logits, None, masks)  # variant used after prefill
                apply_token_bitmask(logits, None, masks, step.slots, self.decode.padding)
                token_logprobs(logits, self._tokens, 1)
            for sampling in CAPTURED_SAMPLING:
                self.sampler.sample(step, sampling)  # variant used after prefill
                self.sampler.sample(step, sampling, None, host)
        if self.prefill is not None:
            self.prefill.warm_up()

    def capture_all(self) -> None:
        """Load the kernels, then capture all graphs but those for bitmasks and shared prefixes.

        The largest graph comes first, since all graphs share its memory. `capture_one` adds the
        others while the engine is idle. The ranks of a tensor-parallel group are not idle at the
        same moment: they capture graphs for shared prefixes here, and have none for bitmasks.
        """
        logger.info("Capturing CUDA graphs at startup, so that no request waits for a capture")
        self.warm_up()
        for bucket in self.decode.all_buckets():
            self.capture(bucket)
        if self.prefill is not None:
            for size in reversed(self.prefill.sizes):
                self.prefill.graph(size)
        while not self.device.group.is_alone and self.capture_one():
            pass

    def capture_first(self) -> None:
        """Capture the most used graphs; the others are captured when a step first needs them."""
        for bucket in self.decode.first_buckets():
            self.decode.capture(bucket)
        if self.prefill is not None:
            self.prefill.graph(self.prefill.sizes[-1])

    def capture(self, bucket: DecodeBucket) -> None:
        """Capture the graphs of ordinary decode steps of a bucket."""
        self.decode.capture(bucket)
        for sampling in CAPTURED_SAMPLING:
            self._capture_sampler((bucket, sampling, False))

    def capture_one(self) -> bool:
        """Capture one graph for shared prefixes or bitmasks; return False if there is none left."""
        return self.captures_ahead and next(self._capture_rare(), False)

    def _capture_rare(self) -> Iterator[bool]:
        """Capture the missing graphs for shared prefixes and bitmasks; yield True after each."""
        yield from self.decode.capture_shared()
        buckets = [] if self._masks is None else self.decode.all_buckets()
        for key in product(buckets, CAPTURED_SAMPLING, [True]):
            if key not in self._samplers:
                self._capture_sampler(key)
                yield True

    def _capture_sampler(self, key: SamplerKey) -> None:
        """Capture both graphs of a sampler.

        They must not allocate from the graph pool, whose memory holds the logits.
        """
        bucket, sampling, is_masked = key
        step, masks = self.decode.whole_step(bucket), self._masks if is_masked else None
        tokens = self._tokens[: len(step.values)]
        hosts = [self.device.pinned(tokens) for _ in range(2)]

        def sample(host: Tensor) -> Tensor:
            if masks is not None:
                apply_token_bitmask(step.values, None, masks, step.slots, self.decode.padding)
            return self.sampler.sample(step, sampling, tokens, host)

        with self.decode.padded():  # a capture may run the sampler, which appends tokens to slots
            graphs = [self.device.graph_pool.capture(partial(sample, host)) for host in hosts]
        self._samplers[key] = cycle(zip(graphs, hosts, strict=True))


@contextmanager
def one_of_each_layer(body: DecoderBody, config: ModelConfig) -> Iterator[None]:
    """Reduce a model to its last layer and one layer of each kind inside the `with` block.

    The other layers use the same kernels.
    """
    layers, ropes = body.layers, body.ropes
    kinds = [
        (config.layers[i], _kind_of(layer), i + 1 == len(config.layers))
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
    """Describe a layer's modules and packed weights, which determine the kernels it uses."""
    packed = [getattr(module, "packed", None) for module in layer.modules()]
    return repr(layer), [_described(each) for each in packed]


def _described(value: object) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    if is_dataclass(value):
        return type(value), [_described(getattr(value, each.name)) for each in fields(value)]
    return type(value)
