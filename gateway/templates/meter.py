"""Limits of templates that are rendered in the gateway itself. A child process renders the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from jinja2 import nodes

MAX_TEXT_CHARS = 8_000_000  # limit of one text, and of all output
MAX_STEPS = 200_000  # loop turns and calls
MAX_STEP_CHARS = 200_000_000  # steps times the template's length, which each step may write
LOOK_EVERY = 16  # steps between two looks at the time

PLAIN_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem,
    nodes.Slice, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.If, nodes.For, nodes.Assign,
    nodes.AssignBlock, nodes.Macro, nodes.Filter, nodes.Test, nodes.Concat, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div,
    nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos, nodes.Call, nodes.Keyword, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair,
    nodes.Break, nodes.Continue, nodes.ExprStmt, nodes.Scope,
)  # fmt: skip
PLAIN_FILTERS = frozenset({
    "trim", "tojson", "length", "count", "default", "d", "list", "first", "last", "upper", "lower", "capitalize", "title",
    "join", "string", "safe", "int", "float", "abs", "replace", "items", "dictsort", "map", "select", "reject", "selectattr",
    "rejectattr", "reverse", "escape", "e",
})  # fmt: skip
PLAIN_TEXT_METHODS = frozenset({
    "count", "endswith", "find", "index", "rfind", "rindex", "startswith", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rpartition", "rsplit", "rstrip", "split", "splitlines", "strip", "lower", "upper", "title",
    "capitalize", "isalnum", "isalpha", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "isupper",
})  # fmt: skip
PLAIN_METHODS = frozenset({"items", "keys", "values", "get"})  # methods of objects


Rendered = TypeVar("Rendered")


class DearError(Exception):
    """A child process has to render. `is_lasting`: for any conversation."""

    def __init__(self, *, is_lasting: bool) -> None:
        super().__init__("the template is not known to be cheap")
        self.is_lasting = is_lasting


class Meter:
    """The remaining loop turns, characters and processor time of one rendering."""

    def __init__(self, most_s: float, source_chars: int) -> None:
        """`most_s`: processor time of this thread; `source_chars`: of the template."""
        self._give_up_at = time.thread_time() + most_s
        self._steps_left = min(MAX_STEPS, MAX_STEP_CHARS // max(1, source_chars))
        self._look_at = self._steps_left - LOOK_EVERY
        self._chars_left = 2 * MAX_TEXT_CHARS

    def step(self) -> None:
        """Raises DearError."""
        self._steps_left -= 1
        if self._steps_left < self._look_at:
            self._look_at -= LOOK_EVERY
            if self._steps_left < 0 or time.thread_time() > self._give_up_at:
                raise DearError(is_lasting=False)

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values, each counted as a step."""
        for value in values:
            self.step()
            yield value

    def text(self, chars: int) -> None:
        """Count a text that is about to be built. Raises DearError."""
        if chars > MAX_TEXT_CHARS:
            raise DearError(is_lasting=False)

    def written(self, chars: int) -> None:
        """Count characters written to the prompt, or to a text that a template builds. Raises DearError."""
        self._chars_left -= chars
        if self._chars_left < 0:
            raise DearError(is_lasting=False)
        self.step()


class _Running(threading.local):
    meter: Meter | None = None


_running = _Running()


def running() -> Meter | None:
    """The meter of this thread's rendering; None in a child process."""
    return _running.meter


def metered(meter: Meter, render: Callable[[], Rendered]) -> Rendered:
    """The result of `render`, metered. Raises DearError."""
    _running.meter = meter
    try:
        return render()
    finally:
        _running.meter = None


def is_plain(template: nodes.Template) -> bool:
    """True if a template consists of constructs whose cost the meter sees."""
    if any(type(node) not in PLAIN_NODES for node in template.find_all(nodes.Node)):
        return False
    if any(loop.recursive for loop in template.find_all(nodes.For)):
        return False
    filters = list(template.find_all(nodes.Filter))
    by_name = [one for one in filters if one.name == "map" and one.args]  # the name of any filter
    return not by_name and all(one.name in PLAIN_FILTERS for one in filters)
