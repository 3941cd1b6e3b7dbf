"""Values that transformers' configuration classes fill in where a config.json is silent: `defaults.json`, by `model_type`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.families.reading.fields import NUM_EXPERTS, Fields

_READ = json.loads(Path(__file__).parents[1].joinpath("defaults.json").read_bytes())
DEFAULTS: Mapping[str, Mapping[str, Any]] = _READ["fields"]
# Rotations that take the place of a whole field, where nothing says one.
DEFAULT_ROPES: Mapping[str, Mapping[str, Any]] = _READ["rope_parameters"]


def with_defaults(fields: Fields, model_type: str) -> Fields:
    """Fill in absent fields; a number of experts under another name takes the default's place."""
    values = DEFAULTS[model_type]
    if any(name in fields for name in NUM_EXPERTS):
        values = {name: value for name, value in values.items() if name not in NUM_EXPERTS}
    return fields.over(values)


def with_default_rope(fields: Fields, model_type: str) -> Fields:
    """Fill in the rotation, unless either of its fields says one."""
    if fields.get("rope_parameters") or fields.get("rope_scaling"):
        return fields
    return fields.with_values(rope_parameters=DEFAULT_ROPES[model_type])
