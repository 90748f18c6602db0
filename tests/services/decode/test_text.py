"""Text that may be shown: whole characters, and no piece of a stop string."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from criticalkv.services.decode.sampling import Sampler
from criticalkv.services.decode.text import StopMatch, TextStream
from criticalkv.services.local import LocalEngine
from criticalkv.shared.model.loader import LoadedModel


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[..., LoadedModel]) -> PreTrainedTokenizerBase:
    return tiny_model().tokenizer


def run(
    tokenizer: PreTrainedTokenizerBase, text: str, stop: tuple[str, ...]
) -> tuple[list[str], StopMatch | None, list[int]]:
    """Push a text byte by byte; return what was shown, the match and the ids pushed."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream, shown = TextStream(tokenizer, stop), []
    for n, token in enumerate(ids, start=1):
        match = stream.push(token)
        if match:
            return [*shown, stream.take(final=True)], match, ids[:n]
        shown.append(stream.take())
    return [*shown, stream.take(final=True)], None, ids


def test_characters_are_never_split(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "añ 漢字 👩‍👩‍👧 🇩🇪 é"
    assert len(tokenizer.encode(text)) > len(text), "no character spans tokens"
    shown, _, _ = run(tokenizer, text, ())
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_unfinished_character_is_dropped_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer, ())
    for token in tokenizer.encode("ok 漢")[:-1]:
        stream.push(token)
    assert stream.take(final=True) == "ok "


@pytest.mark.parametrize(
    ("text", "stop", "visible", "leftover"),
    [
        ("hello STOP more", ("STOP",), "hello ", ""),
        ("STOP", ("STOP",), "", ""),
        ("ab abc", ("abc",), "ab ", ""),
        ("aaab", ("aab",), "a", ""),
        ("xENDy", ("ENDING", "END"), "x", ""),
        ("漢字stop", ("字s",), "漢", ""),
    ],
)
def test_stop_strings(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    stop: tuple[str, ...],
    visible: str,
    leftover: str,
) -> None:
    shown, match, _ = run(tokenizer, text, stop)
    assert "".join(shown) == visible
    assert match == StopMatch(len(tokenizer.encode(visible)), leftover)


def test_withheld_text_is_flushed_when_no_stop_comes(tokenizer: PreTrainedTokenizerBase) -> None:
    shown, match, _ = run(tokenizer, "wait ST", ("STOP",))
    assert match is None
    assert shown[-1] == "ST"
    assert "".join(shown) == "wait ST"


@given(
    text=st.text(alphabet="ab漢🙂 ", max_size=20),
    stop=st.lists(st.text(alphabet="ab漢🙂 ", min_size=1, max_size=3), max_size=3),
)
def test_shown_text_is_the_text_before_the_first_stop(
    tokenizer: PreTrainedTokenizerBase, text: str, stop: list[str]
) -> None:
    shown, match, ids = run(tokenizer, text, tuple(stop))
    seen = bytes(0) if not ids else tokenizer.decode(ids)
    if match is None:
        assert "".join(shown) == text
        assert not any(s in text for s in stop)
    else:
        cut = min(i for s in stop if (i := str(seen).find(s)) >= 0)
        assert "".join(shown) == str(seen)[:cut]
    # Nothing that was shown early can be the start of a stop string that came later.
    so_far = ""
    for piece in shown[:-1]:
        so_far += piece
        assert text.startswith(so_far)
        assert not any(s in so_far for s in stop)


class _Multi:
    """Tokens of several characters, which a byte tokenizer has not."""

    pieces = ("foo ", "bar\n", "\nbaz", "qux")


def test_stop_inside_a_token_leaves_its_first_part_pending(
    multi_tokenizer: PreTrainedTokenizerBase,
) -> None:
    stream = TextStream(multi_tokenizer, ("\n\n",))
    assert stream.push(0) is None
    assert stream.take() == "foo "
    assert stream.push(1) is None
    assert stream.take() == "bar"
    match = stream.push(2)
    assert match == StopMatch(kept_tokens=1, leftover="bar")
    assert stream.take(final=True) == ""


@pytest.fixture
def multi_tokenizer() -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: i for i, piece in enumerate(_Multi.pieces)}
    backend = Tokenizer(WordLevel(vocab, unk_token="qux"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(("begun", "text"), [(0, " "), (1, "  "), (3, "  ")])
def test_text_goes_on_after_an_answer_that_was_begun(
    tiny_model: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    begun: int,
    text: str,
) -> None:
    """SentencePiece's decoders take away the first space of a text, and only that."""
    model = tiny_model()
    [space] = model.tokenizer.encode(" ")
    backend = model.tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    monkeypatch.setattr(Sampler, "pick", lambda *_: space)
    with LocalEngine(model) as local:
        turn = local.generate(None, model.tokenizer.encode("abc"), begun=begun, max_tokens=2)
    assert (turn.token_ids, turn.text) == ((space, space), text)


@pytest.mark.parametrize("begun", ["ab \ufffd", "ab \ufffd\ufffd", "\ufffd", "ab\ufffd c"])
def test_what_was_begun_with_a_replacement_character_is_not_said_again(
    tokenizer: PreTrainedTokenizerBase, begun: str
) -> None:
    """It looks like an unfinished character."""
    before = tokenizer.encode(begun, add_special_tokens=False)
    stream = TextStream(tokenizer, (), before)
    for token in tokenizer.encode(" so", add_special_tokens=False):
        stream.push(token)
    assert stream.take(final=True) == " so"


def test_a_first_space_is_kept_after_a_replacement_character(
    tiny_model: Callable[..., LoadedModel],
) -> None:
    tokenizer = tiny_model().tokenizer
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    stream = TextStream(tokenizer, (), tokenizer.encode("a\ufffd"))
    for token in tokenizer.encode(" so"):
        stream.push(token)
    assert stream.take(final=True) == " so"


def test_bytes_that_are_no_character_do_not_stop_the_stream() -> None:
    """Byte-fallback tokenizers can produce any bytes."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "a", "b", "<0xC3>", "<0xA9>", "<0xFF>"]
    backend = Tokenizer(
        BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=backend), ())
    shown = ""
    for token in (1, 3, 4, 5, 2, 1):
        stream.push(token)
        shown += stream.take()
    shown += stream.take(final=True)
    assert shown.startswith("a")
    assert shown.endswith("ba")
