"""Tokens that are text and nothing else, wherever nothing is held back: most of an answer."""

from __future__ import annotations

from collections.abc import Callable

from gateway.parsing.terminals import Terminals


class PlainTokens(dict[int, str]):
    """Token -> its text; "": what it says depends on what came before, or may decide about what comes. Filled as tokens are met.

    A plain token has whole characters, the last of which is no space, and no markup begins in it.
    """

    def __init__(self, read: Callable[[int], bytes | None], terminals: Terminals | None) -> None:
        """`read` gives a token's text, or None if it isn't said. `terminals`: what ends the state that a parser is in, if any."""
        self._read = read
        self._terminals = terminals

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str:
        try:
            text = (self._read(token_id) or b"").decode()
        except UnicodeDecodeError:
            return ""
        if self._terminals is None:
            return text
        return "" if text[-1:].isspace() or not self._terminals.are_far_from(text) else text
