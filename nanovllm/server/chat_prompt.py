"""From a conversation to a prompt: messages in the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanovllm.chat_template import ChatTemplate
from nanovllm.errors import RequestError
from nanovllm.prompts import as_conversations
from nanovllm.server.errors import ApiError
from nanovllm.server.openai_records import ChatFields, Message
from nanovllm.server.service import Service

# What a request says elsewhere, or not at all.
RESERVED = (
    *("self", "template", "special_tokens", "compile_source", "messages", "tools"),
    *("chat_template", "add_generation_prompt", "continue_final_message"),
)

UNWRITTEN = {"annotations", "cache_control", "parsed", "provider_specific_fields"}  # of a message


def render_chat(service: Service, chat: ChatFields, tools: Sequence[Any] | None) -> str:
    """Write a conversation as the model's template does. Takes a while: not for the event loop."""
    if not service.chat_template:
        raise RequestError("this model has no chat template; use completions, or --chat-template")
    options: dict[str, Any] = {
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
    }
    options = {name: value for name, value in options.items() if value is not None}
    template = ChatTemplate(
        service.chat_template,
        service.tokenizer.special_tokens_map,
        service.compile_template,
        tools=tools or None,
        **options,
        **_variables(chat),
    )
    has_developer = "developer" in service.template_text
    messages = [_as_template_message(message, has_developer) for message in chat.messages]
    (conversation,) = as_conversations([messages])
    return template.render(conversation)


def _variables(chat: ChatFields) -> dict[str, Any]:
    """What else the template may ask for."""
    variables = dict(chat.chat_template_kwargs or {})
    for name in variables:
        if name in RESERVED:
            raise ApiError(
                f"chat_template_kwargs must not hold {name}", param="chat_template_kwargs"
            )
    if chat.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", chat.reasoning_effort)
        variables.setdefault("enable_thinking", chat.reasoning_effort != "none")
    return variables


def _as_template_message(message: Message, has_developer: bool) -> dict[str, Any]:
    written = message.model_dump(exclude_none=True, exclude=UNWRITTEN)
    if message.role == "developer" and not has_developer:
        written["role"] = "system"
    if message.role == "assistant":
        written.setdefault("content", "")
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        written["reasoning"] = written["reasoning_content"] = reasoning
    for call in written.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
    return written
