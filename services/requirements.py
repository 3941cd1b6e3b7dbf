"""Print a project's requirements, with the given extras, one a line: pip can install them without installing Baton itself."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Arguments: pyproject.toml and the names of extras."""
    project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    print(*project["dependencies"], *(line for name in sys.argv[2:] for line in extras[name]), sep="\n")


if __name__ == "__main__":
    main()
