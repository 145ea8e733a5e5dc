"""Check on a CPU that engines launch only kernels that are compiled ahead.

    python -m tests.devices.cuda.launched_kernels

Every launch is recorded and suppressed, so the completions are garbage; the launches do not depend
on them. This needs its own process, because Triton caches what it knows about the device.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from transformers import LlamaConfig
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from nanovllm import LLM, SamplingParams
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cuda import device
from nanovllm.devices.cuda.graph_pool import Graph
from tests.checkpoint.tiny_quantized import float_kind, write_twins
from tests.checkpoints import make_checkpoint, shared_checkpoint
from tests.devices import FunctionPool
from tests.devices.cuda.interpreted_engine import InterpretedDevice, interpreted
from tests.quantized_twins import EVEN

OPTIONS = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 1024}


class NoDevice:
    """The part of a Triton driver that is needed to specialize kernels."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launches:
    """Records launched kernels, separately for the steps that are compiled ahead."""

    def __init__(self) -> None:
        self.ahead: set[tuple[str, str]] = set()
        self.own: set[tuple[str, str]] = set()
        self.noted = self.own

    def note(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        self.noted.add((fn.name, compile["specialization_data"]))
        return True

    def compile_ahead(self, on: Any, model: object, largest_step: Callable[[], Any]) -> None:
        self.noted = self.ahead
        on.warm_up(largest_step())
        self.noted = self.own


def check(path: Path, longest: int = 500, **options: Any) -> None:
    """Run many short prompts, and prompts of all lengths, some together with decode rows."""
    launches, rng = Launches(), random.Random(0)
    with (
        interpreted(),
        mock.patch.object(knobs.runtime, "jit_cache_hook", launches.note),
        mock.patch.object(
            InterpretedDevice, "compile_ahead", lambda *args: launches.compile_ahead(*args)
        ),
        mock.patch.object(device, "build", return_value=None),
        # A replay launches nothing that its capture has not launched.
        mock.patch.object(FunctionPool, "capture", lambda _, run: Graph(lambda: None, run())),
        # GEMMs of torch launch none of our kernels, and take minutes on CPUs that emulate bfloat16.
        mock.patch.object(functional, "linear", lambda x, weight, bias=None: zeros(x, weight)),
        mock.patch.object(torch.Tensor, "addmm_", lambda total, *_, **__: total),
        LLM(path, **{**OPTIONS, **options}) as llm,
    ):
        for most in (3, 9, 100, longest):
            prompts = [[1] * rng.randint(1, most) for _ in range(45)]
            kinds = [
                {"max_tokens": rng.randint(1, 5), "top_p": rng.choice((1.0, 0.9))} for _ in prompts
            ]
            params = [SamplingParams(ignore_eos=True, **kind) for kind in kinds]
            llm.generate(prompts, params, use_tqdm=False)
        for num_decodes in (1, 3, 9):
            run_beside_decode_rows(llm, num_decodes, longest)
    assert len(launches.own) > 20
    assert sorted(name for name, _ in launches.own - launches.ahead) == []


def zeros(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(*x.shape[:-1], len(weight))


def run_beside_decode_rows(llm: LLM, num_decodes: int, length: int) -> None:
    """Start some decode rows, then admit more prompts at once than any graph has room for."""
    params = SamplingParams(ignore_eos=True, max_tokens=4)
    for _ in range(num_decodes):
        llm.add_request([1] * 5, params)
    for _ in range(2):
        llm.added.step()
    for index in range(11):
        prompt = [num_decodes, index] * (length // 2)  # unique, or it would be in the prefix cache
        llm.add_request(prompt, params)
    while not llm.added.is_finished():
        llm.added.step()


def main() -> None:
    torch.set_num_threads(1)
    driver.set_active(NoDevice())
    with tempfile.TemporaryDirectory() as folder:
        path = shared_checkpoint(Path(folder), "qwen3-moe").path
        check(path, max_num_seqs=20, max_num_batched_tokens=8192, num_kvcache_blocks=99)
        path = shared_checkpoint(Path(folder), "gemma2").path
        check(path, max_num_seqs=7, max_num_batched_tokens=300, kvcache_block_size=32)
        # 13 blocks per sequence: the tables of its groups begin at addresses of any alignment.
        path = shared_checkpoint(Path(folder), "gemma3-six").path
        options = {"max_num_batched_tokens": 300, "kvcache_block_size": 32, "max_model_len": 410}
        check(path, 380, max_num_seqs=7, **options)
        path = shared_checkpoint(Path(folder), "qwen3.5").path
        check(path, max_num_seqs=7, max_num_batched_tokens=300, num_kvcache_blocks=99)
        path = shared_checkpoint(Path(folder), "qwen3").path
        check(path, max_num_seqs=20, num_kvcache_blocks=99, kv_cache_dtype="fp8")
        config = LlamaConfig(**{**EVEN, "num_hidden_layers": 3, "max_position_embeddings": 1024})
        plain = make_checkpoint(Path(folder) / "plain", config).path
        ignored = {"ignore": [r"re:model\.layers\.1\..*", "lm_head"]}  # one layer is not quantized
        kind = float_kind("channel", "channel")
        path = write_twins(Path(folder) / "codes", plain, kind, ignored).quantized
        with mock.patch.object(CpuDevice, "reads_quantized", return_value=True):
            check(path, max_num_seqs=20, num_kvcache_blocks=99)


if __name__ == "__main__":
    main()
