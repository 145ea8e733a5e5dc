"""The requests of OpenAI's API, and of vLLM's additions to it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from nanovllm.prompts import text_of
from nanovllm.server.records import MAX_TOP_LOGPROBS, ApiRecord, Harmless, Listed, SamplingFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
# Each is tried in turn: ids, of which there may be thousands, before texts.
Texts = str | Listed[int] | Listed[str] | Listed[Listed[int]]


class CalledFunction(ApiRecord):
    name: str
    arguments: str | dict[str, Any] = "{}"
    parsed_arguments: Any = None  # added by a client


class ToolCall(ApiRecord):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(ApiRecord):
    """What a client was answered may come back as it is, fields that are null included."""

    NOT_BUILT: ClassVar[tuple[str, ...]] = ("audio", "function_call", "refusal")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None  # a text, or a list of text parts
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: Any = None
    cache_control: Any = None
    parsed: Any = None  # added by a client, and so is the next
    provider_specific_fields: Any = None


class NamedFunction(ApiRecord):
    name: str


class NamedTool(ApiRecord):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(ApiRecord):
    mode: Literal["auto", "required"]
    tools: Listed[NamedTool] = Field(min_length=1)


class AllowedTools(ApiRecord):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ChatFields(ApiRecord):
    """What the chat template is given."""

    messages: Listed[Message] = Field(min_length=1)
    tools: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None


class ChatRequest(ChatFields, SamplingFields):
    NOT_BUILT: ClassVar[tuple[str, ...]] = (
        *("audio", "functions", "function_call", "modalities", "prediction", "web_search_options"),
        *("best_of", "chat_template", "documents", "verbosity"),
    )

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice not in (None, "auto", "none")

    @property
    def continued(self) -> str:
        """What is written already of the message that the answer goes on from."""
        return text_of(self.messages[-1].content or "") if self.continue_final_message else ""

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SamplingFields):
    NOT_BUILT: ClassVar[tuple[str, ...]] = ("suffix", "prompt_embeds")

    prompt: Texts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != 1:
            raise ValueError("best_of is not supported by this server, unless it is 1")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo")
        return self


class EmbeddingRequest(Harmless):
    NOT_BUILT: ClassVar[tuple[str, ...]] = ("dimensions",)

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None


class TokenizeRequest(ChatFields):
    """A text, or a conversation."""

    model: str | None = None
    messages: Listed[Message] = Field(default_factory=list)
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give one of prompt and messages")
        return self


class DetokenizeRequest(ApiRecord):
    tokens: Listed[int]
    model: str | None = None
