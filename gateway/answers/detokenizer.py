"""Tokens to text, piece by piece, up to a stop string."""

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


class StopMatcher:
    """Finds the stop string that completes first, however the text is split; of several that end together, the longest.

    Withholds text only while it may begin one. A character costs the same however much of a stop string came before it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._root = self._state = _State(0, tuple(stop for stop in stops if stop), None)
        self._firsts = frozenset(stop[0] for stop in stops if stop)
        self._include = include
        self.has_any = bool(self._firsts)
        self._held = ""
        self._ahead, self._ahead_state = "", self._root
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Return the text that may be sent. After a match `matched` is set and nothing more comes."""
        if self.matched is not None:
            return ""
        self._ahead = ""
        state = self._state
        if state is self._root and self._firsts.isdisjoint(piece):
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            state = state.after(character)
            if state.complete is not None:
                self.matched, self._held = state.complete, ""
                return text[: end if self._include else end - len(state.complete)]
        self._state = state
        sure = len(text) - state.depth
        self._held = text[sure:]
        return text[:sure]

    def lets_pass(self, piece: str) -> bool:
        """True if `push` would return the piece, holding nothing back."""
        return self._state is self._root and self.matched is None and self._firsts.isdisjoint(piece)

    def foresees(self, piece: str) -> bool:
        """True if this piece completes a stop string. A piece that grew since the last call isn't read again."""
        if not self._ahead or not piece.startswith(self._ahead):
            self._ahead, self._ahead_state = "", self._state
        for character in piece[len(self._ahead) :]:
            self._ahead_state = self._ahead_state.after(character)
            if self._ahead_state.complete is not None:
                return True
        self._ahead = piece
        return False

    def flush(self) -> str:
        """Return the withheld text at the end of the stream."""
        held, self._held, self._state = self._held, "", self._root
        return held


class _State:
    """A state: the text's longest suffix that begins some stop strings: `stops`, by their first `depth` characters."""

    __slots__ = ("_next", "_shorter", "_stops", "complete", "depth")

    def __init__(self, depth: int, stops: tuple[str, ...], shorter: _State | None) -> None:
        self.depth = depth
        self._stops = stops
        self._shorter = shorter  # the next shorter suffix; None: of the empty one
        self._next: dict[str, _State] = {}
        whole = next((stop for stop in stops if len(stop) == depth), None) if depth else None
        self.complete: str | None = whole or (shorter.complete if shorter is not None else None)

    def after(self, character: str) -> _State:
        """The state after one more character."""
        state = self
        while (found := state._next.get(character) or state._made(character)) is None:
            if state._shorter is None:
                return state
            state = state._shorter
        return found

    def _made(self, character: str) -> _State | None:
        stops = tuple(stop for stop in self._stops if stop[self.depth : self.depth + 1] == character)
        if not stops:
            return None
        shorter = self if self._shorter is None else self._shorter.after(character)
        made = self._next[character] = _State(self.depth + 1, stops, shorter)
        return made
