"""Conversations as prompts, written by a model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from nanovllm.engine.front import Front
from nanovllm.errors import RequestError
from nanovllm.prompts import Messages, as_conversations, at_index
from nanovllm.validation import require_text


class ChatOptions(TypedDict, total=False):
    """How a conversation is formatted; None is the template's own choice."""

    tools: Sequence[Any] | None  # schemas, or functions with docstrings
    add_generation_prompt: bool | None  # False: no new message begins
    continue_final_message: bool | None  # the model goes on from where the last message ends
    chat_template_kwargs: dict[str, Any] | None  # more options of the template


def template_options(options: ChatOptions) -> dict[str, Any]:
    """Options of a chat template; what a call gives by name overrides its chat_template_kwargs."""
    for name in options:
        if name not in ChatOptions.__annotations__:
            raise TypeError(f"chat got an unexpected keyword argument {name!r}")
    given: dict[str, Any] = {name: each for name, each in options.items() if each is not None}
    return {**given.pop("chat_template_kwargs", {}), **given}


def prompts_of(front: Front, messages: Messages, **options: Any) -> list[list[int]]:
    """Return one prompt of token ids per conversation."""
    from nanovllm.chat_template import ChatTemplate, choose_template  # jinja2, only for chats

    tokenizer = front.tokenizer
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
    prompts, conversations = [], as_conversations(messages)
    for index, conversation in enumerate(conversations):
        try:
            text = template.render(conversation, **variables)
            require_text("messages", text)
        except RequestError as error:
            raise at_index(error, "messages", index, len(conversations)) from error
        prompts.append(front.encode(text, add_special_tokens=False))
    return prompts
