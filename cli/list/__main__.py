"""The models that are kept on this machine: `baton list`."""

from __future__ import annotations

import argparse
import json
import sys

from services.runtime import hub
from services.runtime.checks.model import gigabytes
from services.runtime.hub import NAMED, is_kept, kept
from services.runtime.models.kept import Kept, kept_models
from services.runtime.models.serving import is_served

HEADS = ("NAME", "COMMIT", "SIZE", "SHARED", "STATE")


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="baton list", description="List the models that are kept on this machine.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    models = kept_models()
    if given.json:
        print(json.dumps([_fields(one) for one in models], indent=2))
        return 0
    rows = [_row(one) for one in models]
    rows += [_packaged(name) for name in NAMED if is_kept(name)]
    if not rows:
        print(f"no models in {hub.cache()}: `baton pull org/name` fetches one")
        return 0
    widths = [max(len(row[column]) for row in (HEADS, *rows)) for column in range(len(HEADS))]
    for row in (HEADS, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(one: Kept) -> tuple[str, ...]:
    state = "served" if one.is_served else "" if one.is_whole else "not whole"
    return one.name, one.commit[:7], gigabytes(one.num_bytes), gigabytes(one.shared_bytes), state


def _packaged(name: str) -> tuple[str, ...]:
    file = kept(name)
    return name, "-", gigabytes(NAMED[name].num_bytes), "-", "served" if file is not None and is_served(file) else ""


def _fields(one: Kept) -> dict[str, object]:
    return {
        "name": one.name,
        "commit": one.commit,
        "path": str(one.model),
        "size": one.num_bytes,
        "shared": one.shared_bytes,
        "whole": one.is_whole,
        "served": one.is_served,
    }


if __name__ == "__main__":
    sys.exit(main())
