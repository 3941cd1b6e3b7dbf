"""A look into an old list of vulnerabilities, where pypi.org can't be asked: `python -m services.old_advisories constraints.txt`.

The list is PyPI's package safety-db, whose last release is years old. Finding nothing in it says little, so `make audit` fails
all the same; finding something says that a pin is very old. Runs in `.audit`, where safety-db and packaging are installed.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name


def pins(constraints: str) -> dict[str, str]:
    """Version by package of a constraints file's text."""
    lines = (line.split("#")[0].split(";")[0].strip() for line in constraints.splitlines())
    exact = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name.strip()): version.strip() for name, _, version in exact}


def known(pinned: Mapping[str, str], advisories: Mapping[str, Any]) -> Iterator[str]:
    """A line for each advisory about a pinned version."""
    for name, version in pinned.items():
        for entry in advisories.get(name, ()):
            if any(SpecifierSet(spec).contains(version, prereleases=True) for spec in entry["specs"]):
                yield f"{name} {version}: {entry['cve'] or entry['id']} {' '.join(entry['advisory'].split())[:200]}"


def main(constraints: Path) -> int:
    """Print what is found; 1 when there is anything."""
    advisories = json.loads(_file().read_text(encoding="utf-8"))
    date = datetime.datetime.fromtimestamp(advisories.pop("$meta")["timestamp"], datetime.UTC).date()
    pinned = pins(constraints.read_text(encoding="utf-8"))
    found = list(known(pinned, advisories))
    head = f"safety-db of {date}, which knows nothing newer: {len(pinned)} packages looked up, {len(found)} advisories"
    print(head, *found, sep="\n")
    return 1 if found else 0


def _file() -> Path:
    """The list, without importing its package: that looks for files in the working directory."""
    spec = importlib.util.find_spec("safety_db")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("no package safety_db: pip install safety-db")
    return Path(spec.submodule_search_locations[0]) / "insecure_full.json"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
