"""Compare the throughput of `nanovllm batch` with that of `generate` on the same requests.

    python -m benchmarks.engine.batch_rate [--model qwen3-0.6b] [--num-seqs 256] [--rounds 3]

The requests are those of nano-vLLM's benchmark, whose prompts are token ids. Weights are random and
the vocabulary is synthetic; both sides detokenize every token. Both engines are loaded at the same
time and take turns; garbage is collected before each turn, as if each had its own process. A job is
timed from reading its rows to writing its last line, without starting the engine. The target is
95% of the throughput of `generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import shutil
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.engine.structured_cost import synthetic_tokenizer
from benchmarks.models import model_path
from benchmarks.workloads import Workload, mixed
from nanovllm import LLM, SamplingParams
from nanovllm.batch.batch_engine import RowEngine, RowOptions
from nanovllm.batch.progress_file import ProgressFile
from nanovllm.batch.rows import scan
from nanovllm.batch.run_batch import run_job
from nanovllm.config import EngineConfig
from nanovllm.serve.server_options import ServerOptions

SAMPLING = {"temperature": 0.6, "ignore_eos": True}


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocab_size = write_model(model_path(args.model), folder)
        work = mixed(vocab_size, args.num_seqs, args.max_len, args.max_len)
        options: dict[str, Any] = {"load_format": "dummy", "device": args.device}
        config = EngineConfig(
            str(folder), gpu_memory_utilization=0.7, **options
        )  # for both engines
        with LLM(folder, gpu_memory_utilization=0.35, **options) as llm:
            engine = RowEngine(RowOptions(config, ServerOptions(served_model_name=("random",))))
            try:
                rates = [
                    (generated(llm, work), batched(engine, config, work, folder))
                    for _ in range(args.rounds + 1)
                ][1:]  # the first round is a warm-up
            finally:
                engine.close()
    for kind, values in zip(("generate", "batch"), zip(*rates, strict=True), strict=True):
        print(f"{kind}: {statistics.median(values):,.0f} tok/s, {work.num_new_tokens:,} tokens")
    share = statistics.median(batch / whole for whole, batch in rates)
    print(f"batch / generate: {share:.3f}, the median of {args.rounds} rounds (bar: 0.95)")


def write_model(config_file: str, folder: Path) -> int:
    """Write a checkpoint of a config and a synthetic vocabulary; return the vocabulary size."""
    shutil.copy(config_file, folder / "config.json")
    vocab_size = int(json.loads(Path(config_file).read_text())["vocab_size"])
    synthetic_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return vocab_size


def generated(llm: LLM, work: Workload) -> float:
    params = [SamplingParams(max_tokens=count, **SAMPLING) for count in work.max_tokens]
    gc.collect()
    start = time.perf_counter()
    llm.generate(work.prompts, params, use_tqdm=False, cache_salt=uuid.uuid4().hex)
    return work.num_new_tokens / (time.perf_counter() - start)


def batched(engine: RowEngine, config: EngineConfig, work: Workload, folder: Path) -> float:
    path, output = folder / "rows.jsonl", folder / "output.jsonl"
    salt = uuid.uuid4().hex
    with path.open("w", encoding="utf-8") as file:
        for prompt, max_tokens in zip(work.prompts, work.max_tokens, strict=True):
            row = {"prompt": prompt, "max_tokens": max_tokens, "cache_salt": salt, **SAMPLING}
            file.write(json.dumps(row) + "\n")
    max_concurrency = RowOptions(
        config, ServerOptions(served_model_name=("random",))
    ).max_concurrency
    gc.collect()
    start = time.perf_counter()
    found = scan(path)
    progress_file = ProgressFile(output, {"input": found.digest}, found.num_rows, overwrite=True)
    try:
        asyncio.run(run_job(path, progress_file, engine, max_concurrency))
    finally:
        progress_file.close()
    seconds = time.perf_counter() - start
    assert progress_file.num_errors == 0, progress_file.errors.read_text()[:500]
    return work.num_new_tokens / seconds


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", help="a known name or a config file")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument(
        "--max-len", type=int, default=1024, help="of prompts and of outputs, in tokens"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
