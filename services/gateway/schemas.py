"""Request bodies: what is accepted, and a 400 that names the field for the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from criticalkv.shared.cache.codec import Codec
from criticalkv.shared.config import GatewayConfig
from criticalkv.shared.errors import InvalidRequestError, UnsupportedFieldError
from criticalkv.shared.eviction.policy import Policy, parse_turn_policy, with_codec
from criticalkv.shared.identity import POLICY_DENSE, canonical_tier
from criticalkv.shared.model.chat import Message, Part

MAX_BREAKPOINTS = 4
MIN_INTERVAL = 16  # a stepwise policy runs one forward per interval: none for each token
MAX_TTL_S = 366 * 24 * 3600
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
MAX_METADATA = 16
MAX_LABEL_CHARS = 512
_UNSUPPORTED_PARTS = ("image_url", "input_audio", "file", "refusal", "audio", "video_url")

# OpenAI fields without an implementation here → the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": (),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
# The same for fields of a message; clients send back what `model_dump()` gave them.
NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

Model = TypeVar("Model", bound=BaseModel)


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def parse_ttl(value: str | int | None) -> int:
    """Return a time to live like "30m", "2h", "1d" or seconds as milliseconds; None → 0."""
    if value is None:
        return 0
    match = re.fullmatch(r"([0-9]{1,9})([smhd]?)", str(value))
    seconds = int(match[1]) * _UNITS[match[2] or "s"] if match else 0
    if not 1 <= seconds <= MAX_TTL_S:
        raise ValueError('ttl must be like "30m", "2h", "1d" or seconds, from 1s to 366d')
    return 1000 * seconds


def _ttl(value: str | int | None) -> str | int | None:
    parse_ttl(value)
    return value


def _tier(value: float | int | str | None) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and len(value) > 32:
        raise ValueError("tier has at most 32 characters")
    return canonical_tier(value)


def _turn_policy(value: str | None) -> str | None:
    return _canonical(value, parse_turn_policy)


def _canonical(
    value: str | None, parse: Callable[[str], Policy | None], codec: Codec | None = None
) -> str | None:
    if value is None:
        return None
    if len(value) > 512:
        raise ValueError("policy has at most 512 characters")
    try:
        policy = parse(value)
    except InvalidRequestError as error:
        raise ValueError(error.message) from None
    if policy is None:
        return POLICY_DENSE
    if 0 < policy.interval < MIN_INTERVAL:
        raise ValueError(f"interval is {policy.interval}, at least {MIN_INTERVAL} in a request")
    if codec is not None and policy.codec != codec and "codec" in policy.model_fields_set:
        raise ValueError(f"says codec={policy.codec}, but codec is {codec}; give one of them")
    return with_codec(policy.canonical(), codec)


class Breakpoint(Body):
    """OpenAI's mark: the prefix that ends with this part is kept."""

    mode: Literal["explicit"]
    ttl: str | int | None = None

    _check_ttl = field_validator("ttl")(_ttl)


class CacheControl(Body):
    """Anthropic's mark with the same meaning."""

    type: Literal["ephemeral"]
    ttl: str | int | None = None

    _check_ttl = field_validator("ttl")(_ttl)


class TextPart(Body):
    """A content part; text is all there is."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind in _UNSUPPORTED_PARTS:
            raise ValueError(f"unsupported content part {kind!r}: only 'text' is supported")
        return data

    @property
    def mark(self) -> Breakpoint | CacheControl | None:
        """The breakpoint on this part, in whichever spelling."""
        return self.prompt_cache_breakpoint or self.cache_control


class ChatMessage(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: list[TextPart] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if not is_neutral(NEUTRAL_MESSAGE, k, v)}

    @field_validator("content", mode="before")
    @classmethod
    def _text_as_part(cls, value: Any) -> Any:
        return [{"type": "text", "text": value}] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        # An answer may be empty, and comes back as such.
        if self.role != "assistant" and not any(part.text for part in self.content):
            raise ValueError("content must not be empty")
        return self

    def plain(self) -> Message:
        """Return the message as the chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        return Message(role, tuple(Part(p.text, p.mark is not None) for p in self.content))


class CacheOptions(Body):
    """OpenAI's `prompt_cache_options`."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: str | int | None = None

    _check_ttl = field_validator("ttl")(_ttl)


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Labels(Body):
    """What a client may tell without influence on the answer, by OpenAI's own words."""

    user: str | None = Field(default=None, max_length=MAX_LABEL_CHARS)
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = Field(default=None, max_length=MAX_LABEL_CHARS)
    prompt_cache_key: str | None = Field(default=None, max_length=MAX_LABEL_CHARS)

    @field_validator("metadata", mode="before")
    @classmethod
    def _few_and_short(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if len(value) > MAX_METADATA:
                raise ValueError(f"metadata has at most {MAX_METADATA} keys")
            for key, text in value.items():
                if len(key) > 64 or (isinstance(text, str) and len(text) > 512):
                    raise ValueError("metadata: keys of at most 64, values of 512 characters")
        return value


class _Policies(Body):
    """How contexts are compressed: at once, and in the end; `codec` is that of both."""

    codec: Codec | None = None  # before the policies, whose check reads it
    policy: str | None = None
    first_policy: str | None = None

    @field_validator("policy", "first_policy")
    @classmethod
    def _check_policy(cls, value: str | None, info: ValidationInfo) -> str | None:
        return _canonical(value, Policy.parse, info.data.get("codec"))

    @field_validator("first_policy", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value == "none" else value

    def wanted(self, default: str) -> str:
        """Return the wanted policy; `default` where none is named."""
        return self.policy or with_codec(default, self.codec)

    def first(self, default: str | None) -> str | None:
        """Return the wanted first policy; null says none.

        Who names a policy alone wants that one and nothing provisional.
        """
        if "first_policy" in self.model_fields_set:
            return self.first_policy
        if default is None or self.policy is not None:
            return None
        return with_codec(default, self.codec)


class Extension(_Policies):
    """Our own request fields, in `criticalkv`."""

    context_id: str | None = Field(default=None, min_length=1, max_length=128)
    read_tier: str | None = None
    min_read_tier: str | None = None
    store_tier: str | None = None
    turn_policy: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    top_k: int = Field(default=0, ge=0, le=1 << 20)

    _check_tier = field_validator("read_tier", "min_read_tier", "store_tier", mode="before")(_tier)
    _check_turn_policy = field_validator("turn_policy")(_turn_policy)

    def check(self) -> None:
        """Compare fields with one another.

        Raises:
            InvalidRequestError: naming the field.
        """
        least, wanted = self.min_read_tier, self.read_tier
        if least is not None and wanted is not None and Decimal(least) > Decimal(wanted):
            raise limit_error(
                "criticalkv.min_read_tier", f"at most read_tier ({wanted}), got {least}"
            )


class ChatRequest(Labels):
    """Body of `POST /v1/chat/completions`."""

    model: str = Field(max_length=256)
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stop: list[str] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    prompt_cache_options: CacheOptions = CacheOptions()
    criticalkv: Extension = Extension()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k in ("model", "messages")}

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if (
            None not in (both := (self.max_tokens, self.max_completion_tokens))
            and both[0] != both[1]
        ):
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        return self

    @model_validator(mode="after")
    def _continues_an_answer(self) -> Self:
        if self.add_generation_prompt == self.continue_final_message:
            both = "true" if self.continue_final_message else "false"
            raise ValueError(f"add_generation_prompt and continue_final_message are both {both}")
        if not self.continue_final_message:
            return self
        if self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs an assistant's message at the end")
        if any(part.mark is not None for part in self.messages[-1].content):
            raise ValueError("prompt_cache_breakpoint: none on the message that is continued")
        if not self.asked and self.criticalkv.context_id is None:
            raise ValueError("messages: nothing comes before the one that is continued")
        return self

    @property
    def asked(self) -> list[ChatMessage]:
        """The messages without the one that the answer continues, if there is one."""
        return self.messages[:-1] if self.continue_final_message else self.messages

    @property
    def prefix(self) -> str:
        """The text that the answer goes on after; as a rule none."""
        last = self.messages[-1].content if self.continue_final_message else []
        return "".join(part.text for part in last)

    @property
    def token_limit(self) -> int | None:
        """The wanted number of new tokens, or None."""
        return self.max_completion_tokens or self.max_tokens

    def check(self, limits: GatewayConfig) -> None:
        """Apply the configured limits.

        Raises:
            InvalidRequestError: naming the field and the limit.
        """
        if self.n > limits.max_choices:
            raise limit_error("n", f"at most {limits.max_choices} choices")
        for i, text in enumerate(self.stop):
            if not 1 <= len(text) <= limits.max_stop_chars:
                raise limit_error(f"stop[{i}]", f"1 to {limits.max_stop_chars} characters")
        check_marks(self.messages)
        self.criticalkv.check()


class ContextRequest(_Policies):
    """Body of `POST /v1/contexts`: a text (one open user message) or messages."""

    model: str | None = Field(default=None, max_length=256)
    text: str | None = Field(default=None, min_length=1)
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    store_tier: str | None = None
    ttl: str | int | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    _check_tier = field_validator("store_tier", mode="before")(_tier)
    _check_ttl = field_validator("ttl")(_ttl)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("text: give either text or messages")
        check_marks(self.messages or [])
        return self

    def plain(self) -> list[Message]:
        """Return the messages; the last content part ends a node."""
        messages = [m.plain() for m in self.messages or []]
        if self.text is not None:
            messages = [Message("user", (Part(self.text),))]
        *first, last = messages
        *parts, end = last.parts
        return [*first, Message(last.role, (*parts, Part(end.text, True)))]


def parse_chat(data: Any, limits: GatewayConfig) -> ChatRequest:
    """Check the body of a chat completion.

    Raises:
        InvalidRequestError, UnsupportedFieldError: naming the field.
    """
    fields = drop_neutral(body_map(data, "messages", limits), NEUTRAL)
    stop = fields.get("stop")
    if isinstance(stop, list) and len(stop) > limits.max_stop_strings:
        raise limit_error("stop", f"at most {limits.max_stop_strings} stop strings")
    request = validate(ChatRequest, fields)
    request.check(limits)
    return request


def parse_context(data: Any, limits: GatewayConfig) -> ContextRequest:
    """Check the body of a context's registration.

    Raises:
        InvalidRequestError: naming the field.
    """
    return validate(ContextRequest, body_map(data, "messages", limits))


def body_map(data: Any, field: str, limits: GatewayConfig) -> dict[str, Any]:
    """Return a body as a map, its messages counted: checking each costs time.

    Args:
        data: parsed JSON.
        field: that has the messages.
        limits: of messages, and of content parts in all of them.

    Raises:
        InvalidRequestError: naming the field and the limit.
    """
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    messages = data.get(field)
    if isinstance(messages, list):
        if len(messages) > limits.max_messages:
            raise limit_error(field, f"at most {limits.max_messages} messages")
        if sum(map(_parts, messages)) > limits.max_parts:
            raise limit_error(field, f"at most {limits.max_parts} content parts")
    return dict(data)


def drop_neutral(fields: dict[str, Any], neutral: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the fields without those that are not implemented and ask for nothing.

    Raises:
        UnsupportedFieldError: for one that asks for something.
    """
    for field in [k for k in fields if k in neutral]:
        if not is_neutral(neutral, field, fields.pop(field)):
            raise UnsupportedFieldError(f"{field} is not supported", param=field)
    return fields


def _parts(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, list) else 1


def validate(model: type[Model], fields: dict[str, Any]) -> Model:
    """Return the checked body.

    Raises:
        InvalidRequestError, UnsupportedFieldError: naming the field.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _field_error(first["loc"], first["type"], first["msg"]) from None


def _field_error(loc: tuple[int | str, ...], kind: str, message: str) -> InvalidRequestError:
    if not loc:  # a rule over several fields; its text names them
        text = message.removeprefix("Value error, ")
        return InvalidRequestError(text, param=text.split(" ", 1)[0].rstrip(":"))
    path = _path(loc)
    if kind == "extra_forbidden":
        known = str(loc[-1]) in NEUTRAL or str(loc[-1]) in NEUTRAL_MESSAGE
        error = UnsupportedFieldError if known else InvalidRequestError
        return error(f"{path}: {'is not supported' if known else 'unknown field'}", param=path)
    error = UnsupportedFieldError if "unsupported" in message else InvalidRequestError
    return error(f"{path}: {message.removeprefix('Value error, ')}", param=path)


def _path(loc: tuple[int | str, ...]) -> str:
    """Spell a location as in `messages[0].content`; union branches are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "int", "float", "bool") and "[" not in part:
            path += f".{part}" if path else part[:100]
    return path


def is_neutral(neutral: dict[str, tuple[Any, ...]], field: str, value: Any) -> bool:
    """Whether a field that is not implemented has a value that asks for nothing."""
    if field not in neutral:
        return False
    return value is None or any(
        value == v and type(value) in (type(v), float) for v in neutral[field]
    )


def check_marks(messages: list[ChatMessage]) -> None:
    """Refuse more breakpoints than OpenAI allows.

    Raises:
        InvalidRequestError: if there are more than four.
    """
    marks = sum(part.mark is not None for m in messages for part in m.content)
    if marks > MAX_BREAKPOINTS:
        raise InvalidRequestError(
            f"prompt_cache_breakpoint: at most {MAX_BREAKPOINTS} breakpoints, got {marks}",
            param="prompt_cache_breakpoint",
        )


def limit_error(field: str, text: str) -> InvalidRequestError:
    """Return the error that names a field and what it is limited to."""
    return InvalidRequestError(f"{field}: {text}", param=field)
