"""Read the images of requests with Pillow: check, decode and resize them. Does not import torch."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import threading
from array import array
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO

from PIL import ExifTags, Image, ImageOps

from nanovllm.engine.images import ImageSource, PlacedImages, PromptImage
from nanovllm.errors import RequestError, at_index
from nanovllm.validation import require
from nanovllm.vision.image_settings import ImageSettings
from nanovllm.vision.placeholders import PlaceholderIds

MAX_BYTES = 20 << 20  # of an encoded image
MAX_PIXELS = 40_000_000
MAX_ASPECT = 200  # as in transformers
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
MAX_DECODING = 2  # images that are decoded at the same time: each takes up to 0.5 GB of memory


class PillowReader:
    """Reads images for one model."""

    refusal = None

    def __init__(self, settings: ImageSettings, max_images: int) -> None:
        self.settings, self.max_images = settings, max_images
        self.placeholder_id = settings.placeholder_id
        self._ids = PlaceholderIds()
        self._decoding = threading.BoundedSemaphore(MAX_DECODING)

    def place(self, token_ids: Sequence[int], sources: Sequence[ImageSource]) -> PlacedImages:
        expected = f"at most {self.max_images} (limit_mm_per_prompt)"
        require(len(sources) <= self.max_images, "number of images", expected, len(sources))
        read = [self._read_at(index, sources) for index in range(len(sources))]
        placeholder = self.placeholder_id
        count = sum(token_id == placeholder for token_id in token_ids)
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

    def _read_at(self, index: int, sources: Sequence[ImageSource]) -> PromptImage:
        try:
            return self.read(sources[index])
        except RequestError as error:
            raise at_index(error, "images", index, len(sources)) from error

    def read(self, source: ImageSource) -> PromptImage:
        """Check, decode and resize an image."""
        settings, size = self.settings, self.settings.token_size
        if isinstance(source, PromptImage):
            shape, pixels = (source.height, source.width), source.pixels
        else:
            with self._decoding:
                image = _decode(source if isinstance(source, Image.Image) else _open(source))
                height, width = resized(image.height, image.width, settings)
                pixels = image.resize((width, height), Image.Resampling.BICUBIC).tobytes()
            shape = height // size, width // size
        digest = hashlib.sha256(repr(shape).encode() + pixels).digest()
        return PromptImage(self._ids.id_of(digest), settings.placeholder_id, *shape, pixels)


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


def _open(source: ImageSource) -> Image.Image:
    require(isinstance(source, str), "image", "a PIL image or a data URL", source)
    data = _data_of(source)
    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except Exception as error:  # broken files raise many types of errors
        raise _unreadable(error) from error


def _data_of(url: str) -> bytes:
    """Return the content of a data URL."""
    header, comma, data = url.partition(",")
    is_valid = header[:5].lower() == "data:" and header[-7:].lower() == ";base64" and comma
    expected = "a data URL (data:image/png;base64,...); other addresses are not fetched"
    require(is_valid, "image", expected, url)
    kind = header[5:-7].partition(";")[0].lower()
    is_image = kind.startswith("image/") and kind != "image/svg+xml"
    require(is_image, "image", f"one of {', '.join(FORMATS)}", kind)
    require(len(data) * 3 // 4 <= MAX_BYTES, "image", f"at most {MAX_BYTES >> 20} MiB", len(data))
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the image is not valid base64: {error}", param="image") from error


def _decode(image: Image.Image) -> Image.Image:
    """Return the first frame of an image as RGB, upright; check its size before decoding it."""
    width, height = image.size
    is_small = 0 < width * height <= MAX_PIXELS
    require(is_small, "image", f"of at most {MAX_PIXELS // 10**6} megapixels", image.size)
    is_shaped = max(width, height) <= MAX_ASPECT * min(width, height)
    require(is_shaped, "image", f"at most {MAX_ASPECT} times as long as wide", image.size)
    try:  # without copies that are not needed: an image may take 120 MB
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # broken files raise many types of errors
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> RequestError:
    kinds = ", ".join(FORMATS)
    return RequestError(
        f"the image cannot be read ({error!s:.200}); send a complete {kinds} file", param="image"
    )
