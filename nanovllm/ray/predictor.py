"""A model for Ray Data: `Dataset.map_batches` creates an engine in each of its actors."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nanovllm.assembly import engine_config
from nanovllm.batch.batch_engine import OUTPUT_NAMES, RowEngine, RowError, RowOptions
from nanovllm.batch.rows import Row
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.serve.openai.completions import CompletionRequest
from nanovllm.serve.protocol import ChatRequest, as_api_model
from nanovllm.serve.server_options import ServerOptions

IDS = "prompt_token_ids"  # an input column with this name takes precedence over the output column
PROMPTS = ("prompt", IDS, "messages")
FIELDS = {*PROMPTS, *ChatRequest.model_fields, *CompletionRequest.model_fields} - OUTPUT_NAMES
# These outputs are encoded as JSON: their shape differs between rows, but a column needs one type.
AS_JSON = ("tool_calls", "logprobs", "token_ids", "prompt_logprobs", "prompt_token_ids")
OUTPUTS = ("text", "finish_reason", "usage", "reasoning", *AS_JSON)
TYPES = {
    "text": pa.string(),
    "finish_reason": pa.string(),
    "usage": pa.struct(
        [(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    ),
    "error": pa.struct([("code", pa.string()), ("message", pa.string())]),
}


class Predictor:
    """Completes all rows of a batch concurrently.

    >>> rows = ray.data.read_parquet("questions.parquet")
    >>> options = {"model": "Qwen/Qwen3-8B", "sampling": {"max_tokens": 256}}
    >>> rows.map_batches(Predictor, fn_constructor_kwargs=options, num_gpus=1, concurrency=4)

    A row has one of the columns `prompt`, `prompt_token_ids` and `messages`, and may have columns
    with sampling fields, whose defaults are in `sampling`. The row is returned with `text`,
    `finish_reason` and `usage`, or with an `error`. Sampling depends only on the content of the
    row, not on where it runs. Other options are the fields of `nanovllm.config.EngineConfig`;
    unknown ones raise TypeError.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        sampling: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        **options: Any,
    ) -> None:
        self._sampling = dict(sampling or {})
        try:
            as_api_model(CompletionRequest, {"prompt": "", **self._sampling})
        except RequestError as error:
            raise ConfigError(f"sampling: {error}") from error
        server = ServerOptions(
            served_model_name=(str(model),),
            chat_template=chat_template,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
        config = engine_config(model, options)
        self._engine = RowEngine(RowOptions(config, server, is_raw=True))

    def __call__(self, batch: Any) -> pa.Table:
        """Process a batch in any of Ray Data's formats."""
        table = _as_table(batch)
        try:
            outputs = asyncio.run(self._complete_all(table.to_pylist()))
        except EngineError as error:
            # Ray restarts an actor, and retries its batch, only after the process has exited.
            print(f"the engine of this process has failed: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        return _with_outputs(table, outputs)

    async def _complete_all(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._complete, rows))

    async def _complete(self, columns: dict[str, Any]) -> dict[str, Any]:
        given = {name: _plain(value) for name, value in columns.items() if value is not None}
        requested = {name: value for name, value in given.items() if name in FIELDS}
        fields = {**self._sampling, **requested}
        try:
            if sum(name in fields for name in PROMPTS) != 1:
                raise RowError("invalid_row", f"a row needs exactly one of {', '.join(PROMPTS)}")
            if IDS in fields:
                fields["prompt"] = fields.pop(IDS)
            line = await self._engine(Row(_number(given), fields))
        except RowError as error:
            return {"error": {"code": error.code, "message": error.message}}
        # The engine renames an input field that collides with an output field to input_<name>.
        own = {name for name in fields if f"input_{name}" not in line} | columns.keys() & {IDS}
        output = {name: line[name] for name in OUTPUTS if name in line and name not in own}
        return output | {name: json.dumps(output[name]) for name in AS_JSON if name in output}


def _plain(value: Any) -> Any:
    """Convert integral floats to int: numpy stores integers as floats if values are missing."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(given: dict[str, Any]) -> int:
    """Return a hash of the row as its index, since rows of a distributed dataset have none."""
    text = json.dumps(given, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _as_table(batch: Any) -> pa.Table:
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, dict):
        return pa.table({name: _as_array(column) for name, column in batch.items()})
    return pa.Table.from_pandas(batch, preserve_index=False)


def _as_array(column: Any) -> pa.Array:
    """Convert a numpy column to Arrow; NaN becomes null."""
    column = np.asarray(column)
    return pa.array(column if column.ndim == 1 else list(column), from_pandas=True)


def _with_outputs(table: pa.Table, outputs: list[dict[str, Any]]) -> pa.Table:
    names = [*TYPES, *sorted({name for output in outputs for name in output} - TYPES.keys())]
    taken = {*TYPES, *OUTPUTS} - {IDS}  # all possible outputs, so that batches have equal columns
    table = table.rename_columns(
        [f"input_{name}" if name in taken else name for name in table.column_names]
    )
    for name in names:
        values = [output.get(name) for output in outputs]
        kind = TYPES.get(name)
        if any(isinstance(value, list) for value in values):  # a row requested n > 1
            kind = None
            values = [each if each is None or isinstance(each, list) else [each] for each in values]
        table = table.append_column(name, pa.array(values, kind))
    return table
