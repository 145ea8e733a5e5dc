"""Adapt the turns of a conversation to what models read, and to strict chat templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanovllm.engine.engine_options import TEXT_ONLY
from nanovllm.errors import RequestError
from nanovllm.serve.parsing.tools import is_object

Turn = dict[str, Any]

# Types of content parts in the three chat APIs -> what messages call them.
PART_NAMES = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
SYSTEM_ROLES = ("system", "developer")


def left_out(part: Mapping[str, Any]) -> str:
    """Return the text that replaces a part of the history that is not text."""
    kind = str(part.get("type"))
    return f"[{PART_NAMES.get(kind, kind):.40} left out: {TEXT_ONLY}]"


def image_left_out(reason: str) -> dict[str, Any]:
    """Return the part that replaces an image of the history."""
    return {"type": "text", "text": f"[image left out: {reason}]"}


def as_image(part: Any) -> Any:
    """Return an image part of any API as one of the chat API; return other parts unchanged."""
    match part:
        case {"type": "input_image", "image_url": str(url)}:
            pass
        case {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}:
            url = f"data:{kind};base64,{data}"
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            pass
        case _:
            return part
    return {"type": "image_url", "image_url": {"url": url}}


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and as_image(part).get("type") == "image_url"


def roles_of_history(roles: Sequence[str]) -> list[bool]:
    """Return for each turn whether it belongs to the history, given the roles of all turns.

    The history is everything but the last user turn and leading system turns; without a user turn,
    it is the tool results.
    """
    users = [i for i, role in enumerate(roles) if role == "user"]

    def is_leading(i: int) -> bool:
        return not users or (roles[i] in SYSTEM_ROLES and i < users[0])

    return [role == "tool" or not (is_leading(i) or i == users[-1]) for i, role in enumerate(roles)]


def with_supported(
    turns: Sequence[Turn],
    path: Callable[[int], str],
    image_refusal: str | None,
    images: Mapping[tuple[int, int], Any],
) -> list[Turn]:
    """Replace parts that the model cannot read, and incomplete calls, in the history.

    An error about them would come back with every later request, and so end the conversation.
    Elsewhere, they raise RequestError. `path` returns the path of a turn's content in the request;
    `images` has what replaces images, keyed by the indices of turn and part.
    """
    written = []
    for i, is_history in enumerate(roles_of_history([turn["role"] for turn in turns])):
        turn = turns[i]
        content, role = turn.get("content"), turn["role"]
        if isinstance(content, list):
            parts = [
                images.get((i, j)) or _text_part(part, is_history, path(i), image_refusal)
                for j, part in enumerate(content)
            ]
            turn = {**turn, "content": parts}
        if role == "assistant" and turn.get("tool_calls") and i + 1 < len(turns):
            turn = {**turn, "tool_calls": [_with_object(call) for call in turn["tool_calls"]]}
        written.append(turn)
    return written


def _with_object(call: Any) -> Any:
    """Make the arguments of an earlier call an object: a call may have been cut off."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, dict) or is_object(arguments or "{}"):
        return call
    return {**call, "function": {**call["function"], "arguments": {"incomplete": arguments}}}


def _text_part(part: Any, is_history: bool, path: str, image_refusal: str | None) -> Any:
    text = as_text(part)
    if text is not part and not is_history:
        reason = TEXT_ONLY
        if PART_NAMES.get(str(part.get("type"))) == "image":
            reason = image_refusal or "images are data URLs in turns of users and tools"
        kind = f"{part.get('type')!r:.80}"
        raise RequestError(f"{path} has a part of type {kind}, but {reason}", param=path)
    return text


def as_text(part: Any) -> Any:
    """Return a text part as it is, and the text that replaces any other part."""
    if not isinstance(part, Mapping) or part.get("type", "text") == "text":
        return part  # checked later
    return {"type": "text", "text": left_out(part)}


def merge_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Join turns with the same role in a row, except tool results, as some templates require.

    Later system turns are appended to the user turn or tool result before them.
    """
    merged: list[Turn] = []
    for turn in turns:
        role = turn["role"]
        if role in SYSTEM_ROLES:
            is_leading = all(each["role"] == "system" for each in merged)
            before = [each for each in merged if each["role"] in ("user", "tool")]
            if not is_leading and before:
                _append(before[-1], {"content": turn["content"]})
                continue
            role = "system" if is_leading else "user"
        if merged and merged[-1]["role"] == role != "tool":
            _append(merged[-1], turn)
        else:
            merged.append({**turn, "role": role})
    return merged


def _append(turn: Turn, more: Turn) -> None:
    """Append the texts and the tool calls of another turn, after a blank line."""
    for name in ("content", "reasoning", "reasoning_content"):
        contents = [each[name] for each in (turn, more) if each.get(name)]
        if contents:
            turn[name] = _joined(contents)
    if more.get("tool_calls"):
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *more["tool_calls"]]


def _joined(contents: list[Any]) -> Any:
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    first, *others = map(_parts, contents)  # some have images
    return first + [part for parts in others for part in (*_parts("\n\n"), *parts)]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
