"""Generate docs/reference.md from the fields of the option dataclasses: `make reference`."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from nanovllm.cli import parse
from nanovllm.cli.options import default_text
from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.server_options import ServerOptions

PATH = Path(__file__).parent / "reference.md"
INTRODUCTION = """\
`make reference` generates this page from the fields of the option dataclasses. Every switch has a negative form, as in `--no-enforce-eager`."""
SECTIONS: dict[str, tuple[type[Any], str]] = {
    "Engine": (
        EngineConfig,
        """\
Keyword arguments of `LLM` and `AsyncLLM`, and flags of every command that runs a model. The first argument is the
model: a folder, a `.gguf` file, a hub id (`org/name`, `org/name:Q4_K_M` or `org/name/file.gguf`),
or a [short name](models.md#short-names).

- `max_model_len` is limited by the checkpoint, whose limit is the default of `serve` and `batch`. Numbers of tokens
  may be written as 32k (32,000) or 32K (32,768).
- `num_kvcache_blocks`, if given, overrides `gpu_memory_utilization`, which has no effect on a CPU. A sequence that outgrows the whole cache
  finishes with `finish_reason="length"` and `stop_reason="num_kvcache_blocks"`. Prefixes are shared in whole blocks.
- `target_inter_token_ms` also captures CUDA graphs before the engine is ready.
- `dtype` may be a torch dtype such as `torch.bfloat16`; `half` is float16. `auto` is the checkpoint's dtype. On a CPU it is bfloat16 for
  weights of 16 bits or fewer, or float32 if neither our kernels nor the CPU benefit from bfloat16.
- `attention_backend="flash_attn"` needs the flash-attn 2 package, CUDA, bfloat16 or float16, and KV-cache blocks of a multiple of
  256 tokens. `sdpa` is slow and always eager.
- `quantization`: [quantization.md](quantization.md); `kv_cache_dtype`: [fp8-kv-cache.md](fp8-kv-cache.md); parallel sizes and
  `distributed_executor_backend`: [scaling.md](scaling.md). `data_parallel_size` and the flag `--seed` apply to `serve` and `batch`;
  `AsyncLLM` accepts `data_parallel_size` too.""",
    ),
    "Sampling": (
        SamplingParams,
        """\
Keyword arguments of `SamplingParams`, and fields of requests to a server; some are flags of `generate` and `chat`.

- `top_k`, `top_p` and `min_p` truncate the distribution, in this order.
- `seed` makes a request reproducible whatever else is in the batch: in float32, except for draws within 6e-6 of the boundary between two
  tokens; in bfloat16, rounding depends on the batch.
- `max_tokens=None` generates as many tokens as the context can hold.
- `structured_outputs`: [structured-output.md](structured-output.md); `logits_processors`: [offline.md](offline.md#logits-processors).""",
    ),
    "Server": (
        ServerOptions,
        """\
Flags of `nanovllm serve`, and keys of its `--config` file (YAML), which may also contain engine options. The first six
are also flags of `nanovllm batch`. [operations.md](operations.md) explains them.""",
    ),
}


def main() -> None:
    PATH.write_text(reference())


def reference() -> str:
    flags = flags_of(parse(["generate", "x"]).parser) | flags_of(parse(["serve"]).parser)
    parts = ["# Options", INTRODUCTION]
    for title, (record, text) in SECTIONS.items():
        rows = ["| option | flag | default | meaning |", "|---|---|---|---|"]
        for field in fields(record):
            if "help" in field.metadata and field.default is not MISSING:
                default = default_text(field, field.default)
                cells = [f"`{field.name}`", flags.get(field.name, ""), default]
                meaning = field.metadata["help"].replace("|", "\\|")
                rows.append(f"| {' | '.join([*cells, meaning])} |")
        parts += [f"## {title}", text, "\n".join(rows)]
    return re.sub(r"\|  \|", "| |", "\n\n".join(parts) + "\n")


def flags_of(parser: ArgumentParser) -> dict[str, str]:
    """Return the flags of a command, keyed by option name."""
    return {
        action.dest: ", ".join(f"`{flag}`" for flag in action.option_strings if "--no-" not in flag)
        for action in parser._actions
    }


if __name__ == "__main__":
    main()
