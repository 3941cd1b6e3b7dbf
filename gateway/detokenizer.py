"""Tokens to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.tokenizer import ChatTokenizer

CONTEXT = 6  # tokens before a piece that its text may depend on (prefix spaces, merged bytes)


class Detokenizer:
    """Incremental decoding: what `push` and `flush` return, joined, is the text of all tokens.

    A token's text may depend on the one before (a leading space, a character of several tokens), so each piece is the difference
    between two decodes of a short window. Text that ends inside a character is held back until the character is whole.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._known = 0  # leading tokens of the window whose text is out

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain now."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        text = self._new_text()
        self._known = len(self._window)
        return text

    def _push(self, token_id: int) -> str:
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._window) - self._known < CONTEXT:
            return ""
        self._known = len(self._window)
        if len(self._window) > 2 * CONTEXT:
            self._window = self._window[-CONTEXT:]
            self._known = CONTEXT
        return text

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._known])
        whole = self._decode(self._window)
        return whole[len(before) :] if whole.startswith(before) else whole[len(before.rstrip("\ufffd")) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special) if ids else ""
