"""Validate conversations and turn them into prompts with the model's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from nanovllm.engine.engine_options import TEXT_ONLY
from nanovllm.engine.images import ImageParts
from nanovllm.errors import RequestError, at_index
from nanovllm.validation import require, require_text

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor

Message = dict[str, Any]
Messages = Sequence[Message] | Sequence[Sequence[Message]]

# Content parts whose type has one of these words are not text.
_MEDIA = re.compile("image|audio|video|file|document")
_CALL_KEYS = ("tool_calls", "function_call")  # a message with one of these may lack content


class ChatOptions(TypedDict, total=False):
    """Options that control how a conversation is formatted; None uses the template's default."""

    tools: Sequence[Any] | None  # schemas, or functions with docstrings
    add_generation_prompt: bool | None  # False: do not start an assistant message
    continue_final_message: bool | None  # True: the model continues the last message
    chat_template_kwargs: dict[str, Any] | None  # additional variables for the template


def template_options(options: ChatOptions) -> dict[str, Any]:
    """Merge the options of a call; keyword arguments override `chat_template_kwargs`."""
    for name in options:
        if name not in ChatOptions.__annotations__:
            raise TypeError(f"chat got an unexpected keyword argument {name!r}")
    given: dict[str, Any] = {name: each for name, each in options.items() if each is not None}
    return {**given.pop("chat_template_kwargs", {}), **given}


def prompts_of(
    input_processor: InputProcessor, messages: Messages, **options: Any
) -> list[list[int] | dict[str, Any]]:
    """Return one prompt per conversation: token ids or, with images, a dict."""
    from nanovllm.engine.chat_template import (  # imports jinja2, which only chats need
        ChatTemplate,
        choose_template,
    )

    tokenizer = input_processor.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise RequestError("chat needs a tokenizer with a chat template; use generate instead")
    has_tools = bool(options.get("tools"))
    source = choose_template(tokenizer.chat_template, options.pop("chat_template", None), has_tools)
    if has_tools and "tools" not in source:
        raise RequestError(
            "this model's chat template does not show tools to the model; pass another "
            "chat_template, or leave out tools"
        )
    template, variables = ChatTemplate(source), {**tokenizer.special_tokens_map, **options}
    prompts = list[list[int] | dict[str, Any]]()
    conversations = _split(messages)
    for index, (name, given) in enumerate(conversations):
        images = ImageParts(input_processor.image_reader.refusal)
        conversation = _as_conversation(given, name, images)
        if images.sources:
            conversation = without_placeholders(input_processor, conversation)
        try:
            text = template.render(conversation, **variables)
            require_text("messages", text)
        except RequestError as error:
            raise at_index(error, "messages", index, len(conversations)) from error
        ids = input_processor.encode(text, add_special_tokens=False)
        if images.sources:
            data = {"image": images.sources}
            prompts.append({"prompt_token_ids": ids, "multi_modal_data": data})
        else:
            prompts.append(ids)
    return prompts


def without_placeholders(
    input_processor: InputProcessor, conversation: list[Message]
) -> list[Message]:
    """Break the image placeholder's text in texts, which would move an image to another place."""
    placeholder_id = input_processor.image_reader.placeholder_id
    assert placeholder_id is not None
    text: Any = input_processor.get_tokenizer().convert_ids_to_tokens(placeholder_id)

    def broken(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(text, f"{text[:1]} {text[1:]}")
        if isinstance(value, Mapping):
            return {name: broken(each) for name, each in value.items()}
        return [broken(each) for each in value] if isinstance(value, (list, tuple)) else value

    try:
        return list(map(broken, conversation))
    except RecursionError as error:
        raise RequestError("the messages are nested too deeply", param="messages") from error


def as_conversations(messages: Messages, images: ImageParts | None = None) -> list[list[Message]]:
    """Return a list of conversations, given one or several; see `as_message` for contents."""
    return [_as_conversation(each, name, images) for name, each in _split(messages)]


def _split(messages: Messages) -> list[tuple[str, Any]]:
    """Return the name of each conversation, for errors, and the conversation."""
    is_valid = isinstance(messages, (list, tuple)) and messages
    require(is_valid, "messages", "a list of at least one message", messages)
    if isinstance(messages[0], Mapping):
        return [("messages", messages)]
    return [(f"messages[{index}]", each) for index, each in enumerate(messages)]


def _as_conversation(
    conversation: Any, name: str, images: ImageParts | None = None
) -> list[Message]:
    is_valid = isinstance(conversation, (list, tuple)) and conversation
    require(is_valid, name, "a list of at least one message", conversation)
    return [
        as_message(message, f"{name}[{i}].content", images)
        for i, message in enumerate(conversation)
    ]


def as_message(message: Any, path: str, images: ImageParts | None = None) -> Message:
    """Return a message whose content is a string; `path` is that of the content, for errors.

    With `images`, a content with images is a list of parts, and its images are added to `images`.
    """
    name = path.removesuffix(".content")
    is_valid = isinstance(message, Mapping) and isinstance(message.get("role"), str)
    require(is_valid, name, "a dict with a role and content", message)
    content = message.get("content")
    if content is None and any(message.get(key) for key in _CALL_KEYS):
        content = ""
    parts = None if images is None else images.split(content, path)
    written = {**message, "content": text_of(content, path) if parts is None else parts}
    if isinstance(message.get("tool_calls"), (list, tuple)):
        calls = f"{name}.tool_calls"
        written["tool_calls"] = [_as_call(call, calls) for call in message["tool_calls"]]
    return written


def _as_call(call: Any, name: str) -> Any:
    """Parse the arguments of a tool call: OpenAI sends a JSON string, templates expect a dict."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    expected = "calls whose arguments are a JSON object"
    require(isinstance(arguments, dict), name, expected, function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def text_of(content: Any, name: str = "content", types: Sequence[str] = ("text",)) -> str:
    """Return a message's content as text; text parts are joined with newlines, as in vLLM."""
    if isinstance(content, str):
        return content
    expected = 'a string or a list of text parts, {"type": "text", "text": "..."}'
    require(isinstance(content, (list, tuple)), name, expected, content)
    texts = [_part_text(part, types) for part in content]
    for part, text in zip(content, texts, strict=True):
        refuse_media(part, name)
        require(isinstance(text, str), name, expected, part)
    return "\n".join(texts)


def refuse_media(part: Any, name: str) -> None:
    """Raise RequestError for a content part with an image, audio, video or a file."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and _MEDIA.search(kind):
        message = f"{name} has a part of type {kind!r:.80}, but {TEXT_ONLY}"
        raise RequestError(message, param=name)


def _part_text(part: Any, types: Sequence[str]) -> Any:
    if isinstance(part, Mapping) and part.get("type", "text") in types:
        return part.get("text")
    return part
