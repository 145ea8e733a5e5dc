"""Generate docs/reference.md, and the table of fields in docs/serving.md: `make reference`."""

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
from nanovllm.serve.anthropic.messages import CountRequest, MessagesRequest
from nanovllm.serve.openai.completions import CompletionRequest
from nanovllm.serve.openai.embeddings import EmbeddingRequest
from nanovllm.serve.openai.rerank import RerankRequest
from nanovllm.serve.openai.responses import ResponsesRequest
from nanovllm.serve.protocol import ApiModel, ChatRequest, TokenizeRequest
from nanovllm.serve.server_options import ServerOptions

PATH = Path(__file__).parent / "reference.md"
SERVING = Path(__file__).parent / "serving.md"
TABLE = re.compile(r"(?<=<!-- table fields -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
REQUESTS: dict[str, type[ApiModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
}
INTRODUCTION = """\
`make reference` generates this page from the fields of the option dataclasses. Every flag that switches something on has
a negative form, such as `--no-enforce-eager`."""
SECTIONS: dict[str, tuple[type[Any], str]] = {
    "Engine": (
        EngineConfig,
        """\
Keyword arguments of `LLM` and `AsyncLLM`, and flags of every command that runs a model. The first argument is the
model: a folder, a `.gguf` file, a hub id (`org/name`, `org/name:Q4_K_M` or `org/name/file.gguf`),
or a [short name](models.md#short-names).

- `max_model_len` may be at most the context length of the checkpoint, which is the default of `serve` and `batch`.
  Numbers of tokens may be written as 32k (32,000) or 32K (32,768).
- `num_kvcache_blocks` overrides `gpu_memory_utilization`. If a sequence needs more blocks than there are, it ends with
  `finish_reason="length"` and `stop_reason="num_kvcache_blocks"`.
- `gpu_memory_utilization` has no effect on a CPU.
- `target_inter_token_ms` also makes the engine capture CUDA graphs before it is ready.
- `dtype` may be a torch dtype such as `torch.bfloat16`; `half` is float16. `auto` uses the checkpoint's dtype on a GPU.
  On a CPU, `auto` chooses float32 if the checkpoint is in float32, or if bfloat16 would be slower on this CPU, else
  bfloat16.
- `attention_backend="flash_attn"` needs the flash-attn 2 package, CUDA, bfloat16 or float16, and a
  `kvcache_block_size` that is a multiple of 256. `sdpa` is slow and does not use CUDA graphs.
- `data_parallel_size` and the flag `--seed` apply only to `serve` and `batch`. `AsyncLLM` accepts
  `data_parallel_size` too.
- Other pages explain `quantization` ([quantization.md](quantization.md)), `kv_cache_dtype`
  ([fp8-kv-cache.md](fp8-kv-cache.md)), `speculative_config` ([speculative-decoding.md](speculative-decoding.md)), the
  parallel sizes and `distributed_executor_backend` ([scaling.md](scaling.md)).""",
    ),
    "Sampling": (
        SamplingParams,
        """\
Keyword arguments of `SamplingParams`, and fields of requests to a server; some are flags of `generate` and `chat`.

- `top_k`, `top_p` and `min_p` exclude tokens, in this order.
- `seed` makes a request reproducible, whatever else is in the batch. (In float32, the only exceptions are random
  numbers within 6e-6 of the boundary between two tokens. In bfloat16, rounding depends on the batch.)
- `max_tokens=None` generates as many tokens as the context can hold.
- Other pages explain `structured_outputs` ([structured-output.md](structured-output.md)) and `logits_processors`
  ([offline.md](offline.md#logits-processors)).""",
    ),
    "Server": (
        ServerOptions,
        """\
Flags of `nanovllm serve`, and keys of its `--config` file (YAML), which may also contain engine options.
`nanovllm batch` has the first six of these flags, too. [operations.md](operations.md) explains them.""",
    ),
}


def main() -> None:
    PATH.write_text(reference())
    SERVING.write_text(TABLE.sub(lambda _: fields_table(), SERVING.read_text()))


def fields_table() -> str:
    """Return what each API does with each field of its requests."""
    rows = ["| API | | fields |", "|---|---|---|"]
    for path, kind in REQUESTS.items():
        policy = kind.policy
        unknown = "ignored" if policy.ignores_unknown else "refused"
        groups = {"used": kind.model_fields, "ignored": policy.ignored, "refused": policy.refused}
        texts = {what: ", ".join(f"`{name}`" for name in sorted(groups[what])) for what in groups}
        texts[unknown] = ", ".join(filter(None, [texts[unknown], "unknown fields"]))
        for what in filter(texts.get, texts):
            rows.append(f"| {f'`{path}`' if what == 'used' else ''} | {what} | {texts[what]} |")
    return re.sub(r"\|  \|", "| |", "\n".join(rows) + "\n")


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
