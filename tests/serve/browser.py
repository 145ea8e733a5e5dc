"""A real browser for tests of the page; they are skipped if none is installed."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
CHECKS = Path(__file__).parent / "page_checks.js"
LIVE = "#status[data-state=live]"


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser is found under the names {', '.join(NAMES)}")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield launched
        launched.close()


class Tabs:
    """Opens pages; `check` fails on any error in a page, and on any external resource."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.faults: list[str] = []
        self.expected: tuple[str, ...] = ()  # parts of error messages that a test provokes

    def open(self, url: str, *, waits: bool = True, **options: Any) -> Any:
        context = self._browser.new_context(**options)
        self._contexts.append(context)
        context.set_default_timeout(240_000)
        page = context.new_page()
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda request: self._check_host(request.url, url))
        page.goto(url)
        if waits:
            page.wait_for_selector(LIVE)
            page.evaluate("async () => { window.own = (await import('/page/main.js')).engine; }")
        return page

    def close(self) -> None:
        while self._contexts:
            self._contexts.pop().close()

    def check(self) -> None:
        self.close()
        unexpected = [
            fault for fault in self.faults if not any(part in fault for part in self.expected)
        ]
        assert not unexpected, unexpected

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.faults.append(text)

    def _check_host(self, asked: str, own: str) -> None:
        if urlsplit(asked).scheme != "blob" and urlsplit(asked).netloc != urlsplit(own).netloc:
            self.faults.append(f"a request to {asked}")


def say(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def wait_for_answer(page: Any) -> None:
    page.wait_for_selector("#send:visible")


def check(page: Any, name: str) -> Any:
    """Run a function of page_checks.js in a page."""
    return page.evaluate(f"{CHECKS.read_text(encoding='utf-8')}.{name}()")


def answers(page: Any) -> list[str]:
    return page.locator(".message.assistant .body").all_inner_texts()


def wait_for(page: Any, condition: str, seconds: float = 240.0) -> None:
    """Wait until an expression holds; the page's policy forbids playwright's own method."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never: {condition}"
        page.wait_for_timeout(50)
