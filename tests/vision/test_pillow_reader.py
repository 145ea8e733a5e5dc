"""Images are checked, decoded and resized as transformers' image processor does."""

from __future__ import annotations

import base64
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from nanovllm.engine.images import PromptImage
from nanovllm.errors import PromptTooLongError, RequestError
from nanovllm.vision import pillow_reader
from nanovllm.vision.image_settings import ImageSettings
from nanovllm.vision.pillow_reader import PillowReader, resized
from tests.vision.tiny_vision import IMAGE, PROCESSOR, VISION, noise, processor

SETTINGS = ImageSettings(
    vision_config=VISION,
    placeholder_id=IMAGE,
    mrope_section=(3, 2, 1),
    patch_size=PROCESSOR["patch_size"],
    merge_size=PROCESSOR["merge_size"],
    frames=PROCESSOR["temporal_patch_size"],
    min_pixels=PROCESSOR["size"]["shortest_edge"],
    max_pixels=PROCESSOR["size"]["longest_edge"],
    mean=tuple(PROCESSOR["image_mean"]),
    std=tuple(PROCESSOR["image_std"]),
)


@pytest.fixture
def reader() -> PillowReader:
    return PillowReader(SETTINGS, max_images=4, max_len=100)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def normalized(image: PromptImage) -> np.ndarray:
    """Return the patches of transformers' processor, computed from our resized pixels."""
    size = SETTINGS.token_size
    shape = image.width * size, image.height * size
    pixels = Image.frombytes("RGB", shape, image.pixels)
    return np.array(processor()(images=[pixels], do_resize=False).pixel_values)


def test_sizes_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = random.Random(0)
    low, high = SETTINGS.min_pixels, SETTINGS.max_pixels
    for _ in range(1000):
        height = rng.randint(1, 300)
        width = rng.randint(-(-height // 200), min(200 * height, 400))
        want = smart_resize(height, width, SETTINGS.token_size, low, high)
        assert resized(height, width, SETTINGS) == want


@pytest.mark.parametrize("size", [(8, 8), (90, 20), (17, 60), (300, 200), (1, 150), (5, 3)])
def test_pixels_are_those_of_transformers(reader: PillowReader, size: tuple[int, int]) -> None:
    image = noise(1, *size)
    read, want = reader.read(image), processor()(images=[image])
    assert [1, 2 * read.height, 2 * read.width] == want.image_grid_thw[0].tolist()
    assert np.array_equal(normalized(read), want.pixel_values)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_formats(reader: PillowReader, form: str, mode: str) -> None:
    image = noise(2, 24, 16).convert(mode)
    options = {"lossless": True} if form == "WEBP" else {}
    stored = Image.open(BytesIO(encoded(image, form, **options)))
    read = reader.read(data_url(encoded(image, form, **options)))
    assert read.pixels == reader.read(stored.convert("RGB")).pixels


def test_jpeg_is_turned_upright(reader: PillowReader) -> None:
    image = noise(3, 32, 16)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    data = encoded(image, "JPEG", exif=exif)
    read = reader.read(data_url(data, "image/jpeg"))
    assert (read.height, read.width) == (4, 2)


def test_the_first_frame_is_read(reader: PillowReader) -> None:
    frames = [noise(seed, 16, 16) for seed in range(3)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    first = Image.open(BytesIO(data)).convert("RGB")
    assert reader.read(data_url(data, "image/gif")).pixels == reader.read(first).pixels


def test_an_id_stands_for_one_exact_image(reader: PillowReader) -> None:
    first, other = reader.read(noise(1, 32, 32)), reader.read(noise(2, 32, 32))
    assert first.token_id < other.token_id + 2 <= 0
    assert first.token_id != other.token_id
    assert reader.read(noise(1, 32, 32)) == first
    flat = Image.new("RGB", (16, 64))
    assert reader.read(flat).token_id != reader.read(flat.transpose(2)).token_id


def test_ids_are_never_used_again(monkeypatch: pytest.MonkeyPatch, reader: PillowReader) -> None:
    monkeypatch.setattr("nanovllm.vision.placeholders.MAX_DIGESTS", 2)
    ids = [reader.read(noise(seed, 16, 16)).token_id for seed in (1, 2, 1, 3, 2, 1)]
    assert ids == [-2, -3, -2, -4, -5, -6]


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """Return a part of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file that promises any number of pixels, and has none."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    zeros = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zeros) + chunk(b"IEND", b"")


def gif_of_frames(count: int) -> bytes:
    whole = encoded(Image.new("P", (8, 8)), "GIF")
    start = whole.index(b",")
    return whole[:start] + whole[start:-1] * count + b";"


def jpeg_of_scans(count: int) -> bytes:
    """Return a progressive JPEG of 40 megapixels that repeats its last scan."""
    data = encoded(Image.new("L", (6300, 6300), 100), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * count + data[-2:]


def with_padding(start: int, padding: bytes, whole: bytes) -> bytes:
    """Return a file with megabytes of empty parts."""
    return whole[:start] + padding * (4 * 2**20 // len(padding)) + whole[start:]


def wrong_images() -> Iterator[tuple[str, Callable[[], Any], str]]:
    good = encoded(noise(1, 32, 32), "PNG")
    jpeg = encoded(noise(1, 64, 64), "JPEG")
    webp = bytearray(encoded(Image.new("RGB", (9, 9)), "WEBP", lossless=True))
    webp[21:25] = b"\xff\xff\xff\x0f"  # 16,384 x 16,384 pixels
    yield "png bomb", lambda: data_url(png_header(60_000, 60_000)), "megapixels|decompression"
    yield "large", lambda: data_url(png_header(8_000, 6_000)), "at most 40 megapixels"
    yield "narrow", lambda: data_url(png_header(1, 100_000)), "at most 200 times"
    yield "webp bomb", lambda: data_url(bytes(webp), "image/webp"), "cannot be read|megapixels"
    gif = encoded(Image.new("P", (9, 9)), "GIF")
    bomb = gif[:6] + struct.pack("<HH", 65535, 65535) + gif[10:]
    yield "gif bomb", lambda: data_url(bomb, "image/gif"), "megapixels|decompression"
    tiff = encoded(Image.new("1", (9, 9)), "TIFF")
    yield "tiff", lambda: data_url(tiff, "image/tiff"), "cannot be read"
    yield "bmp", lambda: data_url(encoded(Image.new("P", (9, 9)), "BMP"), "image/bmp"), "cannot"
    yield "scans", lambda: data_url(jpeg_of_scans(100), "image/jpeg"), "more than 30 scans"
    yield "segments", lambda: data_url(with_padding(2, b"\xff\xe1\0\2", jpeg)), "segments"
    yield "fill bytes", lambda: data_url(with_padding(2, b"\xff", jpeg)), "too many parts"
    yield "junk", lambda: data_url(with_padding(20, b"a", jpeg)), "too many parts"
    yield "chunks", lambda: data_url(with_padding(33, chunk(b"prVt"), good)), "too many parts"
    yield "no pixels", lambda: data_url(with_padding(33, chunk(b"IDAT"), good)), "too many parts"
    blocks = b"\x21\xfe" + (b"\xff" + b"a" * 255) * 2**13 + b"\0"
    start = gif.index(b",")
    yield "comment", lambda: data_url(gif[:start] + blocks + gif[start:]), "too many parts"
    yield "comments", lambda: data_url(with_padding(start, b"\x21\xfe\1a\0", gif)), "too many"
    yield "truncated png", lambda: data_url(good[:-900]), "cannot be read"
    yield "truncated jpeg", lambda: data_url(jpeg[:-400], "image/jpeg"), "cannot be read"
    yield "empty png", lambda: data_url(png_header(3_000, 3_000)), "cannot be read"
    yield "nothing", lambda: data_url(b""), "cannot be read"
    yield "text", lambda: data_url(b"<svg></svg>"), "cannot be read"
    yield "svg", lambda: data_url(b"<svg></svg>", "image/svg+xml"), "one of PNG"
    yield "pdf", lambda: data_url(good, "application/pdf"), "one of PNG"
    yield "base64", lambda: "data:image/png;base64,!!!", "not valid base64"
    yield "no base64", lambda: "data:image/png,abc", "a data URL"
    yield "http", lambda: "http://127.0.0.1/x.png", "a data URL"
    yield "file", lambda: "file:///etc/passwd", "a data URL"
    yield "large file", lambda: "data:image/png;base64," + "A" * (29 << 20), "at most 20 MiB"
    yield "bytes", lambda: good, "a PIL image or a data URL"
    yield "large PIL image", lambda: Image.new("1", (8_000, 6_000)), "at most 40 megapixels"


CASES = {name: (make, match) for name, make, match in wrong_images()}


@pytest.mark.parametrize("name", CASES)
def test_wrong_images_are_refused_at_once(reader: PillowReader, name: str) -> None:
    make, match = CASES[name]
    source, start = make(), time.process_time()
    with pytest.raises(RequestError, match=match) as raised:
        reader.read(source)
    assert raised.value.status == 400
    assert len(str(raised.value)) < 500
    assert time.process_time() - start < 1


def test_long_and_progressive_files_are_read(reader: PillowReader) -> None:
    """As are files with appended data, which may look like more scans."""
    large = noise(5, 1500, 1200)
    assert reader.read(data_url(encoded(large, "PNG"))) == reader.read(large)
    jpeg = encoded(large, "JPEG", progressive=True, quality=95)
    want = reader.read(Image.open(BytesIO(jpeg)))
    assert reader.read(data_url(jpeg + b"\xff\xda" * 100, "image/jpeg")) == want


def test_prompts_that_are_too_long_are_not_decoded(
    monkeypatch: pytest.MonkeyPatch, reader: PillowReader
) -> None:
    monkeypatch.setattr(pillow_reader, "_decode", lambda image: pytest.fail("decoded"))
    images = [noise(1, 48, 32)] * 4  # 24 tokens each
    with pytest.raises(PromptTooLongError, match="has 101 tokens, 96 of them in images, but"):
        reader.place([5, 5, 5, 5, 5, *[IMAGE] * 4], images)


def test_many_frames_are_not_decoded(reader: PillowReader) -> None:
    source, start = data_url(gif_of_frames(10_000), "image/gif"), time.process_time()
    assert reader.read(source).num_tokens == 4
    assert time.process_time() - start < 1


def test_few_images_are_decoded_at_once(
    monkeypatch: pytest.MonkeyPatch, reader: PillowReader
) -> None:
    running, most = 0, 0

    def slow(image: Image.Image) -> Image.Image:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.002)
        running -= 1
        return image

    monkeypatch.setattr(pillow_reader, "_decode", slow)
    image = noise(1, 16, 16)
    threads = [Thread(target=reader.place, args=([IMAGE, 1], [image])) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == pillow_reader.MAX_DECODING


def test_placeholders_are_expanded(reader: PillowReader) -> None:
    images = [noise(1, 32, 16), noise(2, 16, 16)]
    placed = reader.place([7, IMAGE, 8, 9, IMAGE], images)
    first, second = placed.images
    assert [(first.start, first.end), (second.start, second.end)] == [(1, 9), (11, 15)]
    ids = [7, *[first.token_id] * 8, 8, 9, *[second.token_id] * 4]
    assert placed.token_ids.tolist() == ids


@pytest.mark.parametrize(
    ("ids", "count", "match"),
    [
        ([1, IMAGE], 2, "has 1 image placeholders .* for 2 images"),
        ([1, IMAGE, IMAGE], 1, "has 2 image placeholders .* for 1 images"),
        ([IMAGE], 1, "images with a token of text"),
        ([1, *[IMAGE] * 5], 5, "at most 4 .limit_mm_per_prompt., got 5"),
    ],
)
def test_wrong_placeholders(reader: PillowReader, ids: list[int], count: int, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        reader.place(ids, [noise(1, 16, 16)] * count)


def test_the_wrong_image_is_named(reader: PillowReader) -> None:
    with pytest.raises(RequestError, match=r"images\[1\]: image must be a data URL"):
        reader.place([1, IMAGE, IMAGE], [noise(1, 16, 16), "http://example.com/a.png"])


def test_paths_are_never_read(tmp_path: Path, reader: PillowReader) -> None:
    path = tmp_path / "image.png"
    noise(1, 16, 16).save(path)
    with pytest.raises(RequestError, match="a data URL"):
        reader.read(str(path))
