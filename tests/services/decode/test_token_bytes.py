"""Tokens of log probabilities: never U+FFFD, and their bytes add up to the text."""

from __future__ import annotations

from tiny_models import byte_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from criticalkv.services.decode.token_bytes import TokenBytes

TEXT = "a b\n漢字 🙂é\x00\x7f\xad"


def test_byte_level_tokens_add_up() -> None:
    tokenizer = byte_tokenizer()
    tokens = TokenBytes(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(tokens.raw, ids)) == TEXT.encode()
    shown = [tokens.show(i) for i in ids]
    assert "\ufffd" not in "".join(shown)
    assert shown[:3] == ["a", " ", "b"]
    assert "bytes:\\xe6" in shown
    assert tokens.show(tokenizer.eos_token_id) == "<|im_end|>"


def test_byte_fallback_and_spaces() -> None:
    pieces = ["<unk>", "▁a", "<0xE6>"]
    backend = Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.decoder = decoders.ByteFallback()
    tokens = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [tokens.show(i) for i in (1, 2)] == [" a", "bytes:\\xe6"]
