"""Run a job: rows are read, answered many at a time, and written as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from nanovllm.errors import NanovllmError
from nanovllm.jobs.answers import RowError
from nanovllm.jobs.ledger import Ledger
from nanovllm.jobs.rows import Row, read_rows, windows

OnLine = Callable[[dict[str, Any] | None], None]  # what was written; None: an error


async def run_job(
    path: Path,
    ledger: Ledger,
    answer: Callable[[Row], Awaitable[dict[str, Any]]],
    num_at_once: int,
    on_line: OnLine = lambda line: None,
) -> None:
    """Answer every row that is not done; an error that is not a row's own ends the job."""
    queue: asyncio.Queue[Row | None] = asyncio.Queue(num_at_once)
    workers = [
        asyncio.create_task(_work(queue, ledger, answer, on_line)) for _ in range(num_at_once)
    ]
    tasks = [asyncio.create_task(_feed(path, ledger, queue, num_at_once)), *workers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    if not all(ledger.is_done):
        raise _changed(path)


async def _feed(
    path: Path, ledger: Ledger, queue: asyncio.Queue[Row | None], num_workers: int
) -> None:
    groups: Iterator[list[Row]] = windows(_todo(path, ledger))
    while (window := await asyncio.to_thread(next, groups, None)) is not None:
        for row in window:
            await queue.put(row)
    for _ in range(num_workers):
        await queue.put(None)


def _todo(path: Path, ledger: Ledger) -> Iterator[Row]:
    for row in read_rows(path):
        if row.index >= len(ledger.is_done):
            raise _changed(path)
        if not ledger.is_done[row.index]:
            yield row


def _changed(path: Path) -> NanovllmError:
    return NanovllmError(f"{path} changed while its rows were answered")


async def _work(
    queue: asyncio.Queue[Row | None],
    ledger: Ledger,
    answer: Callable[[Row], Awaitable[dict[str, Any]]],
    on_line: OnLine,
) -> None:
    while (row := await queue.get()) is not None:
        try:
            line = await answer(row)
            ledger.write(row.index, line)
            on_line(line)
        except RowError as error:
            _write_error(ledger, row, error, on_line)
        except RecursionError:  # what could be read may be too deep to be written
            too_deep = RowError("invalid_row", "it is nested too deeply")
            _write_error(ledger, row, too_deep, on_line)


def _write_error(ledger: Ledger, row: Row, error: RowError, on_line: OnLine) -> None:
    custom_id = None if isinstance(row.custom_id, dict | list) else row.custom_id
    ledger.write_error(row.index, custom_id, error.code, error.message)
    on_line(None)
