"""What a worker asks of the device it runs on; `backends/` has one for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.kv_layout import KVCacheSpec
from nanovllm.kernels.ops import Ops
from nanovllm.models.decoder import DecoderModel
from nanovllm.platforms.base import Platform
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.runner import ModelRunner, Sampler
from nanovllm.worker.tables import SlotTables


class Backend(Protocol):
    """One rank's device, and the ways to work on it."""

    @property
    def platform(self) -> Platform: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""

    @property
    def group(self) -> TPGroup:
        """The ranks that share the model."""

    @property
    def ops(self) -> Ops:
        """The work between attention calls."""

    @property
    def attention(self) -> AttentionBackend:
        """Attention over the paged cache."""

    def sampler(self, tables: SlotTables) -> Sampler:
        """Make what draws tokens from logits."""

    def prepare(
        self, model: DecoderModel, cache: KVCacheSpec, largest_step: Callable[[], EagerForward]
    ) -> None:
        """Build and compile what steps of a loaded model need, before memory is measured."""

    def runner(self, eager: EagerForward) -> ModelRunner:
        """Make what runs steps: recorded ones where the device gains by them."""


def choose_dtype(asked: str, checkpoint_dtype: str, platform: Platform) -> torch.dtype:
    if asked == "auto":
        return platform.choose_dtype(checkpoint_dtype)
    dtype: torch.dtype = getattr(torch, asked)
    return dtype
