"""The config.json of models that people serve, as they were published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# One object a line: {"name": …, "config": …}.
LINES = Path(__file__).with_suffix(".jsonl").read_text().splitlines()
PUBLISHED: dict[str, dict[str, Any]] = {each["name"]: each["config"] for each in map(json.loads, LINES)}
