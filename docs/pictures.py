"""Make the pictures of the page, with Chromium and the default model: `make pictures`."""

from __future__ import annotations

import base64
import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm import AsyncLLM
from nanovllm.cli.serve import DEMO
from tests.serve.browser import Tabs, browser, say, wait_for
from tests.serve.running import Running, running

FOLDER = Path(__file__).parent
QUESTION = "What is a cache, and why is it fast? Answer in a few sentences, then give a short list."
SECONDS = 240.0
FRAME_HUNDREDTHS = 16
Image = npt.NDArray[np.uint8]  # [height, width, 3]

# Return the pixels of a PNG file; both are in base64.
PIXELS = """async (png) => {
  const blob = await (await fetch(`data:image/png;base64,${png}`)).blob();
  const image = await createImageBitmap(blob);
  const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  let text = "";
  for (let i = 0; i < data.length; i += 1) if (i % 4 < 3) text += String.fromCharCode(data[i]);
  return [image.width, image.height, btoa(text)];
}"""


def main() -> None:
    with browser() as chromium:
        with opened(chromium, 800, allow_pause=False) as (page, _):
            picture_page(page)
        with opened(chromium, 1000, allow_pause=True) as (page, server):
            picture_step_mode(page, server)
        with opened(chromium, 800, allow_pause=True) as (page, server):
            decoding = chromium.new_page()
            frames = [pixels(decoding, png) for png in picture_blocks(page, server)]
    (FOLDER / "blocks.gif").write_bytes(as_gif(frames))


@contextlib.contextmanager
def opened(chromium: Any, height: int, allow_pause: bool) -> Iterator[tuple[Any, Running]]:
    """Yield the page of a new engine, and its server."""
    llm, tabs = AsyncLLM("smollm2", depth=0, **DEMO), Tabs(chromium)
    options: dict[str, Any] = {"served_model_name": ("smollm2",), "allow_pause": allow_pause}
    try:
        with running(llm, **options) as server:
            yield tabs.open(server.url, viewport={"width": 1280, "height": height}), server
            tabs.close()
    finally:
        llm.close()


def picture_page(page: Any) -> None:
    """Show a chat and four prompts with a common prefix."""
    limit_answers(page)
    say(page, QUESTION)
    wait_for(page, "document.querySelector('.assistant .body')?.innerText.length > 5", SECONDS)
    page.click("#try-prefix")
    wait_for(page, "document.querySelectorAll('#running li').length === 5", SECONDS)
    wait_for(page, "document.querySelector('.assistant .body').innerText.length > 150", SECONDS)
    page.mouse.move(600, 500)
    page.wait_for_selector("#tip", state="hidden")
    page.screenshot(path=FOLDER / "page.png")


def picture_step_mode(page: Any, server: Running) -> None:
    """Show the step that admits sequences with a common prefix, and the text of a block."""
    limit_answers(page)
    pause(page)
    say(page, QUESTION)
    page.wait_for_selector("#queue li")
    page.click("#try-prefix")
    wait_for(page, "document.querySelectorAll('#queue li').length === 5", SECONDS)
    for _ in range(2):
        step(page, server)
    page.hover("#map", position={"x": 60, "y": 8})
    page.wait_for_selector("#tip", state="hidden")
    page.screenshot(path=FOLDER / "step_mode.png")


def picture_blocks(page: Any, server: Running) -> Iterator[bytes]:
    """Yield a picture of the map and the steps after each of many steps, as PNG files."""
    limit_answers(page)
    pause(page)
    page.evaluate("document.getElementById('step-mode').style.display = 'none'")
    box = page.locator("#engine").bounding_box()
    top = page.locator("#map-title").bounding_box()["y"] - 12
    bottom = page.locator("#step-detail").bounding_box()
    clip = {"x": box["x"], "y": top, "width": box["width"]}
    clip["height"] = bottom["y"] + bottom["height"] - top + 8

    def frames(num_steps: int) -> Iterator[bytes]:
        for _ in range(num_steps):
            step(page, server)
            yield page.screenshot(clip=clip)

    yield page.screenshot(clip=clip)
    say(page, QUESTION)
    page.wait_for_selector("#queue li")
    yield from frames(12)
    page.click("#try-prefix")
    wait_for(page, "document.querySelectorAll('#queue li').length === 4", SECONDS)
    yield from frames(36)
    page.click("#try-long")
    page.wait_for_selector("#queue li")
    yield from frames(36)


def limit_answers(page: Any) -> None:
    page.click("#open-settings")
    page.fill("[name=max_tokens]", "200")
    page.fill("[name=temperature]", "0")
    page.click("#settings [value=save]")


def pause(page: Any) -> None:
    page.evaluate("async () => { window.own = (await import('/page/main.js')).engine; }")
    page.click("#pause")
    page.wait_for_selector("#status[data-state=paused]")


def step(page: Any, server: Running) -> None:
    """Run one step, and wait until the page has drawn it."""
    time = page.evaluate("own.state.steps.at(-1)?.begin ?? 0")
    server.http.post("/engine/step")
    wait_for(page, f"(own.state.steps.at(-1)?.begin ?? 0) > {time}", SECONDS)
    page.evaluate("() => new Promise((done) => { own.draw(); requestAnimationFrame(done); })")


def pixels(page: Any, png: bytes) -> Image:
    width, height, data = page.evaluate(PIXELS, base64.b64encode(png).decode())
    return np.frombuffer(base64.b64decode(data), np.uint8).reshape(height, width, 3)


def as_gif(images: list[Image]) -> bytes:
    """Encode an endless animation in at most 255 colors; unchanged pixels are transparent."""
    packed = [image.astype(np.int32) @ np.array([65536, 256, 1]) for image in images]
    colors, numbers = np.unique(
        np.concatenate([each.ravel() for each in packed]), return_counts=True
    )
    kept = colors[np.argsort(-numbers)[:255]]
    channels = np.array([16, 8, 0])
    distances = (
        (colors[:, None, None] >> channels & 255) - (kept[None, :, None] >> channels & 255)
    ) ** 2
    nearest = distances.sum(2).argmin(1).astype(np.uint8)
    height, width = packed[0].shape
    palette = (kept[:, None] >> channels & 255).astype(np.uint8).tobytes().ljust(768, b"\0")
    parts = [b"GIF89a", struct.pack("<HHBBB", width, height, 0xF7, 0, 0), palette]
    parts.append(b"\x21\xff\x0bNETSCAPE2.0\x03\x01\0\0\0")
    before = np.full((height, width), 255, np.uint8)
    for image in packed:
        indices = nearest[np.searchsorted(colors, image)]
        rows, columns = np.nonzero(indices != before)
        top, left = (rows.min(), columns.min()) if len(rows) else (0, 0)
        bottom, right = (rows.max() + 1, columns.max() + 1) if len(rows) else (1, 1)
        changed = np.where(indices == before, 255, indices)[top:bottom, left:right].astype(np.uint8)
        parts.append(struct.pack("<BBBBHBB", 0x21, 0xF9, 4, 5, FRAME_HUNDREDTHS, 255, 0))
        parts.append(struct.pack("<BHHHHB", 0x2C, left, top, right - left, bottom - top, 0))
        parts.append(b"\x08" + in_blocks(compressed(changed.tobytes())) + b"\0")
        before = indices
    return b"".join([*parts, b"\x3b"])


def in_blocks(data: bytes) -> bytes:
    blocks = [data[start : start + 255] for start in range(0, len(data), 255)]
    return b"".join(bytes([len(block)]) + block for block in blocks)


def compressed(values: bytes) -> bytes:
    """Compress bytes with GIF's variant of LZW."""
    clear, end = 256, 257
    bits, num_bits, width = clear, 9, 9
    out = bytearray()
    codes: dict[int, int] = {}
    prefix, *rest = values
    for value in [*rest, None]:
        key = -1 if value is None else prefix << 8 | value
        if key in codes:
            prefix = codes[key]
            continue
        bits |= prefix << num_bits
        num_bits += width
        if value is not None:
            prefix = value
            code = end + 1 + len(codes)
            if code < 4096:
                codes[key] = code
                width = max(width, code.bit_length())
            else:
                bits |= clear << num_bits
                num_bits += width
                codes, width = {}, 9
        while num_bits >= 8:
            out.append(bits & 255)
            bits, num_bits = bits >> 8, num_bits - 8
    bits |= end << num_bits
    return bytes(out) + bits.to_bytes(4, "little")


if __name__ == "__main__":
    main()
