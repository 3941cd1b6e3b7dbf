"""Baton as an installed package. Its folders lie in here as they lie in the repository, and are no names in site-packages.

The command `baton` puts this folder first on the path, for itself and by PYTHONPATH for its children (docs/design/packaging.md).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from baton_serve.baton import LLM, BatonError, SamplingParams

__all__ = ["LLM", "BatonError", "SamplingParams", "main"]

FOLDER = str(Path(__file__).resolve().parent)


def main() -> int:
    """Entry point of `baton`; returns the exit code."""
    sys.path.insert(0, FOLDER)
    others = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, others)))
    os.environ["PYTHONSAFEPATH"] = "1"  # children start in the person's folder, which may have a `common` of its own
    from cli.__main__ import main as run

    return run()
