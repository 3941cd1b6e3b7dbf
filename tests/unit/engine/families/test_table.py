"""docs/models.md says what the families read."""

from __future__ import annotations

import re
from pathlib import Path

from engine.families import FAMILIES
from tests.unit.engine.families.sizes import PARAMETERS, smallest_card
from tests.unit.engine.families.table import table
from tests.unit.gateway.parsing.families import SHOWN

PAGE = Path(__file__).resolve().parents[4] / "docs" / "models.md"


def test_the_page_about_models_is_what_the_families_read() -> None:
    assert PAGE.read_text() == table(), (
        "PYTHONPATH=. .venv/bin/python -m tests.unit.engine.families.table > docs/models.md"
    )


def test_readme_names_no_model_that_fits_no_card_without_saying_so() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text()
    too_large = {
        name
        for names, billions in PARAMETERS.items()
        if not smallest_card(billions)
        for name in re.split(", | and ", names)
    }
    assert {"DeepSeek-V3", "GLM-5", "LongCat-Flash"} < too_large
    assert [name for name in too_large if re.search(rf"{re.escape(name)}\b(?!-)", readme)] == []
    assert "one GPU a worker" in readme


def test_formats_are_said_of_architectures_that_are_served() -> None:
    assert {name for shown in SHOWN for name in shown.architectures.split()} <= {*FAMILIES}
