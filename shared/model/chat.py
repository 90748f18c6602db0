"""From chat messages to token ids, cut where a node may end.

The template is rendered with random placeholders in place of the text, and the result
is split at them: user text can inject neither template syntax nor special tokens, and
no token spans the border of a content part. This module knows no store and no HTTP.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from criticalkv.shared.errors import ConfigError, InvalidRequestError

REMEMBERED_WORDS = 1000
"""What a tokenizer keeps the tokens of; a long word takes several KiB."""
JOINER = "\n\n"
"""Between an open user message and the user message that continues it."""

# Any placeholder: a pattern of its own per request would push out what `re` remembers.
_MARK = re.compile("(x[0-9a-f]{32}x[0-9]+x[0-9]+x)")
_PROBES = (
    ("user", "assistant", "user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
)


@dataclass(frozen=True)
class Part:
    """A piece of a message's text; a marked one ends a reusable prefix."""

    text: str
    breakpoint: bool = False


@dataclass(frozen=True)
class Message:
    """One message: `system`, `user` or `assistant`, and its text in parts."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Piece:
    """Token ids of one stretch of template, or of one content part.

    `message` and `part` are None for template. `part` is None for a joiner too.
    """

    ids: tuple[int, ...]
    kind: Literal["template", "content"]
    message: int | None = None
    part: int | None = None
    breakpoint: bool = False


@dataclass(frozen=True)
class _Slot:
    """Where a content part stands in the rendered template."""

    message: int
    part: int


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of the tokenizer and its chat template, hex.

    Padding and truncation are switches of a call, not of the vocabulary: left out.
    """
    fields = json.loads(_backend(tokenizer).to_str())
    for volatile in ("padding", "truncation"):
        fields.pop(volatile, None)
    both = {"tokenizer": fields, "chat_template": tokenizer.chat_template}
    return hashlib.sha256(json.dumps(both, sort_keys=True).encode()).hexdigest()


class ChatTemplate:
    """A model's chat template and tokenizer. Thread-safe.

    Attributes:
        closing_ids: template tokens that follow an assistant's text.
        generation_ids: template tokens between a user's text and the answer.
        incremental: whether more messages only append tokens, so that a stored turn
            may stand for its resent text.
        longest_token: characters of the longest token: a bound on what text can be.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template")
        self._tokenizer = tokenizer
        # Own copies: the switch is a property of the tokenizer, not of a call, and
        # requests run in threads.
        self._special = _part_tokenizer(_backend(tokenizer))
        self._plain = _part_tokenizer(_backend(tokenizer))
        self._plain.encode_special_tokens = True
        self.longest_token = max(map(len, self._plain.get_vocab()), default=1)
        self.closing_ids = self._probe_closing()
        self.generation_ids = self._probe_generation()
        self.incremental = self._probe_incremental()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[Piece]:
        """Return the conversation's tokens in pieces, in the template's order.

        Raises:
            InvalidRequestError: if the template refuses or drops a message.
        """
        layout = self._layout(messages, add_generation_prompt)
        placed = {item for item in layout if isinstance(item, _Slot)}
        for m, message in enumerate(messages):
            if any(_Slot(m, p) not in placed for p in range(len(message.parts))):
                raise InvalidRequestError(
                    f"the model's chat template drops messages[{m}] (role {message.role})",
                    param=f"messages[{m}]",
                )
        return self._fill(layout, messages)

    def continue_(
        self, roles: Sequence[str], is_open: bool, messages: Sequence[Message]
    ) -> list[Piece]:
        """Return the pieces to append after a conversation of the given roles.

        Args:
            roles: of the messages so far; their text is not needed.
            is_open: whether the conversation ends right after the last text, instead
                of after the closing tokens. New user text after an open user message
                belongs to that message, after a joiner.
            messages: the new ones, or none; a generation prompt follows.

        Raises:
            InvalidRequestError: if the template refuses the new messages, or moves
                them before the old ones.
        """
        old = [Message(role, (Part(""),)) for role in roles]
        merge = is_open and bool(roles and messages) and roles[-1] == messages[0].role == "user"
        if merge:
            joined = (*old[-1].parts, Part(JOINER), *messages[0].parts)
            full = [*old[:-1], Message("user", joined), *messages[1:]]
        else:
            full = [*old, *messages]
        layout = self._layout(full, add_generation_prompt=True)
        start = _after(layout, len(old) - 1)
        tail = layout[start:]
        in_order = not old or layout[start - 1 : start] == [_Slot(len(old) - 1, 0)]
        if not in_order or not _complete(tail, full, len(old), merge):
            raise InvalidRequestError(
                "the model's chat template cannot append to a stored context; "
                "send the whole history instead",
                param="criticalkv.context_id",
            )
        pieces = self._fill(tail, full)
        if not is_open and roles:
            pieces = self._strip_closing(pieces)
        first = len(old) - 1 if merge else len(old)
        return [_renumber(piece, first, merge) for piece in pieces]

    def encode_content(self, text: str) -> list[int]:
        """Return the ids of plain text; special tokens' names in it stay text."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def content_offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the characters [start, end) of each id of `encode_content`."""
        return list(self._plain.encode(text, add_special_tokens=False).offsets)

    def encode_template(self, text: str) -> list[int]:
        """Return the ids of template text, special tokens parsed."""
        return list(self._special.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens."""
        return str(self._special.decode(list(ids), skip_special_tokens=True))

    def _layout(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> list[str | _Slot]:
        """Render with placeholders; return template text and slots in order."""
        nonce = secrets.token_hex(16)
        slots = {
            f"x{nonce}x{m}x{p}x": _Slot(m, p)
            for m, message in enumerate(messages)
            for p in range(len(message.parts))
        }
        marks = iter(slots)
        chat = [
            {"role": message.role, "content": "".join(next(marks) for _ in message.parts)}
            for message in messages
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {str(error)[:200]}",
                param="messages",
            ) from error
        split = _MARK.split(cast(str, text))
        return [slots.get(item, item) for item in split if item]

    def _fill(self, layout: Sequence[str | _Slot], messages: Sequence[Message]) -> list[Piece]:
        pieces = []
        for item in layout:
            if isinstance(item, str):
                pieces.append(Piece(tuple(self.encode_template(item)), "template"))
                continue
            part = messages[item.message].parts[item.part]
            ids = tuple(self.encode_content(part.text))
            pieces.append(Piece(ids, "content", item.message, item.part, part.breakpoint))
        return pieces

    def _strip_closing(self, pieces: list[Piece]) -> list[Piece]:
        head = pieces[0].ids if pieces and pieces[0].kind == "template" else ()
        count = len(self.closing_ids)
        if head[:count] != self.closing_ids:
            raise InvalidRequestError(
                "the model's chat template closes this turn differently; "
                "send the whole history instead",
                param="criticalkv.context_id",
            )
        return [replace(pieces[0], ids=head[count:]), *pieces[1:]]

    def _probe_closing(self) -> tuple[int, ...]:
        """Template tokens after an answer, whether or not more messages follow."""
        after = [self._tail_ids(_probe_messages(_PROBES[0][:count]), 1) for count in (2, 3)]
        common = 0
        for one, other in zip(*after, strict=False):
            if one != other:
                break
            common += 1
        return after[0][:common]

    def _probe_generation(self) -> tuple[int, ...]:
        """Template tokens from the last user text to the answer's first token."""
        layout = self._layout(_probe_messages(("user",)), True)
        return self._template_ids(layout[_after(layout, 0) :])

    def _tail_ids(self, messages: Sequence[Message], index: int) -> tuple[int, ...]:
        layout = self._layout(messages, False)
        start = _after(layout, index)
        return self._template_ids(layout[start : start + 1])

    def _template_ids(self, layout: Sequence[str | _Slot]) -> tuple[int, ...]:
        text = layout[0] if layout else ""
        return tuple(self.encode_template(text)) if isinstance(text, str) else ()

    def _probe_incremental(self) -> bool:
        results = [
            self._appends(roles[:count], roles[count])
            for roles in _PROBES
            for count in range(1, len(roles))
        ]
        return True in results and False not in results

    def _appends(self, roles: Sequence[str], role: str) -> bool | None:
        """Whether one more message only appends; None if the template refuses it."""
        try:
            before = self._flat(roles, add_generation_prompt=role == "assistant")
            after = self._flat((*roles, role), add_generation_prompt=False)
        except InvalidRequestError:
            return None
        return after[: len(before)] == before

    def _flat(self, roles: Sequence[str], *, add_generation_prompt: bool) -> list[int]:
        pieces = self.render(_probe_messages(roles), add_generation_prompt=add_generation_prompt)
        return [token for piece in pieces for token in piece.ids]


def _probe_messages(roles: Sequence[str]) -> list[Message]:
    return [Message(role, (Part(f"probe {i}"),)) for i, role in enumerate(roles)]


def _after(layout: Sequence[str | _Slot], message: int) -> int:
    """Index after the first slot of the last old message, 0 without old messages.

    An old message has one part, so its first slot is its last.
    """
    if message < 0:
        return 0
    old = [
        i
        for i, item in enumerate(layout)
        if isinstance(item, _Slot) and item.part == 0 and item.message <= message
    ]
    return old[-1] + 1 if old else 0


def _complete(tail: Sequence[str | _Slot], full: Sequence[Message], old: int, merge: bool) -> bool:
    """Whether every new part stands in the tail, once and in order."""
    wanted = [
        _Slot(m, p)
        for m in range(old - 1 if merge else old, len(full))
        for p in range(1 if merge and m == old - 1 else 0, len(full[m].parts))
    ]
    return [item for item in tail if isinstance(item, _Slot)] == wanted


def _renumber(piece: Piece, first: int, merge: bool) -> Piece:
    """Count messages and parts from the new ones, without placeholder and joiner."""
    if piece.message is None or piece.part is None:
        return piece
    message, part = piece.message - first, piece.part
    if merge and message == 0:
        return replace(piece, message=0, part=part - 2 if part >= 2 else None)
    return replace(piece, message=message)


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError("the model needs a fast tokenizer (tokenizer.json)")
    return backend


def _part_tokenizer(backend: Tokenizer) -> Tokenizer:
    """Copy a tokenizer for parts of a text: nothing is added at their start.

    What a client writes without a space may be one word: by default ten thousand are kept.
    """
    fields: Any = json.loads(backend.to_str())
    fields["truncation"] = fields["padding"] = fields["post_processor"] = None
    _never_prepend(fields.get("pre_tokenizer"))
    made = Tokenizer.from_str(json.dumps(fields))
    if hasattr(made.model, "_resize_cache"):  # not all kinds of models have one
        made.model._resize_cache(REMEMBERED_WORDS)
    return made


def _never_prepend(node: Any) -> None:
    """Turn off Metaspace's space before the first word: a part is not a text's start."""
    if isinstance(node, list):
        for item in node:
            _never_prepend(item)
    elif isinstance(node, dict):
        if node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first":
            node["prepend_scheme"] = "never"
        for value in node.values():
            _never_prepend(value)
