"""The bytes of single tokens, which need not be whole characters."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes stand for themselves, others are moved."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = (b for b in range(256) if b not in printable)
    table = {chr(b): b for b in printable}
    return table | {chr(0x100 + n): b for n, b in enumerate(moved)}


class TokenBytes:
    """Shows tokens one by one, for log probabilities."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
        self._special = set(tokenizer.all_special_tokens)
        self._alphabet = _byte_level()

    def raw(self, token_id: int) -> bytes:
        """Return a token's bytes in UTF-8 text; possibly a part of a character."""
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if piece in self._special:
            return piece.encode()
        if self._byte_level and all(c in self._alphabet for c in piece):
            return bytes(self._alphabet[c] for c in piece)
        fallback = _FALLBACK.fullmatch(piece)
        return bytes.fromhex(fallback[1]) if fallback else piece.replace("▁", " ").encode()

    def show(self, token_id: int) -> str:
        r"""Return a token's text, or `bytes:\xe6\xbc` if it is no whole text."""
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
