"""Five real texts: four pages of Python's manual, and the licence. Nothing here was trained on them."""

from __future__ import annotations

import pydoc_data.topics

from benchmarks.environment import ROOT

PAGES = ("class", "formatstrings", "typesseq", "execmodel")


def real_texts() -> dict[str, str]:
    """Each text by its name."""
    pages = {name: pydoc_data.topics.topics[name] for name in PAGES}
    return pages | {"LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8")}
