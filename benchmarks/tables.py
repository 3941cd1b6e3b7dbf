"""Pages that are tables of arms: their heading, a table, and where they go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def heading(title: str, facts: Mapping[str, str], *remarks: str) -> list[str]:
    """The lines above a page's tables. Other work on the machine is one of the facts."""
    listed = [f"{name}: {value}" for name, value in facts.items()]
    return [
        f"# {title}",
        "",
        *(f"- {each}" for each in (*listed, f"load average: {os.getloadavg()[0]:.1f}", *remarks)),
        "",
    ]


def table(corner: str, columns: Iterable[str], rows: Mapping[str, Iterable[str]]) -> list[str]:
    """The lines of a table whose rows begin with their names; all other cells are figures."""
    names = list(columns)
    head = [f"| {corner} | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    return [*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def keep(out: Path | None, name: str, text: str, figures: object = None) -> None:
    """Write a page, and its figures as JSON, into a folder if there is one."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    if figures is not None:
        (out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
