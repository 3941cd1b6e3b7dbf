"""Batches as text; pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from common.log import printable

OVER = ("completed", "failed", "expired", "cancelled")
BAR = 24  # columns
Batch = Mapping[str, Any]


def table(batches: Sequence[Batch]) -> str:
    """One line a batch."""
    if not batches:
        return "no batch yet: baton batch submit FILE"
    head = f"{'batch':<40}{'status':<13}{'done':>8}{'failed':>8}{'of':>8}  {'made':<20}endpoint"
    return "\n".join([head, *(_row(batch) for batch in batches)])


def _row(batch: Batch) -> str:
    counts = batch["request_counts"]
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(batch["created_at"]))
    numbers = f"{counts['completed']:>8}{counts['failed']:>8}{counts['total']:>8}"
    return printable(f"{batch['id']:<40}{batch['status']:<13}{numbers}  {made:<20}{batch['endpoint']}")


def progress(batch: Batch, seconds: float, done_before: int) -> str:
    """Progress of a batch; `done_before` lines were done when watching began, `seconds` ago."""
    counts = batch["request_counts"]
    done, total = counts["completed"] + counts["failed"], counts["total"]
    full = round(BAR * done / total) if total else 0
    line = f"{batch['status']}  {'█' * full}{'░' * (BAR - full)} {done}/{total}"
    if counts["failed"]:
        line += f", {counts['failed']} failed"
    if seconds > 0 and done > done_before:
        rate = (done - done_before) / seconds
        line += f", {rate:.1f} lines/s"
        if batch["status"] not in OVER:
            line += f", about {(total - done) / rate:.0f} s more"
    return line


def ended(batch: Batch) -> str:
    """Return a batch's outcome, and the next command to type."""
    counts = batch["request_counts"]
    lines = [
        f"{batch['id']} {batch['status']}: {counts['completed']} of {counts['total']} lines, {counts['failed']} failed"
    ]
    for error in ((batch.get("errors") or {}).get("data") or [])[:10]:
        where = f"line {error['line']}: " if error.get("line") else ""
        lines.append(f"  {where}{error.get('message') or error.get('code')}")
    if batch.get("output_file_id"):
        lines.append(f"  baton batch get {batch['id']} --output answers.jsonl")
    if batch.get("error_file_id"):
        lines.append(f"  baton batch errors {batch['id']}")
    return "\n".join(printable(line) for line in lines)


def is_good(batch: Batch) -> bool:
    """True if every line has an answer."""
    return bool(batch["status"] == "completed" and not batch["request_counts"]["failed"])
