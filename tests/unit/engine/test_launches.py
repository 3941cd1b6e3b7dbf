"""Every pass launches the kernels on record, in their order and with their shapes, and generates the tokens on record.

The record is of commit e8c0f42, before families, layer kinds and parameters were values. What changes it on purpose writes it
anew: `python -m tests.unit.engine.launches`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.needs import needs
from tests.unit.engine.launches import MODELS, folders, interpreted, read_record, tokens_of

NAMES = ("demo", *MODELS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def launches(models: dict[str, Path]) -> dict[str, dict[str, list[str]]]:
    needs("triton")
    return dict(zip(models, interpreted(models.values()), strict=True))


def test_the_record_is_of_every_model() -> None:
    assert tuple(read_record()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_launches_what_is_on_record(name: str, launches: dict[str, dict[str, list[str]]]) -> None:
    _, recorded = read_record()[name]
    assert launches[name] == recorded


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_on_record(name: str, models: dict[str, Path]) -> None:
    recorded, _ = read_record()[name]
    assert tokens_of(models[name]) == recorded
