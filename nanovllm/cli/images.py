"""Images in the messages that the command line sends."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.errors import file_errors


def user_message(text: str, images: Sequence[str]) -> dict[str, Any]:
    """Return a user message: a text, and before it the images, given as data URLs."""
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def data_url(path: str) -> str:
    """Return the content of an image file as a data URL; the model checks it."""
    with file_errors("read", path):
        data = Path(path).expanduser().read_bytes()
    kind = mimetypes.guess_type(path)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
