"""Request schemas of OpenAI's API with vLLM's extensions; the other APIs reuse some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nanovllm.engine.conversations import text_of
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve import fields as policies
from nanovllm.serve.fields import FieldPolicy
from nanovllm.serve.http_errors import invalid
from nanovllm.validation import require

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128

R = TypeVar("R", bound="ApiModel")
T = TypeVar("T")
# Report only the first invalid item: describing a million of them would take seconds.
Listed = Annotated[list[T], Field(fail_fast=True)]
# Stop strings and bad words are bounded: every output token is checked against all stop strings,
# and all bad words are tokenized.
StopString = Annotated[str, Field(max_length=256)]
StopStrings = Annotated[Listed[StopString], Field(max_length=64)]
BadWord = Annotated[str, Field(max_length=64)]
BadWords = Annotated[Listed[BadWord], Field(max_length=1024)]
TokenIds = Annotated[Listed[int], Field(max_length=1024)]


class ApiModel(BaseModel):
    """Base of all request schemas: no type coercion, null means absent; `policy` has the rest."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
    policy: ClassVar[FieldPolicy] = FieldPolicy()

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        fields = {name: value for name, value in fields.items() if value is not None}
        declared = [field.alias or name for name, field in cls.model_fields.items()]
        undeclared = fields.keys() - declared
        if undeclared:
            cls.policy.check([name for name in fields if name in undeclared], declared)
        return {name: value for name, value in fields.items() if name not in undeclared}


class JsonSchema(ApiModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        has_schema = self.json_schema is not None and self.json_schema.schema_ is not None
        is_valid = has_schema if self.type == "json_schema" else self.json_schema is None
        require(
            is_valid,
            "json_schema",
            "given with a schema if and only if type is json_schema",
            self.type,
        )
        return self

    def structured(self) -> dict[str, Any] | None:
        if self.type == "json_object":
            return {"json_object": True}
        return {"json": self.json_schema.schema_} if self.json_schema is not None else None


class StreamOptions(ApiModel):
    policy = policies.STREAM_OPTIONS
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(ApiModel):
    """Sampling parameters, and options for how the response is sent."""

    policy = policies.COMMON
    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    allowed_token_ids: Listed[int] | None = None
    bad_words: BadWords | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    priority: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    structured_outputs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> SamplingFields:
        is_valid = self.stream or self.stream_options is None
        require(is_valid, "stream_options", "omitted unless stream=true", self.stream_options)
        is_valid = self.response_format is None or self.structured_outputs is None
        expected = "omitted when response_format is given"
        require(is_valid, "structured_outputs", expected, self.structured_outputs)
        return self

    def sampling_params(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """Return the sampling parameters.

        `defaults` apply to fields that the request omits; `overrides` override the request.
        """
        own = self.model_dump(include=_SAMPLING_NAMES, exclude_none=True)
        return SamplingParams(**{**defaults, **own, **overrides})

    def truncate(self, token_ids: list[int]) -> list[int]:
        """Return the last `truncate_prompt_tokens` ids of a prompt; SamplingParams checks it."""
        count = self.truncate_prompt_tokens or 0
        return token_ids[-count:] if count > 0 else token_ids

    @property
    def grammar_param(self) -> str:
        """Name of the request field that `constraint` comes from."""
        return "structured_outputs" if self.response_format is None else "response_format"

    def constraint(self) -> dict[str, Any] | None:
        """Return the structured-output constraint; None if the output is unconstrained."""
        if self.response_format is not None:
            return self.response_format.structured()
        return self.structured_outputs


_SAMPLING_NAMES = {*SamplingFields.model_fields}.intersection(SamplingParams.__dataclass_fields__)
_SAMPLING_NAMES -= {"structured_outputs"}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Pydantic tries the types in this order. A prompt may have thousands of token ids, so a list of
# them comes before a list of strings.
Texts = str | Listed[int] | Listed[str] | Listed[Listed[int]]


class CalledFunction(ApiModel):
    policy = policies.CALLED_FUNCTION
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(ApiModel):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(ApiModel):
    policy = policies.CHAT_MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None  # a string or a list of parts
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class NamedTool(ApiModel):
    type: Literal["function"]
    function: dict[Literal["name"], str] = Field(min_length=1)


class AllowedFunctions(ApiModel):
    mode: Literal["auto", "required"]
    tools: Listed[NamedTool] = Field(min_length=1)


class AllowedTools(ApiModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ReasoningOptions(ApiModel):
    policy = policies.REASONING
    effort: Effort | None = None
    enabled: bool | None = None


class Thinking(ApiModel):
    policy = policies.MESSAGES_OPTIONS
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # not enforced


class ChatFields(ApiModel):
    """Inputs of the chat template."""

    messages: Listed[Message] = Field(min_length=1)
    tools: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None

    def path(self, index: int) -> str:
        """Return the path of a message's content in the request."""
        return f"messages[{index}].content"

    def template_variables(self) -> dict[str, Any]:
        """Return the extra variables of the chat template; `chat_template_kwargs` come first."""
        effort = self.reasoning_effort or (self.reasoning and self.reasoning.effort)
        switches = (
            self.enable_thinking,
            self.reasoning and self.reasoning.enabled,
            self.thinking and self.thinking.type != "disabled",
            effort and effort != "none",
        )
        variables: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
        enable = next((bool(each) for each in switches if each is not None), None)
        variables |= {} if enable is None else {"enable_thinking": enable}
        return variables | (self.chat_template_kwargs or {})


class ChatRequest(ChatFields, SamplingFields):
    policy = policies.CHAT
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        is_valid = self.logprobs or not self.top_logprobs
        require(is_valid, "top_logprobs", "omitted unless logprobs=true", self.top_logprobs)
        return self

    @property
    def all_tools(self) -> list[dict[str, Any]]:
        return self.tools or []

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice not in (None, "auto", "none")

    @property
    def continued(self) -> str:
        """The text of the final message if the completion continues it, else an empty string."""
        return text_of(self.messages[-1].content or "") if self.continue_final_message else ""

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class AgentRequest(ChatRequest):
    """A request of another API as a chat request."""

    # Tools whose schemas are in the messages instead of the list of tools.
    deferred_tools: Listed[dict[str, Any]] = Field(default_factory=list)
    content_paths: Listed[str]  # where the client sent the content of each message

    def path(self, index: int) -> str:
        return self.content_paths[index]

    @property
    def all_tools(self) -> list[dict[str, Any]]:
        return [*(self.tools or ()), *self.deferred_tools]


class TokenizeRequest(ChatFields):
    """A request to tokenize either `prompt` or `messages`."""

    model: str | None = None
    messages: Listed[Message] = Field(default_factory=list)
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        is_valid = (self.prompt is None) == bool(self.messages)
        require(is_valid, "prompt", "given if and only if messages is not", self.prompt)
        return self


class DetokenizeRequest(ApiModel):
    tokens: Listed[int]
    model: str | None = None


def as_api_model(kind: type[R], fields: Mapping[str, Any]) -> R:
    """Build a request of type `kind` outside FastAPI; raise RequestError for invalid fields."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error.errors()) from error


def nested(fields: Any, name: str) -> Any:
    """Nest all fields except `type` in an object under the key `name`, as in the chat API."""
    if not isinstance(fields, dict):
        return fields
    inner = {key: value for key, value in fields.items() if key != "type" and value is not None}
    return {"type": fields.get("type"), **({name: inner} if inner else {})}
