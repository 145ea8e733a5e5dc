"""A model for Ray Data: `Dataset.map_batches` makes an engine in each of its actors."""

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

from nanovllm.batch.batch_engine import RowEngine, RowError, RowOptions
from nanovllm.batch.rows import Row
from nanovllm.config import engine_config
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.serve.api_records import ChatRequest, CompletionRequest, as_record
from nanovllm.serve.server_options import ServerOptions

IDS = "prompt_token_ids"  # a column of these is not answered by another
PROMPTS = ("prompt", IDS, "messages")
FIELDS = {*PROMPTS, *ChatRequest.model_fields, *CompletionRequest.model_fields}
# Whose shape differs from row to row, and columns' may not.
AS_JSON = ("tool_calls", "logprobs", "token_ids", "prompt_logprobs", "prompt_token_ids")
ANSWERS = ("text", "finish_reason", "usage", "reasoning", *AS_JSON)
TYPES = {
    "text": pa.string(),
    "finish_reason": pa.string(),
    "usage": pa.struct(
        [(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    ),
    "error": pa.struct([("code", pa.string()), ("message", pa.string())]),
}


class Predictor:
    """Answers the rows of a batch, all at once.

    >>> rows = ray.data.read_parquet("questions.parquet")
    >>> options = {"model": "Qwen/Qwen3-8B", "sampling": {"max_tokens": 256}}
    >>> rows.map_batches(Predictor, fn_constructor_kwargs=options, num_gpus=1, concurrency=4)

    A row has a column `prompt`, `prompt_token_ids` or `messages`, and may have fields of sampling
    for which `sampling` is the default. It comes back with `text`, `finish_reason` and `usage`, or
    with an `error`. What is sampled depends on the content of a row alone, wherever it is computed.
    Other options are the fields of `nanovllm.config.EngineConfig`; more raise TypeError.
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
            as_record(CompletionRequest, {"prompt": "", **self._sampling})
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
        """Take a batch in any of Ray Data's formats."""
        table = _as_table(batch)
        try:
            answers = asyncio.run(self._answer_all(table.to_pylist()))
        except EngineError as error:
            # Ray starts an actor anew only when its process is gone; its batch is then done again.
            print(f"the engine of this process is lost: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        return _with_answers(table, answers)

    async def _answer_all(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._answer, rows))

    async def _answer(self, columns: dict[str, Any]) -> dict[str, Any]:
        given = {name: _plain(value) for name, value in columns.items() if value is not None}
        asked = {name: value for name, value in given.items() if name in FIELDS}
        fields = {**self._sampling, **asked}
        try:
            if sum(name in fields for name in PROMPTS) != 1:
                raise RowError("invalid_row", f"a row has one of {', '.join(PROMPTS)}")
            if IDS in fields:
                fields["prompt"] = fields.pop(IDS)
            line = await self._engine(Row(_number(given), fields))
        except RowError as error:
            return {"error": {"code": error.code, "message": error.message}}
        # A field of the row that an answer has too stands under another name beside it.
        own = {name for name in fields if f"input_{name}" not in line} | columns.keys() & {IDS}
        answer = {name: line[name] for name in ANSWERS if name in line and name not in own}
        return answer | {name: json.dumps(answer[name]) for name in AS_JSON if name in answer}


def _plain(value: Any) -> Any:
    """A whole number where numpy made it a float, as it does in columns with gaps."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(given: dict[str, Any]) -> int:
    """What takes the place of an index, which a row of a distributed data set does not have."""
    text = json.dumps(given, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _as_table(batch: Any) -> pa.Table:
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, dict):
        return pa.table({name: _as_array(column) for name, column in batch.items()})
    return pa.Table.from_pandas(batch, preserve_index=False)


def _as_array(column: Any) -> pa.Array:
    """Arrow's form of a column of numpy, where a gap may be not-a-number."""
    column = np.asarray(column)
    return pa.array(column if column.ndim == 1 else list(column), from_pandas=True)


def _with_answers(table: pa.Table, answers: list[dict[str, Any]]) -> pa.Table:
    names = [*TYPES, *sorted({name for answer in answers for name in answer} - TYPES.keys())]
    taken = {*TYPES, *ANSWERS} - {IDS}  # the same in every batch
    table = table.rename_columns(
        [f"input_{name}" if name in taken else name for name in table.column_names]
    )
    for name in names:
        values = [answer.get(name) for answer in answers]
        kind = TYPES.get(name)
        if any(isinstance(value, list) for value in values):  # rows with n
            kind = None
            values = [each if each is None or isinstance(each, list) else [each] for each in values]
        table = table.append_column(name, pa.array(values, kind))
    return table
