"""docs/models.md says what the families read."""

from __future__ import annotations

from pathlib import Path

from engine.model.families import FAMILIES
from tests.unit.engine.families.table import table
from tests.unit.gateway.parsing.families import SHOWN

PAGE = Path(__file__).resolve().parents[4] / "docs" / "models.md"


def test_the_page_about_models_is_what_the_families_read() -> None:
    assert PAGE.read_text() == table(), (
        "PYTHONPATH=. .venv/bin/python -m tests.unit.engine.families.table > docs/models.md"
    )


def test_formats_are_said_of_architectures_that_are_served() -> None:
    assert {name for shown in SHOWN for name in shown.architectures.split()} <= {*FAMILIES}
