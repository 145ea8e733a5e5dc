"""Read the images of requests with Pillow: check, decode and resize them. Does not import torch."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
import threading
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from typing import TypeVar

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from nanovllm.engine.images import MAX_BYTES, ImageSource, PlacedImages, PromptImage
from nanovllm.errors import PromptTooLongError, RequestError, at_index
from nanovllm.validation import require
from nanovllm.vision.image_settings import ImageSettings
from nanovllm.vision.placeholders import PlaceholderIds

MAX_PIXELS = 40_000_000
MAX_ASPECT = 200  # as in transformers
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")  # Pillow decodes them in C, and without the GIL
MAX_DECODING = 2  # images that are decoded at the same time: each takes up to 0.5 GB of memory
# Pillow reads a file's small parts in Python, with the GIL: those before the pixels, then others.
MAX_HEADER_READS, MAX_READS = 10_000, 50_000
MAX_SCANS, MAX_SEGMENTS = 30, 1_000  # of a JPEG file: each scan visits all pixels
# As in libjpeg, the marker of a segment is neither an escaped byte, a restart nor padding.
JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
START_OF_SCAN, END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"

T = TypeVar("T")
U = TypeVar("U")
Opened = Image.Image | PromptImage


class PillowReader:
    """Reads images for one model."""

    refusal = None

    def __init__(self, settings: ImageSettings, max_images: int, max_len: int) -> None:
        self.settings, self.max_images, self.max_len = settings, max_images, max_len
        self.placeholder_id = settings.placeholder_id
        self._ids = PlaceholderIds()
        self._decoding = threading.BoundedSemaphore(MAX_DECODING)
        # `_open` has a lower limit than this warning.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)

    def place(self, token_ids: Sequence[int], sources: Sequence[ImageSource]) -> PlacedImages:
        expected = f"at most {self.max_images} (limit_mm_per_prompt)"
        require(len(sources) <= self.max_images, "number of images", expected, len(sources))
        placeholder = self.placeholder_id
        count = sum(token_id == placeholder for token_id in token_ids)
        read: list[PromptImage] = []
        for index, image in enumerate(self.read_all(sources, len(token_ids) - count)):
            if isinstance(image, RequestError):
                raise at_index(image, "images", index, len(sources)) from image
            read.append(image)
        is_expanded = count == sum(image.num_tokens for image in read)
        if count != len(read) and not is_expanded:
            raise RequestError(
                f"the prompt has {count} image placeholders (token {placeholder}) for "
                f"{len(read)} images; it needs one for each image, and none in its texts",
                param="prompt",
            )
        require(count < len(token_ids), "prompt", "images with a token of text", token_ids)
        images, expanded, unread, num_more = [], array("i"), iter(read), 0
        for token_id in token_ids:
            if token_id != placeholder:
                expanded.append(token_id)
            elif num_more:
                num_more -= 1
            else:
                image = replace(next(unread), start=len(expanded))
                images.append(image)
                expanded.extend([image.token_id] * image.num_tokens)
                num_more = image.num_tokens - 1 if is_expanded else 0
        return PlacedImages(expanded, tuple(images))

    def read_all(
        self, sources: Sequence[ImageSource], num_text_tokens: int = 0
    ) -> list[PromptImage | RequestError]:
        opened = [_attempt(_open, source) for source in sources]
        counts = [self._num_tokens(each) for each in opened if not isinstance(each, RequestError)]
        num_tokens = num_text_tokens + sum(counts)
        if num_tokens > self.max_len:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, {sum(counts)} of them in images, but "
                f"max_model_len is {self.max_len}; send fewer or smaller images"
            )
        return [
            each if isinstance(each, RequestError) else _attempt(self._read, each)
            for each in opened
        ]

    def read(self, source: ImageSource) -> PromptImage:
        """Check, decode and resize an image."""
        return self._read(_open(source))

    def _num_tokens(self, image: Opened) -> int:
        if isinstance(image, PromptImage):
            return image.num_tokens
        height, width = resized(image.height, image.width, self.settings)
        return height * width // self.settings.token_size**2

    def _read(self, image: Opened) -> PromptImage:
        settings, size = self.settings, self.settings.token_size
        if isinstance(image, PromptImage):
            shape, pixels = (image.height, image.width), image.pixels
        else:
            with self._decoding:
                decoded = _decode(image)
                height, width = resized(decoded.height, decoded.width, settings)
                pixels = decoded.resize((width, height), Image.Resampling.BICUBIC).tobytes()
            shape = height // size, width // size
        digest = hashlib.sha256(repr(shape).encode() + pixels).digest()
        return PromptImage(self._ids.id_of(digest), settings.placeholder_id, *shape, pixels)


def _attempt(function: Callable[[T], U], value: T) -> U | RequestError:
    try:
        return function(value)
    except RequestError as error:
        return error


def resized(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """Return the height and width to resize an image to, as transformers does for Qwen2-VL.

    Both become multiples of a token's size. The aspect ratio hardly changes.
    """
    size, low, high = settings.token_size, settings.min_pixels, settings.max_pixels
    new_height, new_width = round(height / size) * size, round(width / size) * size
    if new_height * new_width > high:
        scale = math.sqrt(height * width / high)
        new_height = max(size, math.floor(height / scale / size) * size)
        new_width = max(size, math.floor(width / scale / size) * size)
    elif new_height * new_width < low:
        scale = math.sqrt(low / (height * width))
        new_height = math.ceil(height * scale / size) * size
        new_width = math.ceil(width * scale / size) * size
    return new_height, new_width


def _open(source: ImageSource) -> Opened:
    """Read the header of an image, and check its size before it is decoded."""
    if isinstance(source, PromptImage):
        return source
    image = source if isinstance(source, Image.Image) else _open_file(source)
    width, height = image.size
    is_small = 0 < width * height <= MAX_PIXELS
    require(is_small, "image", f"of at most {MAX_PIXELS // 10**6} megapixels", image.size)
    is_shaped = max(width, height) <= MAX_ASPECT * min(width, height)
    require(is_shaped, "image", f"at most {MAX_ASPECT} times as long as wide", image.size)
    return image


def _open_file(source: object) -> Image.Image:
    if not isinstance(source, str):
        kind = type(source).__name__
        raise RequestError(f"image must be a PIL image or a data URL, got {kind}", param="image")
    file = _BoundedFile(_data_of(source))
    try:
        _check_scans(file.getvalue())
        image = Image.open(file, formats=FORMATS)
    except Exception as error:  # broken files raise many types of errors
        raise _unreadable(error) from error
    file.num_reads_left = MAX_READS
    return image


class _BoundedFile(BytesIO):
    """A file that ends reading with an error after a number of reads."""

    num_reads_left = MAX_HEADER_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_reads_left -= 1
        if self.num_reads_left < 0:
            raise ValueError("it has too many parts")
        return super().read(size)


def _check_scans(data: bytes) -> None:
    """Raise ValueError for a JPEG file that would take long to decode."""
    if not data.startswith(b"\xff\xd8"):
        return
    position, num_scans = 2, 0
    for _ in range(MAX_SEGMENTS):
        marker = JPEG_MARKER.search(data, position)
        if marker is None or marker[0] == END_OF_IMAGE:
            return
        num_scans += marker[0] == START_OF_SCAN
        if num_scans > MAX_SCANS:
            raise ValueError(f"it has more than {MAX_SCANS} scans")
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    raise ValueError(f"it has more than {MAX_SEGMENTS} segments")


def _data_of(url: str) -> bytes:
    """Return the content of a data URL."""
    header, comma, data = url.partition(",")
    is_valid = header[:5].lower() == "data:" and header[-7:].lower() == ";base64" and comma
    expected = "a data URL (data:image/png;base64,...); other addresses are not fetched"
    require(is_valid, "image", expected, url[:80])
    kind = header[5:-7].partition(";")[0].lower()
    is_image = kind.startswith("image/") and kind != "image/svg+xml"
    require(is_image, "image", f"one of {', '.join(FORMATS)}", kind)
    require(len(data) * 3 // 4 <= MAX_BYTES, "image", f"at most {MAX_BYTES >> 20} MiB", len(data))
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the image is not valid base64: {error}", param="image") from error


def _decode(image: Image.Image) -> Image.Image:
    """Return the first frame of an image as RGB, upright."""
    try:  # without copies that are not needed: an image may take 120 MB
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # broken files raise many types of errors
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> RequestError:
    kinds = ", ".join(FORMATS)
    why = "unknown format" if isinstance(error, UnidentifiedImageError) else f"{error!s:.200}"
    return RequestError(
        f"the image cannot be read ({why}); send a complete {kinds} file", param="image"
    )
