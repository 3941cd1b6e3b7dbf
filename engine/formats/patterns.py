"""Regular expressions for names of modules, matched with a bounded number of steps, without backtracking.

Whoever wrote a config.json must not decide for how long a worker reads it. The parser is Python's own. A set of places in a name
is an integer, a bit for each place, and an expression's item turns the places before it into those behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_MAX_LETTERS = 512
_MAX_GROUPS = 64  # each nested one takes several of Python's stack frames
_ANY_NUMBER = 1 << 16
_IN_NAMES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
_ENDS = ("AT_END", "AT_END_STRING")
_BEGINNINGS = ("AT_BEGINNING", "AT_BEGINNING_STRING")
_CLASSES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdigit,
    "CATEGORY_NOT_DIGIT": lambda letter: not letter.isdigit(),
    "CATEGORY_WORD": lambda letter: letter.isalnum() or letter == "_",
    "CATEGORY_NOT_WORD": lambda letter: not (letter.isalnum() or letter == "_"),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda letter: not letter.isspace(),
}
# Positions in a name -> positions after a match.
_Step = Callable[["_Name", int], int]


class PatternError(ValueError):
    """Not an expression, or an unsupported one. The message says why."""


class _Name:
    """A name, with the positions of each letter."""

    def __init__(self, text: str) -> None:
        self.text, self.every = text, (1 << len(text)) - 1
        self._places: dict[frozenset[str], int] = {}

    def places(self, letters: frozenset[str]) -> int:
        """Positions of these letters."""
        if letters not in self._places:
            self._places[letters] = sum(1 << at for at, letter in enumerate(self.text) if letter in letters)
        return self._places[letters]


def begins(pattern: str, name: str) -> bool:
    """True if the expression matches a prefix of the name. Raises PatternError."""
    return bool(compiled(pattern)(_Name(name), 1))


@lru_cache(maxsize=1 << 14)  # more than a config.json may have
def compiled(pattern: str) -> _Step:
    """Compile an expression. Raises PatternError for more than names need: back references, lookbehind, nested repeats."""
    if len(pattern) > _MAX_LETTERS:
        raise PatternError(f"it has {len(pattern)} letters, at most {_MAX_LETTERS} are read")
    if pattern.count("(") > _MAX_GROUPS:
        raise PatternError(f"it has {pattern.count('(')} groups, at most {_MAX_GROUPS} are read")
    try:
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"it is no regular expression: {error}") from error
    if parsed.state.flags & (re.IGNORECASE | re.MULTILINE | re.VERBOSE | re.ASCII):
        raise PatternError("flags are not supported")
    return _sequence(parsed, frozenset())


def _sequence(items: Any, within: frozenset[str]) -> _Step:
    steps = [_step(str(op), value, within) for op, value in items]

    def follow(name: _Name, places: int) -> int:
        for step in steps:
            if not places:
                break
            places = step(name, places)
        return places

    return follow


def _step(op: str, value: Any, within: frozenset[str]) -> _Step:
    """Compile an item; `within`: its context, "repeat" or "ahead"."""
    letters = _letters(op, value)
    if letters is not None:
        return lambda name, places: (places & name.places(letters)) << 1
    match op:
        case "AT" if str(value) in _BEGINNINGS:
            return lambda name, places: places & 1
        case "AT" if str(value) in _ENDS:
            return lambda name, places: places & (1 << len(name.text))
        case "SUBPATTERN" if not value[1] and not value[2]:
            return _sequence(value[3], within)
        case "BRANCH":
            branches = [_sequence(branch, within) for branch in value[1]]
            return lambda name, places: _either(branches, name, places)
        case "MAX_REPEAT" | "MIN_REPEAT":
            return _repeat(value[0], value[1], value[2], within)
        case "ASSERT" | "ASSERT_NOT" if value[0] > 0 and not within:
            return _looking_ahead(_sequence(value[1], frozenset({"ahead"})), wanted=op == "ASSERT")
    raise PatternError(f"{op.lower()} is not supported")


def _letters(op: str, value: Any) -> frozenset[str] | None:
    """The letters in names that a single-letter item matches, and those that it names; None for other items."""
    if op == "LITERAL":
        return frozenset(chr(value))
    if op == "ANY":
        return frozenset(_IN_NAMES)
    if op == "NOT_LITERAL":
        return frozenset(_IN_NAMES) - {chr(value)}
    if op != "IN":
        return None
    is_negated, found = False, set[str]()
    for kind, own in value:
        match str(kind):
            case "NEGATE":
                is_negated = True
            case "LITERAL":
                found.add(chr(own))
            case "RANGE":
                found |= {letter for letter in _IN_NAMES if own[0] <= ord(letter) <= own[1]}
            case "CATEGORY":
                found |= set(filter(_CLASSES[str(own)], _IN_NAMES))
    return frozenset(_IN_NAMES) - found if is_negated else frozenset(found)


def _either(branches: list[_Step], name: _Name, places: int) -> int:
    found = 0
    for branch in branches:
        found |= branch(name, places)
    return found


def _repeat(fewest: int, most: int, body: Any, within: frozenset[str]) -> _Step:
    """A repetition; within another one only "zero or one"."""
    most, is_one = int(most), (fewest, int(most)) == (0, 1)
    if not is_one and "repeat" in within:
        raise PatternError("a repeat within a repeat is not supported")
    letters = _letters(str(body[0][0]), body[0][1]) if len(body) == 1 else None
    step = _sequence(body, within if is_one else within | {"repeat"})

    def follow(name: _Name, places: int) -> int:
        for _ in range(min(fewest, len(name.text) + 1)):
            places = step(name, places)
        if letters is not None and most >= _ANY_NUMBER:
            return _any_number(name.places(letters), places)
        found = newest = places
        for _ in range(min(most - fewest, len(name.text) + 1)):
            newest = step(name, newest) & ~found
            if not newest:
                break
            found |= newest
        return found

    return follow


def _any_number(letters: int, places: int) -> int:
    """Positions after any number of letters: runs of 1, 2, 4 and more."""
    count = 1
    while letters:
        places |= (places & letters) << count
        letters &= letters >> count
        count *= 2
    return places


def _looking_ahead(step: _Step, *, wanted: bool) -> _Step:
    def follow(name: _Name, places: int) -> int:
        found = 0
        for at in range(len(name.text) + 1):
            if places >> at & 1 and bool(step(name, 1 << at)) == wanted:
                found |= 1 << at
        return found

    return follow
