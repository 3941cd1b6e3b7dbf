"""`defaults.json` says what transformers' configuration classes fill in."""

from __future__ import annotations

import importlib.resources as resources
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine import families
from engine.families.reading.defaults import DEFAULT_ROPES, DEFAULTS

# Classes compute these from other fields, or drop them; families do the same with what is written here.
COMPUTED = {
    ("ernie4_5_moe", "moe_layer_end_index"),
    ("gemma3n_text", "intermediate_size"),
    ("hyperclovax", "attention_multiplier"),
    ("jamba", "mamba_dt_rank"),
    ("ministral3", "rope_parameters"),
    *((name, "sliding_window") for name in ("qwen2", "qwen2_5_omni_text", "qwen2_vl_text", "qwen3")),
}
KNOWN = sorted(name for name in DEFAULTS if name in CONFIG_MAPPING)


def filled_in(model_type: str) -> dict[str, Any]:
    values: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    return values


@pytest.mark.parametrize("model_type", KNOWN)
def test_defaults_are_those_of_the_class(model_type: str) -> None:
    theirs = filled_in(model_type)
    ours = {name: value for name, value in DEFAULTS[model_type].items() if (model_type, name) not in COMPUTED}
    assert {name: theirs.get(name, value) for name, value in ours.items()} == ours


@pytest.mark.parametrize("model_type", DEFAULT_ROPES)
def test_rotations_are_those_of_the_class(model_type: str) -> None:
    theirs, ours = filled_in(model_type)["rope_parameters"], DEFAULT_ROPES[model_type]
    assert {name: theirs[name] for name in ours} == ours


def test_nearly_all_are_compared() -> None:
    assert len(KNOWN) > 70


def test_each_entry_is_read() -> None:
    here = resources.files(families)
    assert isinstance(here, Path)
    named = {name for file in here.rglob("*.py") for name in re.findall(r'"(\w+)"', file.read_text())}
    assert named >= DEFAULTS.keys() | DEFAULT_ROPES.keys()
