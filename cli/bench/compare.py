"""Comparison of two runs: differences in the load, and better or worse results; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cli.bench.results import TIMES

RATES = ("requests_per_s", "output_tokens_per_s", "goodput_requests_per_s", "slo_attainment")
HIGHER_IS_BETTER = frozenset(RATES)
SAME = 0.02  # smaller relative differences count as equal
WHERE = ("url", "label", "metadata")  # options that don't change the load
COLUMN = 14


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A table for each load that both runs share; one table for two single runs, whatever their loads."""
    lines = [f"A: {_described(before)}", f"B: {_described(after)}"]
    if differing := list(_differing(before["options"], after["options"])):
        lines += ["", "the runs were asked for different things:", *(f"  {line}" for line in differing)]
    for title, one, other in _pairs(before, after):
        lines += ["", title, f"{'':26}{'A':>{COLUMN}}{'B':>{COLUMN}}{'B to A':>{COLUMN}}"]
        lines += [_row(*figure) for figure in _figures(one, other)]
    if before.get("highest_rate") and after.get("highest_rate"):
        lines += ["", _row("highest rate within", before["highest_rate"], after["highest_rate"], True)]
    return "\n".join(lines)


def _described(told: Mapping[str, Any]) -> str:
    return ", ".join(
        str(part) for part in (told["label"], told.get("model"), told.get("server"), told.get("date")) if part
    )


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() & after.keys() - set(WHERE)):
        if before[name] != after[name]:
            yield f"--{name.replace('_', '-')}: {before[name]} in A, {after[name]} in B"


def _pairs(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Pairs of steps with the same load, or the only ones. A search's steps vary, so only its results are compared."""
    ours, theirs = before["steps"], after["steps"]
    if len(ours) == len(theirs) == 1 or before.get("highest_rate") or after.get("highest_rate"):
        yield "results", before["results"], after["results"]
        return
    known = {(step["rate"], step["concurrency"]): step for step in theirs}
    for step in ours:
        load = step["rate"], step["concurrency"]
        if load in known:
            yield f"{load[0]:g} requests/s" if load[0] else f"{load[1]} in flight", step, known[load]


def _figures(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, float, float, bool]]:
    yield "failed", one["failed"], other["failed"], False
    for name in RATES:
        if one[name] is not None and other[name] is not None:
            yield name, one[name], other[name], name in HIGHER_IS_BETTER
    for name in TIMES:
        ours, theirs = one[f"{name}_ms"], other[f"{name}_ms"]
        for key in ours:
            if key in theirs and (key == "mean" or key.startswith("p")):
                yield f"{name.upper()} {key} ms", ours[key], theirs[key], False


def _row(name: str, one: float, other: float, higher_is_better: bool) -> str:
    change = "" if not one else f"{other / one - 1:+.1%}"
    cells = f"{name:<26}{one:>{COLUMN}.2f}{other:>{COLUMN}.2f}{change:>{COLUMN}}"
    return f"{cells}  {judged(one, other, higher_is_better=higher_is_better)}".rstrip()


def judged(one: float, other: float, *, higher_is_better: bool) -> str:
    """True if `other` is better; "" within `SAME`."""
    if abs(other - one) <= SAME * abs(one):
        return ""
    return "better" if (other > one) == higher_is_better else "worse"
