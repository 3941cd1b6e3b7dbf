"""Tokens to text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from gateway.answers.tokenizer import ChatTokenizer

MAX_HELD = 16  # tokens held back for an unfinished character; none has this many


class Detokenizer:
    """Incremental decoding: the results of `push` and `flush`, joined, are the text of all tokens.

    An unfinished character is held back. Byte-level tokens go through an incremental UTF-8 decoder. Other tokens' text may
    depend on their neighbours (a leading space, a character of several byte tokens), so a piece is the difference between
    decoding the previous piece's tokens with and without the new ones. Both cost a constant time a token.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._context: list[int] = []  # tokens of the previous piece, whose text is out
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain now."""
        return "".join([self.add(token_id) for token_id in token_ids])

    @property
    def is_clear(self) -> bool:
        """True if a token with whole characters would decode on its own, leaving no trace on the next one."""
        return self._utf8 is not None and self._utf8.getstate() == (b"", 0)

    def flush(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        text = self._text_of_held()
        self._context, self._held = self._held, []
        return text

    def add(self, token_id: int) -> str:
        """`push` of one token."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._held.append(token_id)
        text = self._text_of_held()
        if text.endswith("\ufffd") and len(self._held) < MAX_HELD:
            return ""
        self._context, self._held = self._held, []
        return text

    def _text_of_held(self) -> str:
        return self._decode(self._context + self._held)[len(self._decode(self._context)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special) if ids else ""
