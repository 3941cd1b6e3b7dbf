"""The mark `quick`: it chooses the cases of a parametrised test that `make test` takes, and makes the others `long`.

- `@pytest.mark.quick`: as few as have each value of each parameter once. 12 formats in 3 sizes are 12 cases.
- `@pytest.mark.quick(of=lambda case: case.config)`: as few as have each of what this says of the parameters once.
- `@pytest.mark.quick(first=2)`: the first two, where any would do: seeds.
- `@pytest.mark.quick("llama*", "gpt_oss")`: those whose ids are like one of these, each of which is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum

import pytest

PLAIN = (str, bytes, int, float, Enum, type(None))


def mark_the_others_long(items: Sequence[pytest.Item], *, are_all: bool) -> None:
    """Mark what `quick` leaves out, function by function. What is `long` already is not counted.

    `are_all`: of each function, so that an id that is not there is none's.
    """
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_case = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if is_case and item.get_closest_marker("quick") and not item.get_closest_marker("long"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for function, those in cases.items():
        mark = those[0].get_closest_marker("quick")
        assert mark is not None
        quick = _chosen(function, those, mark, are_all=are_all)
        for at, item in enumerate(those):
            if at not in quick:
                item.add_marker(pytest.mark.long)


def _chosen(function: str, items: Sequence[pytest.Function], mark: pytest.Mark, *, are_all: bool) -> set[int]:
    if unknown := set(mark.kwargs) - {"first", "of"}:
        raise pytest.UsageError(f"{function}: quick() takes ids, first= or of=, not {', '.join(sorted(unknown))}")
    if "first" in mark.kwargs:
        return set(range(mark.kwargs["first"]))
    if of := mark.kwargs.get("of"):
        return each_value_once([{"of": of(**item.callspec.params)} for item in items])
    if mark.args:
        ids = [item.callspec.id for item in items]
        if are_all and (gone := [pattern for pattern in mark.args if not like(ids, [pattern])]):
            raise pytest.UsageError(f"{function} has no case {', '.join(gone)}: change what quick() names")
        return like(ids, mark.args)
    return each_value_once([item.callspec.params for item in items])


def like(ids: Sequence[str], patterns: Sequence[str]) -> set[int]:
    """The places of the ids that one of the patterns names; `*` stands for anything."""
    known = [re.compile(re.escape(pattern).replace(r"\*", ".*")) for pattern in patterns]
    return {at for at, name in enumerate(ids) if any(pattern.fullmatch(name) for pattern in known)}


def each_value_once(cases: Sequence[Mapping[str, object]]) -> set[int]:
    """Places of cases that have each value of each parameter: always the first of those that add the most values."""
    left = [frozenset((name, _told(value)) for name, value in case.items()) for case in cases]
    missing, chosen = set[tuple[str, object]]().union(*left), set[int]()
    while missing:
        best = max(range(len(left)), key=lambda at: (len(left[at] & missing), -at))
        chosen.add(best)
        missing -= left[best]
    return chosen


def _told(value: object) -> object:
    """The part of a value that tells it from others: itself if it is plain or a tuple, else which object it is."""
    if isinstance(value, tuple):
        return tuple(map(_told, value))
    return (type(value), value) if isinstance(value, PLAIN) else id(value)
