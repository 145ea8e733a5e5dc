"""What requests may hold: the fields that several APIs share, and what is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import invalid
from nanovllm.validation import suggestion

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
# Each token of an answer is compared with all stop strings, and bad words are tokenized.
MAX_ITEMS = {"stop": 64, "bad_words": 1024, "stop_token_ids": 1024, "logit_bias": 1024}
MAX_CHARACTERS = {"stop": 1024, "bad_words": 16384}  # of all items together

R = TypeVar("R", bound="ApiRecord")
T = TypeVar("T")
# One error is enough: a list of a million wrong items would take seconds to describe.
Listed = Annotated[list[T], Field(fail_fast=True)]


class ApiRecord(BaseModel):
    """Types are taken as they are sent, and a field that is not listed is an error."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
    NOT_BUILT: ClassVar[tuple[str, ...]] = ()  # known, but refused unless null

    @model_validator(mode="before")
    @classmethod
    def _refuse_not_built(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name in cls.NOT_BUILT:
            if fields.get(name) is not None:
                raise ValueError(f"{name} is not supported by this server")
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for name in fields:
            if name not in known and name not in cls.NOT_BUILT:
                shown = str(name).encode(errors="replace").decode()  # no unpaired surrogates
                context = {"name": shown, "hint": suggestion(shown, known)}
                raise PydanticCustomError("unknown_field", "is not supported", context)
        return {name: value for name, value in fields.items() if name not in cls.NOT_BUILT}


class Harmless(ApiRecord):
    """Fields without a meaning for this server, accepted since no answer depends on them."""

    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    include: Any = None
    cache_control: Any = None
    user: Any = None


class JsonSchema(ApiRecord):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiRecord):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (
            not self.json_schema or self.json_schema.schema_ is None
        ):
            raise ValueError("json_schema must have a schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError(f"json_schema is for the type json_schema alone, not {self.type}")
        return self

    def structured(self) -> dict[str, Any] | None:
        if self.type == "json_object":
            return {"json_object": True}
        return {"json": self.json_schema.schema_} if self.json_schema is not None else None


class StreamOptions(ApiRecord):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # of the lengths of pieces: there is none


class SamplingFields(Harmless):
    """The fields of SamplingParams, and how its answer is sent."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Listed[int] | None = None
    bad_words: Listed[str] | None = None
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
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream=true alone")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("give one of response_format and structured_outputs, not both")
        for name, most in MAX_ITEMS.items():
            _check_size(name, getattr(self, name), most)
        return self

    def sampling_params(self, defaults: Mapping[str, Any], **given: Any) -> SamplingParams:
        """What is not in the request comes from the model's own defaults."""
        own = {name: getattr(self, name) for name in _SAMPLING_NAMES}
        own = {name: value for name, value in own.items() if value is not None}
        return SamplingParams(**{**defaults, **own, **given})

    @property
    def grammar_param(self) -> str:
        """The field that `constraint` comes from."""
        return "structured_outputs" if self.response_format is None else "response_format"

    def constraint(self) -> dict[str, Any] | None:
        """What the answer must be; None when it may be anything."""
        if self.response_format is not None:
            return self.response_format.structured()
        return self.structured_outputs


_SAMPLING_NAMES = tuple(
    name
    for name in SamplingFields.model_fields
    if name in SamplingParams.__dataclass_fields__ and name != "structured_outputs"
)


def _check_size(name: str, items: str | Collection[Any] | None, most: int) -> None:
    items = (items,) if isinstance(items, str) else items or ()
    if len(items) > most:
        raise ValueError(f"{name} must have at most {most} items, got {len(items)}")
    if name in MAX_CHARACTERS and sum(map(len, items)) > MAX_CHARACTERS[name]:
        raise ValueError(f"{name} must have at most {MAX_CHARACTERS[name]} characters in all")


def as_record(kind: type[R], fields: dict[str, Any]) -> R:
    """A request of one API as one of another; what is left out is null."""
    try:
        return kind(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise invalid(
            [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        ) from error
