"""The page in a real browser: the chat with a scripted model, the engine view with a real one."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import AsyncLLM
from nanovllm.errors import EngineError
from nanovllm.serve.live.engine_state import HeldBlocks, SequenceState
from tests.serve.browser import (
    LIVE,
    Tabs,
    answers,
    browser,
    check,
    say,
    wait_for,
    wait_for_answer,
)
from tests.serve.byte_model import make_byte_model
from tests.serve.fake_llm import IDLE, FakeLLM
from tests.serve.running import Running, running
from tests.serve.test_observer import recorded
from tests.serve.test_operations import wait_until

pytestmark = pytest.mark.slow
HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>
[a](javascript:window.hacked=3) ![b](http://else.where/x.png) <iframe src="http://else.where">

- *item* <b onclick="window.hacked=4">

```html
<svg onload="window.hacked=5">
```
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as launched:
        yield launched


@pytest.fixture
def tabs(chromium: Any) -> Iterator[Tabs]:
    opened = Tabs(chromium)
    yield opened
    opened.check()


@contextlib.contextmanager
def served(tabs: Tabs, llm: FakeLLM, **options: Any) -> Iterator[Running]:
    """Yield a server; its pages are closed first, as a page logs an error when it is gone."""
    with running(llm, **options) as server:
        yield server
        tabs.close()


def test_a_chat_streams_and_survives_a_reload(tabs: Tabs) -> None:
    text = "# Title\n\nSome **bold** text\n\n```python\nprint(1 < 2)\n```\n\n1. one\n2. two"
    with served(tabs, FakeLLM(text=text, pause=0.02)) as server:
        page = tabs.open(server.url)
        say(page, "Hello <b>you</b>")
        page.wait_for_selector(".message.assistant.busy h1")
        assert page.locator("#stop").is_visible()
        wait_for_answer(page)
        shown = answers(page)
        assert "print(1 < 2)" in shown[0]
        assert page.locator(".message.assistant strong").inner_text() == "bold"
        assert page.locator(".message.assistant ol li").count() == 2
        assert page.locator(".message.user .body").inner_text() == "Hello <b>you</b>"
        assert "tokens" in page.locator(".message.assistant .facts").inner_text()
        page.reload()
        page.wait_for_selector(LIVE)
        assert answers(page) == shown
        page.click("#new-chat")
        assert page.locator(".message").count() == 0
        page.click(".chat-name")
        assert answers(page) == shown
        page.get_by_role("button", name="Delete Hello").click()
        assert page.locator("#chats li").count() == 0


def test_an_answer_can_be_stopped_made_anew_and_edited(tabs: Tabs) -> None:
    """An edit forgets what came after."""
    llm = FakeLLM(text="word " * 400, pause=0.05)
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        begin_an_answer(page, "first")
        composer = page.locator("#composer")
        assert titles(composer) == ["Stop (Esc)"]
        composer.get_by_role("button", name="Stop").click()
        wait_for_answer(page)
        assert titles(composer) == ["Send (Enter)"]
        wait_until(lambda: llm.num_aborted == 1, 120)
        assert 0 < len(answers(page)[0]) < 1900
        llm.text, llm.pause = "the second answer", 0.0
        page.get_by_role("button", name="Regenerate").click()
        wait_for(page, "document.querySelector('.assistant .body').innerText.includes('second')")
        wait_for_answer(page)
        assert answers(page) == ["the second answer"]
        assert llm.asked[0][0] == llm.asked[1][0]
        say(page, "second")
        wait_for_answer(page)
        assert page.locator(".message").count() == 4
        page.get_by_role("button", name="Edit").first.click()
        page.fill(".message.user textarea", "another first")
        page.press(".message.user textarea", "Enter")
        wait_for(page, "document.querySelectorAll('.message').length === 2")
        wait_for_answer(page)
        assert page.locator(".message.user .body").all_inner_texts() == ["another first"]
        assert len(llm.asked) == 4


def titles(part: Any) -> list[str]:
    """Return the titles of the visible buttons."""
    buttons = part.locator("button").all()
    return [each.get_attribute("title") for each in buttons if each.is_visible()]


def begin_an_answer(page: Any, text: str = "Go on") -> None:
    say(page, text)
    wait_for(page, "document.querySelector('.assistant .body')?.innerText.length > 10")


DROP = """() => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array([1, 2, 3])], "photo.png", { type: "image/png" }));
  document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
}"""


def test_images_are_dropped_removed_and_sent(tabs: Tabs) -> None:
    tabs.expected = ("400",)
    with served(tabs, FakeLLM()) as server:
        page = tabs.open(server.url)
        page.evaluate(DROP)
        page.click("#images button")  # removes it
        assert page.locator("#images button").count() == 0
        page.evaluate(DROP)
        page.wait_for_selector("#images button")
        with page.expect_request("**/v1/chat/completions") as sent:
            say(page, "What is this?")
        image, text = sent.value.post_data_json["messages"][0]["content"]
        assert image == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AQID"}}
        assert text == {"type": "text", "text": "What is this?"}
        wait_for_answer(page)
        assert page.locator(".message.user .image").inner_text() == "photo.png"
        assert "this model reads text only" in page.locator(".message .error").inner_text()
        assert page.locator("#images").is_hidden()


def test_deleted_conversations_are_aborted_and_stay_deleted(tabs: Tabs) -> None:
    """The one that is shown, in the middle of its answer, and one that is not shown."""
    llm = FakeLLM(text="word " * 400, pause=0.05)
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        begin_an_answer(page)
        page.get_by_role("button", name="Delete Go on").click()
        wait_until(lambda: llm.num_aborted == 1, 120)
        wait_for_answer(page)
        assert page.locator("#chats li").count() == 0
        page.reload()
        page.wait_for_selector(LIVE)
        assert page.locator("#chats li").count() == 0
        llm.is_silent = True
        say(page, "First")
        wait_until(lambda: llm.num_requests == 1, 120)
        page.click("#new-chat")
        page.get_by_role("button", name="Delete First").click()
        wait_until(lambda: llm.num_aborted == 2, 120)
        assert page.locator("#chats li").count() == 0


def test_an_answer_goes_on_whatever_is_opened(tabs: Tabs) -> None:
    """Another chat, the settings, which Escape closes, or the chat itself once more."""
    llm = FakeLLM(text="word " * 40, is_silent=True, pause=0.02)
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        say(page, "First")
        wait_until(lambda: llm.num_requests == 1, 120)
        page.click("#new-chat")
        assert page.locator(".message").count() == 0
        say(page, "Second")
        wait_until(lambda: llm.num_requests == 2, 120)
        page.click(".chat-name:text-is('First')")
        assert page.locator("#stop").is_visible()
        page.click("#open-settings")
        page.keyboard.press("Escape")
        page.wait_for_selector("#settings", state="hidden")
        llm.is_silent = False
        wait_for(page, "document.querySelector('.assistant .body')?.innerText.length > 10")
        page.click(".chat-name:text-is('First')")
        for _ in range(2):
            wait_for_answer(page)
            assert answers(page) == [("word " * 40).strip()]
            page.click(".chat-name:text-is('Second')")
        assert llm.num_aborted == 0


def test_hostile_output_stays_text(tabs: Tabs) -> None:
    with served(tabs, FakeLLM(text=HOSTILE)) as server:
        page = tabs.open(server.url)
        say(page, HOSTILE)
        wait_for_answer(page)
        for body in page.locator(".message .body").all_inner_texts():
            assert '<img src=x onerror="window.hacked=1">' in body
        inside = page.locator("#messages")
        assert inside.locator("img, script, iframe, .body svg:not(.code-head svg)").count() == 0
        assert inside.locator("[onclick], [onerror], [onload], [href^=javascript]").count() == 0
        links = [link.get_attribute("href") for link in inside.locator(".assistant a").all()]
        assert all(link.startswith("http://else.where") for link in links)
        page.reload()
        page.wait_for_selector(LIVE)
        assert page.evaluate("window.hacked") is None


def test_reasoning_is_folded_and_tool_calls_are_shown(tabs: Tabs) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    llm = FakeLLM(text=f"<think>let me see</think>{call}")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        page.click("#open-settings")
        page.fill("[name=tools]", "no json")
        page.click("#settings [value=save]")
        assert "not valid JSON" in page.locator("#settings .error").inner_text()
        page.fill("[name=tools]", json.dumps([tool]))
        page.fill("[name=system]", "Be brief.")
        page.fill("[name=temperature]", "0.5")
        page.click("#settings [value=save]")
        say(page, "How is the weather?")
        page.wait_for_selector(".tool-call form")
        assert not page.locator("details.reasoning").evaluate("e => e.open")
        page.click("details.reasoning summary")
        assert "let me see" in page.locator("details.reasoning").inner_text()
        assert '"city": "Paris"' in page.locator(".tool-call").inner_text()
        llm.text = "It rains."
        page.get_by_label("Result of weather").fill("rain")
        page.get_by_label("Result of weather").press("Enter")
        page.wait_for_selector("text=It rains.")
        assert llm.asked[0][1].temperature == 0.5
        assert page.locator(".message.tool").inner_text() == "result: rain"


def test_a_key_is_asked_for(tabs: Tabs) -> None:
    tabs.expected = ("401",)
    with served(tabs, FakeLLM(), api_key=("secret",)) as server:
        page = tabs.open(server.url, waits=False)
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The server rejected this key")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        page.wait_for_selector(LIVE)
        wait_for(page, "document.getElementById('model').textContent === 'tiny'")
        say(page, "Hi")
        page.wait_for_selector("text=Hello!")


def test_a_dead_engine_is_shown_as_such(tabs: Tabs) -> None:
    tabs.expected = ("503",)
    llm = FakeLLM()
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        llm.error = EngineError("the core died")
        llm.subscribers.end(llm.error)
        page.wait_for_selector("text=The engine is lost: the core died")
        assert page.locator("#status").inner_text() == "engine lost"
        say(page, "Hi")
        page.wait_for_selector(".message .error >> text=the core died")
        llm.error = None  # as after a restart
        page.wait_for_selector(LIVE)
        assert page.locator("#failure").is_hidden()


def test_the_map_shows_what_the_engine_says(tabs: Tabs, server: Running) -> None:
    tabs.expected = ("willReadFrequently",)  # this test reads pixels
    page = tabs.open(server.url)
    bodies = [
        {"prompt": [i] * (20 + 30 * i), "max_tokens": 850, "ignore_eos": True} for i in (1, 2, 3)
    ]
    threads = [
        threading.Thread(target=lambda body=body: server.post("/v1/completions", **body))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    most = check(page, "collect")
    for thread in threads:
        thread.join()
    assert most["rows"] == 3
    assert most["wrong"] == []
    wait_until(lambda: server.llm.stats.num_running == 0)
    wait_for(page, "document.getElementById('num-held').textContent === '0'")
    text = server.http.get("/metrics").text
    hits = float(re.search(r"^vllm:prefix_cache_hits_total.* (\S+)$", text, re.M).group(1))
    queries = float(re.search(r"^vllm:prefix_cache_queries_total.* (\S+)$", text, re.M).group(1))
    shown = page.locator("#hits").inner_text()
    assert abs(float(shown.rstrip("%")) - 100 * hits / queries) <= 0.5
    cached, free = (int(page.locator(f"#num-{name}").inner_text()) for name in ("cached", "free"))
    assert cached + free == server.llm.stats.num_free_blocks
    assert page.evaluate("own.state.steps.length") > 10


def test_the_largest_map_leaves_room_for_the_running_sequences(tabs: Tabs) -> None:
    """Its cells are smaller; the server allows to pause the engine."""
    held = list(range(0, 20_000, 2))
    sequences = [
        SequenceState(i, "running", 40, 100, 0, 41, 41, 0, [HeldBlocks(0, held)]) for i in range(30)
    ]
    idle = replace(IDLE, num_blocks=40_000, sequences=sequences, cached=bytes(40_000))
    llm = FakeLLM(idle=idle)
    with served(tabs, llm, allow_pause=True) as server:
        page = tabs.open(server.url, viewport={"width": 1280, "height": 800})
        page.wait_for_selector("#running li >> nth=29")
        page.wait_for_selector("#map-size:text('zoomed to')")
        assert page.evaluate("own.map.grid.size") == 3
        assert page.locator("#map").bounding_box()["height"] <= 240
        box = page.locator("#running").bounding_box()
        assert box["height"] > 200
        assert box["y"] + box["height"] <= 800
        assert page.locator("#running li >> nth=7").is_visible()
        page.click("#pause")
        wait_until(lambda: llm.actions == ["pause"], 120)


def test_a_large_pool_is_zoomed_to_the_blocks_in_use(tabs: Tabs) -> None:
    held, cached = [5, 15_000, 15_001], [9_000, 19_999]
    sequence = SequenceState(1, "running", 40, 100, 0, 41, 41, 0, [HeldBlocks(0, held)])
    idle = replace(IDLE, num_blocks=20_000, sequences=[sequence], cached=flags(20_000, cached))
    with served(tabs, FakeLLM(idle=idle)) as server:
        page = tabs.open(server.url)
        page.wait_for_selector("#map-size:text('20000 blocks of 16 tokens · zoomed to')")
        assert page.evaluate("own.map.grid.size") == 12
        assert page.locator("#map").bounding_box()["height"] <= 240
        for block in held + cached:
            x, y, width = page.evaluate(f"own.map.box({block})")
            page.hover("#map", position={"x": x + width / 2, "y": y + 5})
            assert page.locator("#map-detail").inner_text().startswith(f"Block {block}: ")
        page.focus("#map")
        for _ in range(30):  # down to the last visible row
            page.keyboard.press("ArrowDown")
        assert page.locator("#map-detail").inner_text().startswith("Block 19999: cached")


def flags(num_blocks: int, cached: list[int]) -> bytes:
    return bytes(block in cached for block in range(num_blocks))


def test_a_new_colour_scheme_is_drawn_at_once(tabs: Tabs) -> None:
    """The page redraws even in the pause between two frames, as with a busy engine."""
    tabs.expected = ("willReadFrequently",)  # this test reads pixels
    with served(tabs, FakeLLM()) as server:
        page = tabs.open(server.url, color_scheme="light")
        wait_for(page, f"own.map.grid && own.speed && {FREE_PIXEL}[0] > 200")
        page.evaluate("() => { own.pace.earliest = performance.now() + 1e6; own.pace.ask(); }")
        page.emulate_media(color_scheme="dark")
        wait_for(page, f"{FREE_PIXEL}[0] < 100", 120)
        assert page.evaluate("own.isSampled") is False  # the sparklines were drawn too
        page.click("#theme")
        wait_for(page, f"{FREE_PIXEL}[0] > 200", 120)


FREE_PIXEL = "[...own.map.drawing.context.getImageData(3, 3, 1, 1).data]"


def test_the_queue_and_the_steps_show_what_the_stream_says(tabs: Tabs) -> None:
    """The pool is so small that sequences are preempted; show the first snapshot that has one."""
    sent, steps = [], []
    for _, state in recorded(random.Random(4)):
        sent.append(state)
        steps += [step for step in state.steps if step.num_rows]
        if any(seq.status == "preempted" for seq in state.sequences):
            break
    llm = FakeLLM()
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        for each in sent:
            llm.subscribers.push(each)
        number = state.stats.num_preemptions
        page.wait_for_selector(f"#preemptions:text-is('{number} preempted so far')")
        chips = page.locator("#queue li")
        assert [int(each.get_attribute("data-id")) for each in chips.all()] == state.queue
        assert "preempted after" in page.locator("#queue .preempted").first.inner_text()
        rows = [int(each.get_attribute("data-id")) for each in page.locator("#running li").all()]
        assert rows == sorted(seq.seq_id for seq in state.sequences if seq.status == "running")
        page.focus("#steps")
        for step in reversed(steps[-5:]):
            page.keyboard.press("ArrowLeft")
            text = f"{step.num_prefill_tokens} prompt and {step.num_decode_tokens} output tokens"
            assert page.locator("#step-detail").inner_text().startswith(text)


def test_a_batch_of_eight_runs_at_once(tabs: Tabs) -> None:
    llm = FakeLLM(is_silent=True)
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        page.click("#try-batch")
        wait_until(lambda: llm.num_requests == 8, 120)
        assert len({tuple(prompt) for prompt, _ in llm.asked}) == 8


def test_a_batch_of_eight_is_preempted_in_a_pool_of_twelve_blocks(
    tabs: Tabs, tmp_path: Path
) -> None:
    """docs/page.md describes this; each sequence eventually needs two blocks."""
    sizes = {"max_model_len": 256, "kvcache_block_size": 128, "num_kvcache_blocks": 12}
    llm = AsyncLLM(make_byte_model(tmp_path), device="cpu", dtype="float32", **sizes)
    try:
        with served(tabs, llm) as server:
            page = tabs.open(server.url)
            page.click("#try-batch")
            page.wait_for_selector("#preemptions.warn")
            page.click("#try-long")  # longer than the model's context
            page.wait_for_selector("#try-error >> text=the prompt is too long")
            tabs.expected = ("400",)
    finally:
        llm.close()


def test_step_mode_shows_what_a_step_changes(tabs: Tabs, tmp_path: Path) -> None:
    sizes = {"max_model_len": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 40, "depth": 0}
    llm = AsyncLLM(make_byte_model(tmp_path), device="cpu", dtype="float32", **sizes)
    try:
        with served(tabs, llm, allow_pause=True) as server:
            page = tabs.open(server.url)
            page.click("#open-settings")
            page.fill("[name=max_tokens]", "20")
            page.click("#settings [value=save]")
            page.click("#pause:text-is('Pause')")
            page.wait_for_selector("#status[data-state=paused]")
            page.wait_for_selector("#step-hint:text('The engine is paused')")
            say(page, "Hi there")
            page.wait_for_selector("#changes dt:has-text('queued')")
            assert "“<|im_start|>user⏎Hi there" in page.locator("#queue li").inner_text()
            page.click("#step")
            page.wait_for_selector("#changes dt:has-text('sampled')")
            titles = page.locator("#changes dt").all_inner_texts()
            assert [title.split()[0] for title in titles] == [
                *("admitted", "allocated", "scheduled", "registered", "sampled")
            ]
            assert "engine/block_manager.py::BlockManager.allocate" in titles[1]
            assert page.locator("#plan-size").inner_text() == "the plan had 1 row"
            assert "“<|im_start|>user⏎Hi there" in page.locator("#running li").inner_text()
            blocks = page.evaluate("[...own.state.sequences.values()][0].tables[0][1]")
            page.hover("#changes dd:nth-of-type(2) .change")
            assert page.evaluate("own.map.marked") == blocks
            assert page.evaluate("own.map.isOther(undefined)") is False
            x, y, width = page.evaluate(f"own.map.box({blocks[0]})")
            page.hover("#map", position={"x": x + width / 2, "y": y + 5})
            assert "“<|im_start|>user⏎Hi there" in page.locator("#map-detail").inner_text()
            assert page.evaluate("own.map.marked") is None
            page.click("#step:enabled")
            page.wait_for_selector("#changes .change:has-text('decode, position')")
            assert page.locator("#stop").is_visible()
            page.click("#pause:text-is('Resume')")
            page.wait_for_selector(LIVE)
            wait_for_answer(page)
            page.wait_for_selector("#step-hint:text('Pause the engine')")
            assert page.locator("#changes").inner_text() == ""
            assert page.locator("#step").is_disabled()
    finally:
        llm.close()


def test_shared_blocks_are_counted(tabs: Tabs) -> None:
    blocks = [0, 1, 2, 3], [0, 1, 2, 4]
    sequences = [
        SequenceState(i, "running", 9, 99, 0, 9, 9, 0, [HeldBlocks(0, each)])
        for i, each in enumerate(blocks)
    ]
    with served(tabs, FakeLLM(idle=replace(IDLE, sequences=sequences))) as server:
        page = tabs.open(server.url)
        wait_for(page, "document.getElementById('num-shared').textContent === '3'")


def test_blocks_behind_a_window_show_their_own_tokens(tabs: Tabs) -> None:
    tables = [HeldBlocks(0, [0, 1, 2, 3]), HeldBlocks(2, [4, 5])]
    sequence = SequenceState(1, "running", 60, 99, 0, 56, 56, 0, tables)
    with served(tabs, FakeLLM(idle=replace(IDLE, sequences=[sequence]))) as server:
        page = tabs.open(server.url)
        for block, tokens in {3: "48 to 63 of #1, 50%", 4: "32 to 47 of #1, 100%"}.items():
            x, y, width = page.evaluate(f"own.map.box({block})")
            page.hover("#map", position={"x": x + width / 2, "y": y + 5})
            text = page.locator("#map-detail").inner_text()
            assert text.startswith(f"Block {block}: tokens {tokens} computed")


# Whether the three colors of the page's background add up to little.
IS_DARK = (
    "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)"
    ".reduce((sum, each) => sum + Number(each), 0) < 200"
)


def test_no_window_is_too_narrow(tabs: Tabs) -> None:
    table = "| a | b |\n|---|---|\n| " + "z" * 200 + " | 2 |"
    text = "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n" + table
    with served(tabs, FakeLLM(text=text)) as server:
        page = tabs.open(server.url, viewport={"width": 1440, "height": 780})
        say(page, "w" * 300)
        wait_for_answer(page)
        for width, scheme in ((1440, "light"), (820, "dark"), (360, "light"), (360, "dark")):
            page.set_viewport_size({"width": width, "height": 780})
            page.emulate_media(color_scheme=scheme)
            wait_for(
                page, f"innerWidth === {width} && ({IS_DARK}) === {str(scheme == 'dark').lower()}"
            )
            for view in ("chat", "engine"):
                if width < 820:
                    page.click(f"#show-{view}")
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                for name in ("messages", "engine"):
                    overflow = page.evaluate(f"(e => e.scrollWidth - e.clientWidth)({name})")
                    assert overflow <= 0, name
        page.click("#show-chat")
        page.click("#menu")
        assert page.get_attribute("#menu", "aria-expanded") == "true"
        page.click(".chat-name")
        assert page.get_attribute("#menu", "aria-expanded") == "false"


@pytest.mark.parametrize("width", [390, 1440])
def test_tips_do_not_cover_what_they_explain(tabs: Tabs, width: int) -> None:
    sequences = [
        SequenceState(i, "running", 9, 99, 0, 9, 9, 0, [HeldBlocks(0, [i])]) for i in range(3)
    ]
    llm = FakeLLM(idle=replace(IDLE, sequences=sequences, snapshots=[5, 6]))
    with served(tabs, llm, allow_pause=True) as server:
        page = tabs.open(server.url, viewport={"width": width, "height": 780})
        if width < 820:
            page.click("#show-engine")
        page.wait_for_selector("#running li >> nth=2")
        assert page.locator("#num-snapshots").inner_text() == "2"
        wait_for(page, "document.getElementById('speed-line').style.height !== ''")
        page.mouse.move(0, 0)
        found = check(page, "covered")
        assert found["tips"] > 10
        assert found["covered"] == []


LABELS = (
    *("Temperature", "Max tokens", "Top p", "Top k", "Min p", "Seed"),
    *("Repetition penalty", "Stop"),
)


def test_one_of_several_engines_is_chosen(tabs: Tabs) -> None:
    llm = FakeLLM(others=[FakeLLM(idle=replace(IDLE, num_blocks=32, cached=bytes(32)))])
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        assert page.locator("#engines option").all_inner_texts() == ["engine 0", "engine 1"]
        page.wait_for_selector("#map-size:text('64 blocks')")
        page.select_option("#engines", "1")
        page.wait_for_selector("#map-size:text('32 blocks')")
        assert page.locator("#engines").input_value() == "1"


def test_settings_show_the_defaults(tabs: Tabs) -> None:
    """There is no choice of engines, and no step mode unless the server allows it."""
    with served(tabs, FakeLLM(), sampling_defaults={"temperature": 0.6, "top_k": 20}) as server:
        page = tabs.open(server.url)
        wait_for(page, "document.getElementById('model').textContent === 'tiny'")
        assert page.locator("#engines").is_hidden()
        assert page.locator("#step-mode").is_hidden()
        page.click("#open-settings")
        field = page.locator("#settings").get_by_label
        shown = {label: field(label, exact=True).get_attribute("placeholder") for label in LABELS}
        assert shown == {
            "Temperature": "0.6",
            "Max tokens": "up to 1024",
            "Top p": "1",
            "Top k": "20",
            "Min p": "0",
            "Seed": "random",
            "Repetition penalty": "1",
            "Stop": "none",
        }
        page.keyboard.press("Escape")
        page.wait_for_selector("#num-running:text-is('0 of 8 slots')")


def test_everything_works_by_keyboard_and_has_a_name(tabs: Tabs) -> None:
    llm = FakeLLM(text="word " * 100, pause=0.05)
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "input":
                break
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant.busy")
        page.keyboard.press("Escape")
        wait_for_answer(page)
        page.focus("#map")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        assert re.match(r"Block \d+: free", page.locator("#map-detail").inner_text())
        page.focus("#map-title span")
        page.wait_for_selector("#tip:visible")
        assert "Paged attention" in page.locator("#tip").inner_text()
        assert check(page, "nameless") == []
