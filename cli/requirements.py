"""Print the requirements of pyproject.toml with the given extras, for pip to install without Baton itself."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Return them in the file's order. Raises KeyError for an unknown extra."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]


if __name__ == "__main__":
    print(*requirements(sys.argv[1:]), sep="\n")
