"""Numbers that may only fall. `python -m tests.unit.house.measures` prints them all, and where they come from.

A number in `ratchets.toml` may be raised only by a line "Ratchet: NAME" in docs/design/ratchets.md that says why.
"""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from tests.release import COMMIT
from tests.unit.house.measures import MEASURES, RATCHETS, ROOT, allowed

TRACED = {
    "files_of_a_request",
    "files_before_a_job_is_queued",
}  # tests/integration/test_way_of_a_request.py counts them


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_measured_did_not_grow(name: str) -> None:
    found = MEASURES[name]()
    assert found.value <= allowed()[name], f"{name} is {found.value:g}: " + ", ".join(found.where)


def test_every_number_is_measured() -> None:
    assert allowed().keys() == MEASURES.keys() | TRACED


def test_a_number_was_raised_only_with_a_reason() -> None:
    shown = subprocess.run(
        ["git", "show", f"{COMMIT}:{RATCHETS.relative_to(ROOT)}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if shown.returncode != 0:
        pytest.skip("no history here: a shallow clone, or no clone at all")
    before = tomllib.loads(shown.stdout)
    reasons = (ROOT / "docs/design/ratchets.md").read_text(encoding="utf-8")
    raised = [name for name, limit in allowed().items() if limit > before.get(name, limit)]
    assert [name for name in raised if f"Ratchet: {name}" not in reasons] == []
