"""Run a batch job: read rows, process them concurrently, and write each as it finishes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.batch.batch_engine import RowError
from nanovllm.batch.progress_file import ProgressFile
from nanovllm.batch.rows import Row, read_rows, windows
from nanovllm.errors import NanovllmError

OnLine = Callable[[dict[str, Any] | None], None]  # called with the written line; None for an error


async def run_job(
    path: Path,
    progress_file: ProgressFile,
    process: Callable[[Row], Awaitable[dict[str, Any]]],
    max_concurrency: int,
    on_line: OnLine = lambda line: None,
) -> None:
    """Process every row that is not done; any error except RowError ends the job."""
    queue: asyncio.Queue[Row | None] = asyncio.Queue(max_concurrency)

    async def feed() -> None:
        rows = islice(read_rows(path), len(progress_file.is_done))
        groups = windows(row for row in rows if not progress_file.is_done[row.index])
        while (window := await asyncio.to_thread(next, groups, None)) is not None:
            for row in window:
                await queue.put(row)
        for _ in range(max_concurrency):
            await queue.put(None)

    async def work() -> None:
        while (row := await queue.get()) is not None:
            try:
                line = await process(row)
                _write(progress_file, row, line)
                on_line(line)
            except RowError as error:
                custom_id = row.custom_id if isinstance(row.custom_id, str | int) else None
                progress_file.write_error(row.index, custom_id, error.code, error.message)
                on_line(None)

    tasks = [asyncio.create_task(each()) for each in (feed, *[work] * max_concurrency)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    if not all(progress_file.is_done):
        raise NanovllmError(f"{path} changed while the job was running")


def _write(progress_file: ProgressFile, row: Row, line: dict[str, Any]) -> None:
    try:
        progress_file.write(row.index, line)
    except (ValueError, RecursionError) as error:  # NaN, or values nested too deeply
        raise RowError("invalid_row", f"the row cannot be written as JSON: {error}") from error
