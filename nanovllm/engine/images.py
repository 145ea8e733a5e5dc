"""Images in prompts: the record of an image, and the interface to the folder that reads images.

In the engine, an image's placeholder tokens have a negative id of its own; `vision/placeholders.py`
explains why.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanovllm.engine.engine_options import TEXT_ONLY
from nanovllm.errors import RequestError
from nanovllm.validation import require

# How an image is passed: a PIL image, a data URL, or a PromptImage, which another process may have
# read.
ImageSource = Any
MAX_BYTES = 20 << 20  # of an encoded image
IMAGE_TYPES = ("image", "image_pil", "image_url")  # content parts; the last two as in vLLM


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt, resized for the model."""

    token_id: int  # of its placeholders in the engine: negative, and stands for this exact image
    placeholder_id: int  # of its placeholders outside the engine: the model's own
    height: int  # in tokens
    width: int
    pixels: bytes = field(repr=False)  # RGB, row by row
    start: int = 0  # position of its first placeholder

    @property
    def num_tokens(self) -> int:
        return self.height * self.width

    @property
    def rope_offset(self) -> int:
        """What the image adds to the positions of later tokens for rotations, as in M-RoPE."""
        return max(self.height, self.width) - self.num_tokens

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """The tokens of a prompt with images, and the images with their positions."""

    token_ids: array[int]
    images: tuple[PromptImage, ...]


class ImageReader(Protocol):
    """Reads the images of prompts. Thread-safe."""

    @property
    def placeholder_id(self) -> int | None:
        """The model's own id of placeholders; None if it has none."""

    @property
    def refusal(self) -> str | None:
        """Why requests with images are refused; None if they are not."""

    def place(self, token_ids: Sequence[int], sources: Sequence[ImageSource]) -> PlacedImages:
        """Read the images of a prompt, and expand the placeholder of each one.

        The prompt has one placeholder for each image, or as many as the image has tokens.
        """

    def read_all(self, sources: Sequence[ImageSource]) -> list[PromptImage | RequestError]:
        """Read images; in place of one that cannot be read, return the error.

        Raise PromptTooLongError, before any is decoded, if they alone exceed the context.
        """


@dataclass(frozen=True, slots=True)
class NoImages:
    """Refuses images."""

    refusal: str = TEXT_ONLY
    placeholder_id = None

    def place(self, token_ids: Sequence[int], sources: Sequence[ImageSource]) -> PlacedImages:
        raise RequestError(f"the prompt has images, but {self.refusal}", param="prompt")

    def read_all(self, sources: Sequence[ImageSource]) -> list[PromptImage | RequestError]:
        return [RequestError(self.refusal, param="prompt") for _ in sources]


def outside_ids(token_ids: array[int], images: Sequence[PromptImage]) -> list[int]:
    """Return tokens of a prompt with these images as they are shown outside the engine."""
    ids = token_ids.tolist()
    return shown_ids(ids, images[0].placeholder_id) if images else ids


def shown_ids(token_ids: list[int], placeholder_id: int) -> list[int]:
    return [placeholder_id if token_id < 0 else token_id for token_id in token_ids]


def images_of(data: object) -> tuple[ImageSource, ...]:
    """Return the images in a prompt's `multi_modal_data`, which has one or a list of them."""
    expected = 'a dict {"image": image}, with one image or a list of them'
    is_valid = isinstance(data, Mapping) and {*data} <= {"image"}
    require(is_valid, "multi_modal_data", expected, data)
    assert isinstance(data, Mapping)
    images = data.get("image")
    if images is None:
        return ()
    return tuple(images) if isinstance(images, (list, tuple)) else (images,)


@dataclass(slots=True)
class ImageParts:
    """Takes the images out of the messages of a conversation."""

    refusal: str | None
    sources: list[ImageSource] = field(default_factory=list)

    def split(self, content: object, path: str) -> list[dict[str, str]] | None:
        """Return the parts of a content as templates expect them; None if it has no image."""
        if not isinstance(content, (list, tuple)) or not any(map(_is_image, content)):
            return None
        return [self._split(part, path) for part in content]

    def _split(self, part: Any, path: str) -> dict[str, str]:
        if not _is_image(part):
            text = part.get("text") if isinstance(part, Mapping) else part
            is_text = text is part or part.get("type", "text") == "text"
            require(is_text and isinstance(text, str), path, "texts and images", part)
            return {"type": "text", "text": str(text)}
        kind = part["type"]
        if self.refusal is not None:
            message = f"{path} has a part of type {kind!r}, but {self.refusal}"
            raise RequestError(message, param=path)
        source = part.get(kind)
        if isinstance(source, Mapping):
            source = source.get("url")
        require(source is not None, path, f"image parts with {kind!r}", part)
        self.sources.append(source)
        return {"type": "image"}


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES
