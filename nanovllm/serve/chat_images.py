"""Read the images of a conversation before it is rendered.

An image of the history that cannot be read becomes a text: an error about it would come back with
every later request, and so end the conversation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.images import ImageSource
from nanovllm.errors import RequestError
from nanovllm.serve.chat_turns import as_image, image_left_out, is_image, roles_of_history
from nanovllm.serve.fetch_images import with_fetched
from nanovllm.serve.fields import log_ignored
from nanovllm.serve.protocol import ChatFields
from nanovllm.serve.service import Service
from nanovllm.validation import require

ImageParts = Mapping[tuple[int, int], dict[str, Any]]  # keyed by the indices of message and part


@dataclass(frozen=True, slots=True)
class SentImage:
    position: tuple[int, int]
    path: str  # in the request
    source: ImageSource
    is_history: bool


async def read_images(service: Service, chat: ChatFields) -> ImageParts:
    """Return the parts that replace those with images: a read image each, or a text."""
    if service.llm.input_processor.image_reader.refusal is not None:
        return {}
    sent = list(_sent_images(chat))
    if not sent:
        return {}
    most = service.llm.config.max_images
    history = [each for each in sent if each.is_history]
    dropped = history[: max(len(sent) - most, 0)]  # the oldest
    kept = [each for each in sent if each not in dropped]
    expected = f"at most {most} (limit_mm_per_prompt)"
    require(len(kept) <= most, "number of images", expected, len(kept))
    domains = service.options.allowed_media_domains
    sources = await with_fetched([each.source for each in kept], domains)
    parts: dict[tuple[int, int], dict[str, Any]] = {}
    for each, image in zip(kept, await service.read_images(sources), strict=True):
        if not isinstance(image, RequestError):
            parts[each.position] = {"type": "image_url", "image_url": image}
        elif each.is_history:
            parts[each.position] = image_left_out("it cannot be read")
        else:
            raise RequestError(f"{each.path}: {image}", param=each.path) from image
    too_many = image_left_out(f"only {most} fit")
    return parts | dict.fromkeys((each.position for each in dropped), too_many)


def _sent_images(chat: ChatFields) -> Iterator[SentImage]:
    roles = [message.role for message in chat.messages]
    for i, is_history in enumerate(roles_of_history(roles)):
        content = chat.messages[i].content
        if roles[i] not in ("user", "tool") or not isinstance(content, list):
            continue
        for j, part in enumerate(content):
            if not is_image(part):
                continue
            # Of tool results, the APIs join the parts of several blocks.
            path = f"{chat.path(i)}[{j}]" if roles[i] == "user" else chat.path(i)
            given = as_image(part).get("image_url")
            is_object = isinstance(given, Mapping)
            source = given.get("url") if is_object else given
            detail = (given if is_object else part).get("detail")
            if detail not in (None, "auto"):
                why = "images are resized as the checkpoint defines"
                log_ignored(logging.WARNING, "images", "detail", why)
            yield SentImage((i, j), path, source, is_history)
