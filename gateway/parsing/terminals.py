"""A format's terminals in one tokenizer's vocabulary, finding them in text, and the tokens that are far from any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from gateway.parsing.format import Exit, Format

PATTERN_TIMEOUT_S = 1.0  # a pattern comes with the model's folder


@dataclass(frozen=True, slots=True)
class Found:
    """A terminal in a text, and what its pattern's groups say."""

    exit: Exit
    start: int
    end: int
    captures: Mapping[str, str]


class Terminals:
    """The exits of one state: `by_id` for those that are one token, the rest by text."""

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
        # A text may have such a token inside; then the token is text.
        self.inner = frozenset(
            token
            for text, token in vocabulary.items()
            if any(text in one.on for one in self._texts) or (self._patterns and token not in self.by_id)
        )

        self._beginnings = frozenset(one.on[:1] for one in self._texts)

    def are_far_from(self, text: str) -> bool:
        """Whether no terminal is in the text, nor may begin in it."""
        return not self._patterns and self._beginnings.isdisjoint(text)

    def find(self, text: str, *, is_final: bool, is_first: bool) -> tuple[list[Found], int]:
        """The exits of the earliest terminal, longest first, and from where on the text may become one."""
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
            found = _search(exit_, pattern, text, is_final=is_final)
            if isinstance(found, Found):
                best.append(found)
            else:
                hold = min(hold, found)
        first = min((found.start for found in best), default=0)
        best = [found for found in best if found.start == first and first < hold]
        best.sort(key=lambda found: -found.end)
        return best, hold


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


def _search(exit_: Exit, pattern: Any, text: str, *, is_final: bool) -> Found | int:
    """A match that can't grow any more, or from where on the text may match."""
    match = pattern.search(text, partial=not is_final, timeout=PATTERN_TIMEOUT_S)
    if match is None or match.start() == match.end():
        return len(text)
    if match.partial or (not is_final and match.end() == len(text) and not _is_literal(exit_.on)):
        return int(match.start())
    groups = {name: value for name, value in match.groupdict().items() if value is not None}
    return Found(exit_, match.start(), match.end(), groups)


def _begins_at(text: str, literal: str) -> int:
    """Where an end of `text` begins that `literal` properly begins with."""
    for length in range(min(len(text), len(literal) - 1), 0, -1):
        if text.endswith(literal[:length]):
            return len(text) - length
    return len(text)


def _is_literal(pattern: str) -> bool:
    """Whether a match can't grow with what follows."""
    return not regex.search(r"[*+?{|]", regex.sub(r"\\.", "", pattern)[-2:])


@dataclass(frozen=True, slots=True)
class Bound:
    """A format for one tokenizer."""

    format: Format
    terminals: Mapping[str, Terminals]
    with_calls: Mapping[str, Terminals]
    ids: frozenset[int]  # all tokens that are terminals somewhere, or part of one
    marks: Mapping[str, int]  # those that a format's texts have, by text
    turn: int | None
    stops: tuple[int, ...]


def bound(format_: Format, vocabulary: Mapping[str, int]) -> Bound:
    """`vocabulary`: the tokens that stand for themselves in a text (added ones), by their text."""

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
