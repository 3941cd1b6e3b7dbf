"""A format's terminals in one tokenizer's vocabulary, their search in text, and the tokens far from any."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import regex

from common.errors import ServingError
from gateway.parsing.format import Exit, Format

# Patterns come with the model's folder and run on the event loop, so slow ones cost everybody's time.
PIECE_S = 0.000_05  # free allowance for each piece of an answer
ANSWER_S = 0.015  # beyond that, for a whole answer
SHARE = 0.1  # share of time of all answers of a model
Result = TypeVar("Result")


class SlowPatternError(ServingError):
    """An answer's patterns exceeded their share of time."""

    def __init__(self) -> None:
        super().__init__("a pattern in this model's response_template takes too long, so its answer can't be read")


class Share:
    """The time budget of a model's patterns beyond `PIECE_S`: it grows with the clock, up to one answer's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known, self._at = ANSWER_S, clock()

    def left(self) -> float:
        now = self._clock()
        self._known, self._at = min(ANSWER_S, self._known + SHARE * (now - self._at)), now
        return self._known

    def take(self, seconds: float) -> None:
        self._known -= seconds


class Patience:
    """The remaining search time for a model's patterns in one answer."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._left = ANSWER_S

    def timed(self, search: Callable[..., Result], text: str, **options: Any) -> Result:
        """The result of a search that takes a `timeout` in seconds. Raises SlowPatternError."""
        left = min(self._left, self._share.left())
        if left <= 0:
            raise SlowPatternError
        began = time.thread_time()
        try:
            return search(text, timeout=PIECE_S + left, **options)
        except TimeoutError:
            raise SlowPatternError from None
        finally:
            used = time.thread_time() - began - PIECE_S
            if used > 0:
                self._left -= used
                self._share.take(used)


@dataclass(frozen=True, slots=True)
class Found:
    """A terminal in a text, with its pattern's groups."""

    exit: Exit
    start: int
    end: int
    captures: Mapping[str, str]


class Terminals:
    """The exits of one state: `by_id` for single tokens, the rest by text."""

    def __init__(self, exits: Iterable[Exit], vocabulary: Mapping[str, int]) -> None:
        self.by_id: dict[int, list[Exit]] = {}
        self._texts: list[Exit] = []
        self._patterns: list[tuple[Exit, Any]] = []
        for exit_ in exits:
            token = None if exit_.is_pattern else vocabulary.get(exit_.on)
            if token is not None:
                self.by_id.setdefault(token, []).append(exit_)
            elif exit_.is_pattern:
                self._patterns.append((exit_, regex.compile(exit_.on, regex.DOTALL)))
            elif not exit_.token_only:
                self._texts.append(exit_)
        # A text may contain such a token; then the token is text.
        self.inner = frozenset(
            token
            for text, token in vocabulary.items()
            if any(text in one.on for one in self._texts) or (self._patterns and token not in self.by_id)
        )

        self._beginnings = frozenset(one.on[:1] for one in self._texts)

    def are_far_from(self, text: str) -> bool:
        """True if the text has no terminal, nor the start of one."""
        return not self._patterns and self._beginnings.isdisjoint(text)

    def find(self, text: str, patience: Patience, *, is_final: bool, is_first: bool) -> tuple[list[Found], int]:
        """The exits of the earliest terminal, longest first, and the offset from which the text may become one.

        Raises SlowPatternError.
        """
        best: list[Found] = []
        hold = len(text)
        for exit_ in self._texts:
            if is_first or not exit_.first:
                start = text.find(exit_.on)
                if start >= 0:
                    best.append(Found(exit_, start, start + len(exit_.on), {}))
                elif not is_final:
                    hold = min(hold, _begins_at(text, exit_.on))
        for exit_, pattern in self._patterns:
            found = _search(exit_, pattern, text, patience, is_final=is_final)
            if isinstance(found, Found):
                best.append(found)
            else:
                hold = min(hold, found)
        first = min((found.start for found in best), default=0)
        best = [found for found in best if found.start == first and first < hold]
        best.sort(key=lambda found: -found.end)
        return best, hold


class PlainTokens(dict[int, str]):
    """Token -> its text; "": it depends on the context, or may affect what follows. Filled lazily.

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


def _search(exit_: Exit, pattern: Any, text: str, patience: Patience, *, is_final: bool) -> Found | int:
    """A match that can't grow any more, or the offset from which the text may match."""
    match = patience.timed(pattern.search, text, partial=not is_final)
    if match is None or match.start() == match.end():
        return len(text)
    if match.partial or (not is_final and match.end() == len(text) and not _is_literal(exit_.on)):
        return int(match.start())
    groups = {name: value for name, value in match.groupdict().items() if value is not None}
    return Found(exit_, match.start(), match.end(), groups)


def _begins_at(text: str, literal: str) -> int:
    """Offset of a suffix of `text` that is a proper prefix of `literal`."""
    for length in range(min(len(text), len(literal) - 1), 0, -1):
        if text.endswith(literal[:length]):
            return len(text) - length
    return len(text)


def _is_literal(pattern: str) -> bool:
    """True if a match can't grow with further text."""
    return not regex.search(r"[*+?{|]", regex.sub(r"\\.", "", pattern)[-2:])


@dataclass(frozen=True, slots=True)
class Bound:
    """A format for one tokenizer."""

    format: Format
    terminals: Mapping[str, Terminals]
    with_calls: Mapping[str, Terminals]
    ids: frozenset[int]  # all tokens that are terminals or part of one
    marks: Mapping[str, int]  # those in a format's texts, by text
    turn: int | None
    stops: tuple[int, ...]
    share: Share = field(default_factory=Share, compare=False)  # its patterns' time


def bound(format_: Format, vocabulary: Mapping[str, int]) -> Bound:
    """Bind a format. `vocabulary`: the added tokens, by their text."""

    def of(exits: Sequence[Exit]) -> Terminals:
        return Terminals(exits, vocabulary)

    with_calls = {name: of(state.exits) for name, state in format_.states.items()}
    without = {name: of([one for one in state.exits if not one.calls]) for name, state in format_.states.items()}
    quotes = {state.quote for state in format_.states.values() if state.quote}
    ids = frozenset(
        [token for one in with_calls.values() for token in (*one.by_id, *one.inner)]
        + [vocabulary[quote] for quote in quotes if quote in vocabulary]
    )
    return Bound(
        format=format_,
        terminals=without,
        with_calls=with_calls,
        ids=ids,
        marks={text: token for text, token in vocabulary.items() if token in ids and text[0] in "<[｜"},
        turn=vocabulary.get(format_.turn),
        stops=tuple(vocabulary[stop] for stop in format_.stops if stop in vocabulary),
    )
