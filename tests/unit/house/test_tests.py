"""Rules for the tests themselves that a machine can check."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.conftest import pytest_report_teststatus
from tests.unit.house.measures import ROOT, name_of, nodes_of, sources, text_of

IMPORTS_A_TEST = re.compile(r"^[ ]*(?:from|import)\b(?:[^\n(\\]|\\\n|\([^)]*\)?)*\btest_", re.MULTILINE)
COMMENT = re.compile(r"#[^\n]*")
SKIPS = re.compile("importorskip|skipif")


def nodes_where(looks: re.Pattern[str]) -> Iterator[tuple[Path, ast.AST]]:
    """The nodes of those modules whose text has it: to read all of the tests takes seconds."""
    for path in sources("tests"):
        if looks.search(COMMENT.sub("", text_of(path))):
            yield from ((path, node) for node in nodes_of(path))


def test_no_test_module_imports_from_another() -> None:
    """What two test modules need is in a helper beside them, or in tests/fakes."""
    found = []
    for path, node in nodes_where(IMPORTS_A_TEST):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if any(part.startswith("test_") for name in names for part in name.split(".")):
            found.append(f"{name_of(path)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("path", sorted(sources("tests/gpu")), ids=name_of)
def test_what_only_a_card_runs_can_be_imported(path: Path) -> None:
    """`make test` collects nothing of it: a renamed module would be noticed on a card alone."""
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_no_test_skips_by_itself_what_make_installs() -> None:
    found = []
    for path, node in nodes_where(SKIPS):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called.endswith("importorskip") or (called.endswith("skipif") and "find_spec" in ast.unparse(node)):
            found.append(f"{name_of(path)}:{node.lineno}")
    assert found == [], "tests/needs.py has the function for it"


def test_a_failed_test_is_named_where_it_fails() -> None:
    def status(outcome: Literal["passed", "failed"], when: Literal["setup", "call"]) -> tuple[str, str, str] | None:
        report = pytest.TestReport("tests/x.py::y", ("x.py", 1, "y"), {}, outcome, None, when)
        return pytest_report_teststatus(report)

    assert status("failed", "call") == ("failed", "\nFAILED tests/x.py::y\n", "FAILED")
    assert status("failed", "setup") == ("error", "\nERROR tests/x.py::y\n", "ERROR")
    assert status("passed", "call") is None
