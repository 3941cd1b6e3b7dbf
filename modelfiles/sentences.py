"""Files as sentence-transformers writes them beside the weights: JSON objects, and the modules behind a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULES, SENTENCES, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
ORDER = ("Transformer", "Pooling", "Dense", "Normalize")  # modules
MAX_LEN = 1 << 20


class PoolingError(ValueError):
    """A model's files ask for something that isn't computed here; the message names file and field."""


def modules_of(model: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order; class paths moved between releases, so the last component counts."""
    if not (model / MODULES).is_file():
        return []
    read = _read(model / MODULES)
    if not isinstance(read, list) or not all(isinstance(one, dict) for one in read):
        raise PoolingError(f"{model / MODULES}: must be a list of modules")
    found = [(str(one.get("type", "")).rpartition(".")[2], str(one.get("path") or "")) for one in read]
    for _, folder in found:
        if os.path.isabs(folder) or ".." in Path(folder).parts:
            raise PoolingError(f"{model / MODULES}: path {folder!r} is outside of the model's folder")
    places = [ORDER.index(kind) for kind, _ in found if kind in ORDER]
    if places != sorted(places):
        raise PoolingError(f"{model / MODULES}: modules are computed in this order alone: {', '.join(ORDER)}")
    return found


def count_of(fields: Mapping[str, Any], *names: str) -> int:
    """The first of these fields that is there. Raises PoolingError."""
    found = next((fields[name] for name in names if name in fields), None)
    if not isinstance(found, int) or not 0 < found <= MAX_LEN:
        raise PoolingError(f"config.json: {names[0]} must be a number above 0, not {found!r:.40}")
    return found


def object_of(model: Path, name: str, *, must_be: bool = False) -> dict[str, Any]:
    """A JSON object; empty if there is none, unless it `must_be`. Raises PoolingError."""
    file = model / name
    if must_be and not file.is_file():
        raise PoolingError(f"{file} is missing: fetch the model's folder with the folders that {MODULES} names")
    read = _read(file) if file.is_file() else {}
    if not isinstance(read, dict):
        raise PoolingError(f"{file} is no JSON object")
    return read


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise PoolingError(f"{file} is not JSON: {error}") from None
