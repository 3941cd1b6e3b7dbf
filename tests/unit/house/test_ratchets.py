"""Numbers that may only fall. `python -m tests.unit.house.measures` prints them all, and where they come from.

A number in `ratchets.toml` may be raised only by a line "Ratchet: NAME" in docs/design/ratchets.md that says why.
"""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.release import COMMIT
from tests.unit.house.measures import MEASURES, ROOT

FILE = Path(__file__).with_name("ratchets.toml")


def allowed() -> dict[str, float]:
    return {name: float(limit) for name, limit in tomllib.loads(FILE.read_text(encoding="utf-8")).items()}


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_measured_did_not_grow(name: str) -> None:
    found = MEASURES[name]()
    assert found.value <= allowed()[name], f"{name} is {found.value:g}: " + ", ".join(found.where)


def test_every_number_is_measured() -> None:
    assert allowed().keys() == MEASURES.keys()


def test_a_number_was_raised_only_with_a_reason() -> None:
    shown = subprocess.run(
        ["git", "show", f"{COMMIT}:{FILE.relative_to(ROOT)}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if shown.returncode != 0:
        pytest.skip("no history here: a shallow clone, or no clone at all")
    before = tomllib.loads(shown.stdout)
    reasons = (ROOT / "docs/design/ratchets.md").read_text(encoding="utf-8")
    raised = [name for name, limit in allowed().items() if limit > before.get(name, limit)]
    assert [name for name in raised if f"Ratchet: {name}" not in reasons] == []
