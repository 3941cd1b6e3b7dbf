"""Models of the Hugging Face hub that this machine already has, in the cache that all its tools share. Nothing is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.model.files import gguf_files

_ID = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)/([A-Za-z0-9_][A-Za-z0-9_.-]*)(?:@([A-Za-z0-9_][A-Za-z0-9_.-]*))?\Z")


def is_id(name: str) -> bool:
    """Whether it is written like `org/name` or `org/name@revision`."""
    return _ID.match(name) is not None


def cached(name: str) -> Path | None:
    """The folder of a model's snapshot; None when it is no id, or not here."""
    found = _ID.match(name)
    if found is None:
        return None
    organisation, model, revision = found[1], found[2], found[3] or "main"
    folder = _cache() / f"models--{organisation}--{model}"
    ref = folder / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    snapshot = folder / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() or gguf_files(snapshot) else None


def _cache() -> Path:
    """As the hub's own tools find it."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"
