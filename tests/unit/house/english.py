"""A random sample of comments and docstrings, to judge their English: `python -m tests.unit.house.english SEED`."""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path

from cli.entry import PACKAGES
from tests.unit.house.measures import comments_of, name_of, sources, tree_of


class Kind(StrEnum):
    """The three forms of prose in code."""

    OWN_LINE = auto()
    TRAILING = auto()
    DOCSTRING = auto()


SAMPLED = {
    Kind.OWN_LINE: 64,
    Kind.TRAILING: 50,
    Kind.DOCSTRING: 86,
}  # 200, in the shares of the reading of November 2026


@dataclass(frozen=True, slots=True)
class Prose:
    """A comment, or the first line of a docstring."""

    kind: Kind
    place: str
    text: str


def prose() -> Iterator[Prose]:
    """Yield all prose of the product in the order of its files."""
    for path in sources(*PACKAGES):
        yield from _docstrings(path)
        yield from _comments(path)


def _docstrings(path: Path) -> Iterator[Prose]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").partition("\n")[0]
            if text:
                yield Prose(Kind.DOCSTRING, f"{name_of(path)}:{node.body[0].lineno}", text)


def _comments(path: Path) -> Iterator[Prose]:
    """Yield trailing comments, and each run of comment lines as one."""
    run: list[str] = []
    first = before = 0
    for line, text, trailing in comments_of(path):
        if run and (trailing or line != before + 1):
            yield Prose(Kind.OWN_LINE, f"{name_of(path)}:{first}", " ".join(run))
            run = []
        if text.startswith(("noqa", "type:", "pragma", "fmt:", "ruff:", "mypy:", "--")):  # directives, headings
            continue
        if trailing:
            yield Prose(Kind.TRAILING, f"{name_of(path)}:{line}", text)
            continue
        first = first if run else line
        run.append(text)
        before = line
    if run:
        yield Prose(Kind.OWN_LINE, f"{name_of(path)}:{first}", " ".join(run))


def sample(seed: int) -> list[Prose]:
    """Draw 200 pieces; the same seed draws the same ones from the same tree."""
    drawn = random.Random(seed)
    found = list(prose())
    return [
        each
        for kind, count in SAMPLED.items()
        for each in drawn.sample([one for one in found if one.kind is kind], count)
    ]


def main() -> None:
    """Print a sample, numbered."""
    for number, each in enumerate(sample(int(sys.argv[1])), 1):
        print(f"{number:3} {each.place}: {each.text}")


if __name__ == "__main__":
    sys.exit(main())
