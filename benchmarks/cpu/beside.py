"""Figures of Baton beside another program on the same file, measured in turn: medians, and of the ratio in each round."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.results_format import Result, ResultsPage, notes_of

BATON = "baton"
UNITS = ("MB", "s")  # of cells whose name ends in them, where less is better; all others are tokens a second


def report(
    rounds: Sequence[Mapping[str, Mapping[str, float]]],
    other: str,
    reach: Mapping[str, float],
    *,
    out: Path | None,
    stem: str,
    title: str,
    facts: Mapping[str, str],
) -> None:
    """Print the figures of `rounds`, each side's cells by name, and write them to a page. `reach`: targets of ratios."""
    page = None
    if out is not None:
        stem += "-avx2" if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2" else ""
        page = ResultsPage(out, stem, title=title, facts=dict(facts), notes=notes_of(stem))
    for result in _results(rounds, other, reach):
        print(f"{result.name:44} {result.value:9.3f} {result.unit}", flush=True)
        if page is not None:
            page.add(result)


def _results(
    rounds: Sequence[Mapping[str, Mapping[str, float]]], other: str, reach: Mapping[str, float]
) -> Iterator[Result]:
    for name in rounds[0][other]:
        # Baton's cells may say more behind a name.
        each = {
            who: [next(value for cell, value in one[who].items() if cell.startswith(name)) for one in rounds]
            for who in (BATON, other)
        }
        unit = next((unit for unit in UNITS if name.endswith(f", {unit}")), "tokens/s")
        better = "lower" if unit in UNITS else "higher"
        ratio = statistics.median(a / b for a, b in zip(each[BATON], each[other], strict=True))
        yield Result(name=f"{name}: ratio", value=ratio, unit="times", better=better, target=reach.get(name))
        for who, values in each.items():
            yield Result(name=f"{name}, {who}", value=statistics.median(values), unit=unit, better=better)
