"""Run the same workloads with nanovllm, transformers and vLLM, each in its own process."""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import model_path
from benchmarks.workloads import Workload
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.gguf import BLOCK_TYPES_KEY
from nanovllm.checkpoint.gguf_tensors import list_gguf
from nanovllm.checkpoint.hub import ALIASES
from nanovllm.config import EngineConfig
from nanovllm.errors import NanovllmError
from nanovllm.models.registry import read_config_for

NUM_WARM_UP_TOKENS = 8  # per output


@dataclass(frozen=True, slots=True)
class Engine:
    dtype: str
    run: Callable[[Workload], int]  # returns the number of new tokens
    close: Callable[[], object] = lambda: None


class EngineProcess:
    """An engine in a fresh process, free of other engines' memory and compiled kernels."""

    def __init__(self, name: str, args: argparse.Namespace, workloads: list[Workload]) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = theirs, ENGINES[name], args, workloads
        self._process = context.Process(target=serve, args=arguments)
        self._process.start()
        theirs.close()
        self.dtype: str = self._receive()

    def run(self, index: int) -> float:
        """Run a workload; return the seconds from the call to the last token."""
        self._connection.send(index)
        seconds: float = self._receive()
        return seconds

    def end(self) -> int:
        """Close the engine; return its peak memory in bytes."""
        self._connection.send(None)
        peak_bytes: int = self._receive()
        return peak_bytes

    def hang_up(self) -> None:
        """Close the connection, which ends the process, and wait for it."""
        self._connection.close()
        self._process.join()

    def _receive(self) -> Any:
        try:
            message = self._connection.recv()
        except EOFError:
            raise SystemExit(1) from None  # the child has printed its error
        if isinstance(message, NanovllmError):
            raise message
        return message


def serve(
    connection: Connection,
    start: Callable[[argparse.Namespace, list[Workload]], Engine],
    args: argparse.Namespace,
    workloads: list[Workload],
) -> None:
    try:
        engine = start(args, workloads)
        for workload in workloads:
            max_tokens = [min(count, NUM_WARM_UP_TOKENS) for count in workload.max_tokens]
            engine.run(replace(workload, max_tokens=max_tokens))
        connection.send(engine.dtype)
        while (index := connection.recv()) is not None:
            began = time.perf_counter()
            num_tokens = engine.run(workloads[index])
            connection.send(time.perf_counter() - began)
            assert num_tokens == workloads[index].num_new_tokens, "an output has the wrong length"
        # GPU memory is measured while the engine is open; the RSS of its workers, after they ended.
        peak_bytes = bytes_in_use(args.device)
        engine.close()
        connection.send(max(peak_bytes, bytes_in_use(args.device)))
    except NanovllmError as error:
        connection.send(error)
    except (EOFError, KeyboardInterrupt):
        pass


def bytes_in_use(device: str) -> int:
    """Return the used memory of the first GPU, or the peak RSS of this process and its workers."""
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        return total - free
    unit = 1 if sys.platform == "darwin" else 1024
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in processes) * unit


def start_fallback(args: argparse.Namespace, workloads: list[Workload]) -> Engine:
    """Start our engine with transformers' model code; GGUF files are converted first."""
    has_weights = args.load_format != "dummy"
    checkpoint = find_checkpoint(model_path(args.model), need_weights=has_weights)
    if checkpoint.is_gguf:
        folder = tempfile.mkdtemp()
        load_transformers(args.model, "cpu", args.dtype).save_pretrained(folder)
        args.model = folder
    return start_nanovllm(args, workloads, model_impl="transformers")


def start_nanovllm(
    args: argparse.Namespace, workloads: list[Workload], model_impl: str = "auto"
) -> Engine:
    """Start our engine with only the slots and KV-cache blocks that the workloads need."""
    block_size = EngineConfig("").kvcache_block_size
    num_blocks = max(sum(-(-n // block_size) for n in work.total_lens) for work in workloads)
    llm = LLM(
        model_path(args.model),
        device=args.device,
        max_num_seqs=max(len(work.prompts) for work in workloads),
        num_kvcache_blocks=num_blocks,
        model_impl=model_impl,
        **shared_options(args, workloads),
    )
    generate = partial(run_generate, llm.generate, SamplingParams, args.temperature)
    dtype = llm.engine.info.dtype
    return Engine(dtype, lambda work: sum(len(x.token_ids) for x in generate(work)), llm.close)


def start_vllm(args: argparse.Namespace, workloads: list[Workload]) -> Engine:
    from vllm import LLM as TheirLLM
    from vllm import SamplingParams as TheirParams

    model = ALIASES[args.model].hub_id if args.model in ALIASES else args.model
    if (config := Path(model_path(model))).suffix == ".json":  # vLLM accepts folders only
        model = tempfile.mkdtemp()
        shutil.copy(config, Path(model) / "config.json")
    llm = TheirLLM(model, **shared_options(args, workloads))
    generate = partial(run_generate, llm.generate, TheirParams, args.temperature)
    return Engine(args.dtype, lambda work: sum(len(x.outputs[0].token_ids) for x in generate(work)))


def shared_options(args: argparse.Namespace, workloads: list[Workload]) -> dict[str, Any]:
    """Return the options of vLLM and nanovllm, which have the same names."""
    names = ("dtype", "load_format", "tensor_parallel_size")
    longest = max(max(work.total_lens) for work in workloads)
    options = {name: getattr(args, name) for name in names}
    return {**options, "skip_tokenizer_init": True, "max_model_len": longest}


def run_generate(
    generate: Callable[..., list[Any]], params: type, temperature: float, workload: Workload
) -> list[Any]:
    salt = uuid.uuid4().hex  # prevents prefix-cache hits between passes
    prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in workload.prompts]
    options = {"temperature": temperature, "ignore_eos": True}
    settings = [params(max_tokens=count, **options) for count in workload.max_tokens]
    return generate(prompts, settings, use_tqdm=False)


def start_transformers(args: argparse.Namespace, workloads: list[Workload]) -> Engine:
    """Start transformers, which runs left-padded batches until their longest output is done."""
    model = load_transformers(args.model, args.device, args.dtype, args.load_format)

    def run(workload: Workload) -> int:
        size = args.hf_batch or len(workload.prompts)
        for first in range(0, len(workload.prompts), size):
            rows = slice(first, first + size)
            max_tokens = max(workload.max_tokens[rows])
            generate_padded(model, workload.prompts[rows], max_tokens, args.temperature)
        return workload.num_new_tokens  # tokens beyond the requested ones do not count

    return Engine(str(model.dtype).removeprefix("torch."), run)


def load_transformers(name: str, device: str, dtype: str, load_format: str = "auto") -> Any:
    """Load the same weights as nanovllm, or create random ones."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    is_dummy = load_format == "dummy"
    checkpoint = find_checkpoint(model_path(name), need_weights=not is_dummy, need_tokenizer=False)
    dtype = read_config_for(checkpoint.config, "auto").dtype if dtype == "auto" else dtype
    if not is_dummy and not checkpoint.is_gguf:
        return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype).to(device).eval()
    fields = {key: checkpoint.config[key] for key in checkpoint.config if key != BLOCK_TYPES_KEY}
    config = AutoConfig.for_model(**fields)
    # Creating random weights takes seconds; only a dummy model needs them.
    with torch.device(device), nullcontext() if is_dummy else no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    if not is_dummy:  # GGUF, which transformers reads only with another package
        stored = list_gguf(checkpoint.weight_files[0])
        weights = {each.name: torch.cat([*each.read()]) for each in stored}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        model.tie_weights()
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}  # tied embeddings
    return model


def generate_padded(
    model: Any, prompts: list[list[int]], max_tokens: int, temperature: float
) -> None:
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    output = model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        min_new_tokens=max_tokens,  # ignore EOS
        max_new_tokens=max_tokens,
        pad_token_id=0,
        **(sampled if temperature else {"do_sample": False}),
    )
    assert output.cpu().shape[1] == width + max_tokens  # .cpu() waits for the device


ENGINES = {
    "nanovllm": start_nanovllm,
    "nanovllm-transformers": start_fallback,
    "transformers": start_transformers,
    "vllm": start_vllm,
}
