"""The body of `POST /v1/responses`: what is accepted, and a 400 that names the rest."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from criticalkv.services.gateway.schemas import (
    Body,
    Breakpoint,
    CacheControl,
    CacheOptions,
    ChatMessage,
    ChatRequest,
    Extension,
    Labels,
    TextPart,
    body_map,
    check_marks,
    drop_neutral,
    is_neutral,
    validate,
)
from criticalkv.shared.config import GatewayConfig
from criticalkv.shared.errors import InvalidRequestError

# OpenAI fields without an implementation here → the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": ({},),
    "context_management": ([],),
    "conversation": (),
    "image": ({},),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prompt": (),
    "prompt_cache_retention": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# The same for input items and their parts; clients send back what an answer's output was.
NEUTRAL_ITEM: dict[str, tuple[Any, ...]] = {
    "phase": (),
    "status": ("in_progress", "completed", "incomplete"),
}
NEUTRAL_PART: dict[str, tuple[Any, ...]] = {"annotations": ([],), "logprobs": ([],)}
_TEXT_PARTS = ("input_text", "output_text")


class InputPart(Body):
    """A content part; text is all there is."""

    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            raise ValueError(f"unsupported content part {kind[:40]!r}: only text is supported")
        return _without(NEUTRAL_PART, data)

    def plain(self) -> TextPart:
        """Return the part as chat completions spell it."""
        return TextPart(
            type="text",
            text=self.text,
            prompt_cache_breakpoint=self.prompt_cache_breakpoint,
            cache_control=self.cache_control,
        )


class InputItem(Body):
    """One message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: list[InputPart] = Field(min_length=1)
    id: str | None = Field(default=None, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def _only_messages(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "message":
            raise ValueError(f"unsupported item {kind[:40]!r}: only messages are supported")
        return _without(NEUTRAL_ITEM, data)

    @field_validator("content", mode="before")
    @classmethod
    def _text_as_part(cls, value: Any) -> Any:
        return [{"type": "input_text", "text": value}] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.role != "assistant" and not any(part.text for part in self.content):
            raise ValueError("content must not be empty")
        return self

    def plain(self) -> ChatMessage:
        """Return the message as chat completions spell it."""
        return ChatMessage(role=self.role, content=[part.plain() for part in self.content])


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_obfuscation: Literal[False] | None = None


class ResponseRequest(Labels):
    """Body of `POST /v1/responses`."""

    model: str = Field(max_length=256)
    input: list[InputItem] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, min_length=1, max_length=128)
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    prompt_cache_options: CacheOptions = CacheOptions()
    criticalkv: Extension = Extension()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k in ("model", "input")}

    @field_validator("input", mode="before")
    @classmethod
    def _text_as_message(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("input must not be empty")
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @property
    def base_id(self) -> str | None:
        """The handle that the conversation goes on from."""
        return self.previous_response_id or self.criticalkv.context_id

    @property
    def messages(self) -> list[ChatMessage]:
        """The input as chat completions spell it."""
        return [item.plain() for item in self.input]

    def check(self) -> None:
        """Compare fields with one another.

        Raises:
            InvalidRequestError: naming the field.
        """
        check_marks(self.messages)
        self.criticalkv.check()
        if None not in (self.previous_response_id, self.criticalkv.context_id):
            raise InvalidRequestError(
                "previous_response_id and criticalkv.context_id: give one of them",
                param="previous_response_id",
            )

    def chat(self, messages: list[ChatMessage]) -> ChatRequest:
        """Return the turn to run."""
        return ChatRequest(
            model=self.model,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            prompt_cache_options=self.prompt_cache_options,
            criticalkv=self.criticalkv,
        )


def parse_response(data: Any, limits: GatewayConfig) -> ResponseRequest:
    """Check the body of a response.

    Raises:
        InvalidRequestError, UnsupportedFieldError: naming the field.
    """
    fields = body_map(data, "input", limits)
    asked = {k: _without_nulls(v) if k in NEUTRAL else v for k, v in fields.items()}
    request = validate(ResponseRequest, drop_neutral(asked, NEUTRAL))
    request.check()
    return request


def _without(neutral: dict[str, tuple[Any, ...]], data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {k: v for k, v in data.items() if not is_neutral(neutral, k, v)}


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: _without_nulls(v) for k, v in value.items() if v is not None}
