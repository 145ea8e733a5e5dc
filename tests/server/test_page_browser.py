"""The page in a real browser: the chat with a scripted model, the engine beside a real one."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nanovllm.errors import EngineError
from nanovllm.server.engine_events import as_event
from nanovllm.serving.observer import Observer, TimedExecutor
from tests.engine.test_fuzz import build_core, make_requests, make_sequences
from tests.server.browser import LIVE, Tabs, answers, browser, say, wait_for, wait_for_answer
from tests.server.fake_llm import IDLE, FakeLLM
from tests.server.running import Running, running
from tests.server.test_operations import wait_until
from tests.serving.state_changes import apply
from tests.serving.test_observer import Clock, snapshot, stats_of

pytestmark = pytest.mark.slow
SYSTEM = "You answer every question in one short sentence, and you never guess. " * 3
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
    """A server whose pages are closed before it is: a page that finds it gone says so."""
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


def test_an_answer_can_be_stopped_and_made_anew(tabs: Tabs) -> None:
    llm = FakeLLM(text="word " * 400, pause=0.05)
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        say(page, "Go on")
        wait_for(page, "document.querySelector('.assistant .body').innerText.length > 10")
        page.click("#stop")
        wait_for_answer(page)
        wait_until(lambda: llm.num_aborted == 1, 20)
        assert 0 < len(answers(page)[0]) < 1900
        llm.text, llm.pause = "the second answer", 0.0
        page.get_by_role("button", name="Regenerate").click()
        wait_for(page, "document.querySelector('.assistant .body').innerText.includes('second')")
        wait_for_answer(page)
        assert answers(page) == ["the second answer"]
        assert llm.asked[0][0] == llm.asked[1][0]


def begin_an_answer(page: Any) -> None:
    say(page, "Go on")
    wait_for(page, "document.querySelector('.assistant .body')?.innerText.length > 10")


def test_a_conversation_that_is_deleted_in_the_middle_stays_so(tabs: Tabs) -> None:
    llm = FakeLLM(text="word " * 400, pause=0.05)
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        begin_an_answer(page)
        page.get_by_role("button", name="Delete Go on").click()
        wait_until(lambda: llm.num_aborted == 1, 20)
        wait_for_answer(page)
        assert page.locator("#chats li").count() == 0
        page.reload()
        page.wait_for_selector(LIVE)
        assert page.locator("#chats li").count() == 0


def test_the_conversation_that_is_shown_can_be_chosen_while_it_is_answered(tabs: Tabs) -> None:
    with served(tabs, FakeLLM(text="word " * 40, pause=0.02)) as server:
        page = tabs.open(server.url)
        begin_an_answer(page)
        page.click(".chat-name")
        wait_for_answer(page)
        assert answers(page) == [("word " * 40).strip()]


def test_an_edit_forgets_what_came_after(tabs: Tabs) -> None:
    llm = FakeLLM(text="yes")
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        for text in ("first", "second"):
            say(page, text)
            wait_for_answer(page)
        assert page.locator(".message").count() == 4
        page.get_by_role("button", name="Edit").first.click()
        page.fill(".message.user textarea", "another first")
        page.press(".message.user textarea", "Enter")
        wait_for(page, "document.querySelectorAll('.message').length === 2")
        wait_for_answer(page)
        assert page.locator(".message.user .body").all_inner_texts() == ["another first"]
        assert len(llm.asked) == 3


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
        assert "no JSON" in page.locator("#settings .error").inner_text()
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
    with served(tabs, FakeLLM(), api_keys=("secret",)) as server:
        page = tabs.open(server.url, waits=False)
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=does not know this key")
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
        llm.viewers.fail(llm.error)
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
    page.evaluate("async () => { window.own = (await import('/page/main.js')).engine; }")
    bodies = [
        {"prompt": [i] * (20 + 30 * i), "max_tokens": 250, "ignore_eos": True} for i in (1, 2, 3)
    ]
    threads = [
        threading.Thread(target=lambda body=body: server.post("/v1/completions", **body))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    page.wait_for_selector("#running li")
    most = page.evaluate(COLLECT)
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


def test_the_queue_and_the_steps_show_what_the_stream_says(tabs: Tabs) -> None:
    """Of a pool so small that sequences are preempted, at the first change that shows one."""
    sent, steps, state = [], [], None
    for news, _ in recorded(1):
        sent.append(news)
        state = apply(state, news)
        steps += [step for step in getattr(news, "steps", []) if step.num_rows]
        if any(seq.status == "preempted" for seq in state.sequences):
            break
    llm = FakeLLM()
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        for news in sent:
            llm.viewers.push(news)
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
            text = f"{step.num_prefill_tokens} prompt and {step.num_decode_tokens} answer tokens"
            assert page.locator("#step-detail").inner_text().startswith(text)


def test_one_of_several_engines_is_chosen(tabs: Tabs) -> None:
    llm = FakeLLM(others=[FakeLLM(idle=replace(IDLE, num_blocks=32))])
    with served(tabs, FakeLLM()) as server:
        assert tabs.open(server.url).locator("#engines").is_hidden()
    with served(tabs, llm) as server:
        page = tabs.open(server.url)
        assert page.locator("#engines option").all_inner_texts() == ["engine 0", "engine 1"]
        page.wait_for_selector("#map-size:text('64 blocks')")
        page.select_option("#engines", "1")
        page.wait_for_selector("#map-size:text('32 blocks')")
        assert page.locator("#engines").input_value() == "1"


# Compares, every 50 ms while sequences run, what is drawn with the state of the stream.
COLLECT = """async () => {
  const wrong = [];
  let rows = 0;
  const text = (id) => document.getElementById(id).textContent;
  for (let i = 0; i < 400; i += 1) {
    await new Promise((done) => setTimeout(done, 50));
    own.draw();
    const { sequences, stats, numBlocks } = own.state;
    const running = [...sequences.values()].filter((each) => each.status === "running");
    rows = Math.max(rows, running.length);
    if (running.length === 0) break;
    const held = new Set(running.flatMap((each) => each.blocks)).size;
    const items = [...document.querySelectorAll("#running li")];
    const drawn = items.map((row) => Number(row.dataset.id));
    const pairs = [
      ["held", held, Number(text("num-held"))],
      ["used", numBlocks - stats.num_free_blocks, Number(text("num-held"))],
      ["rows", running.map((each) => each.id).sort().join(), drawn.sort().join()],
      ["running", stats.num_running, Number.parseInt(text("num-running"), 10)],
      ["waiting", stats.num_waiting, Number(text("num-waiting"))],
    ];
    const [x, y, wide] = own.map.box(running[0].blocks[0]);
    const ratio = devicePixelRatio;
    const pixel = own.map.drawing.context.getImageData((x + 2) * ratio, (y + 8) * ratio, 1, 1).data;
    if (pixel[3] === 0) pairs.push(["a pixel of a held block", "painted", "empty"]);
    wrong.push(...pairs.filter(([, one, other]) => one !== other));
  }
  return { wrong, rows };
}"""


def test_two_tabs_with_one_system_prompt_share_blocks(tabs: Tabs, server: Running) -> None:
    pages = [tabs.open(server.url) for _ in range(2)]
    for page in pages:
        page.click("#open-settings")
        page.fill("[name=system]", SYSTEM)
        page.fill("[name=max_tokens]", "400")
        page.click("#settings [value=save]")
    for page in pages:
        say(page, "Go")
    wait_for(pages[0], "Number(document.getElementById('num-shared').textContent) > 5")
    for page in pages:
        page.keyboard.press("Escape")
        wait_for_answer(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 820, 1440])
def test_no_window_is_too_narrow(tabs: Tabs, scheme: str, width: int) -> None:
    text = (
        "x" * 300
        + "\n\n```\n"
        + "y" * 300
        + "\n```\n\n| a | b |\n|---|---|\n| "
        + "z" * 200
        + " | 2 |"
    )
    with served(tabs, FakeLLM(text=text)) as server:
        size = {"width": width, "height": 780}
        page = tabs.open(server.url, viewport=size, color_scheme=scheme)
        say(page, "w" * 300)
        wait_for_answer(page)
        for view in ("chat", "engine"):
            if width < 820:
                page.click(f"#show-{view}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for name in ("messages", "engine"):
                overflow = page.evaluate(f"(e => e.scrollWidth - e.clientWidth)({name})")
                assert overflow <= 0, name
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == (scheme == "dark")


def test_the_menu_says_whether_it_is_open(tabs: Tabs) -> None:
    with served(tabs, FakeLLM()) as server:
        page = tabs.open(server.url, viewport={"width": 400, "height": 700})
        say(page, "Hello")
        wait_for_answer(page)
        page.click("#menu")
        assert page.get_attribute("#menu", "aria-expanded") == "true"
        page.click(".chat-name")
        assert page.get_attribute("#menu", "aria-expanded") == "false"


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
        assert page.evaluate(NAMELESS) == []


NAMELESS = """() => [...document.querySelectorAll("button, input, textarea, canvas, [tabindex]")]
  .filter((each) => !each.closest("#numbers canvas") && !(each.getAttribute("aria-label")
    || each.labels?.length || each.textContent.trim() || each.closest("dl")))
  .map((each) => each.outerHTML)"""


def test_the_page_applies_changes_as_the_engine_means_them(tabs: Tabs) -> None:
    """What its code makes of a stream equals fresh snapshots, preemption and sharing included."""
    with served(tabs, FakeLLM()) as server:
        page = tabs.open(server.url)
        for seed in range(10):
            pairs = [(as_event(news), as_event(whole)) for news, whole in recorded(seed)]
            assert page.evaluate(APPLY, json.loads(json.dumps(pairs))) == []


APPLY = """async (pairs) => {
  const { apply } = await import("/page/state.js");
  const plain = ({ sequences, queue, cached, stats }) => JSON.stringify([
    [...sequences.values()].sort((one, other) => one.id - other.id),
    queue, [...cached].sort(), stats,
  ]);
  let state = null;
  return pairs.filter(([news, whole]) => {
    state = apply(state, news);
    return plain(state) !== plain(apply(null, whole));
  });
}"""


def recorded(seed: int) -> Iterator[tuple[Any, Any]]:
    rng = random.Random(seed)
    core = build_core(num_blocks=12, num_slots=4, budget=7, caching=True, depth=1, is_paced=False)
    sequences = make_sequences(make_requests(rng))
    clock = Clock()
    observer = Observer(core.scheduler, clock)
    core.executor = TimedExecutor(core.executor, observer.timer)
    while sequences or core.has_unfinished:
        while sequences and rng.random() < 0.5:
            core.add(sequences.pop(0).request)
        observer.timer.begin()
        endings = core.step().endings
        observer.timer.end()
        observer.end(endings)
        clock.now += rng.choice([0.0, 0.1])
        news = observer.news(stats_of(core))
        if news is not None:
            yield news, replace(snapshot(core), time=news.time)
