"""The figures of loads as rows: what a table prints, and what a results file keeps of every run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.load.cells import Cell, Device
from benchmarks.load.model import Outcome

FILE = "load.json"
QUANTILES = (0.5, 0.9, 0.99)
HEAD = (
    "| load | server | TTFT p50 / p90 / p99 ms | TPOT p50 / p90 / p99 ms | good | req/s | refused | preempted |\n"
    "|---|---|---|---|--:|--:|--:|--:|"
)

Quantiles = tuple[float, float, float]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One load, served once."""

    load: str
    device: Device
    system: str
    source: Literal["measured", "modelled"]
    where: str  # the card, or the page that a model's costs are of
    seconds: float
    requests: int
    ttft_ms: Quantiles
    tpot_ms: Quantiles
    good: float
    per_second: float
    refused: int = 0
    preempted: int = 0
    facts: dict[str, str] = {}

    @classmethod
    def of(
        cls,
        cell: Cell,
        outcome: Outcome,
        *,
        system: str,
        source: Literal["measured", "modelled"],
        where: str,
        seconds: float,
        facts: dict[str, str] | None = None,
    ) -> Row:
        """The row of an outcome."""
        ttft, tpot = (tuple(round(of(q), 2) for q in QUANTILES) for of in (outcome.ttft_ms, outcome.tpot_ms))
        return cls(
            load=cell.name,
            device=cell.device,
            system=system,
            source=source,
            where=where,
            seconds=seconds,
            requests=len(outcome.runs),
            ttft_ms=(ttft[0], ttft[1], ttft[2]),
            tpot_ms=(tpot[0], tpot[1], tpot[2]),
            good=round(outcome.good, 4),
            per_second=round(outcome.per_second, 3),
            refused=len(outcome.runs) - len(outcome.served),
            preempted=outcome.preemptions,
            facts=facts or {},
        )

    def __str__(self) -> str:
        ttft, tpot = (
            " / ".join(f"{value:,.{digits}f}" for value in values)
            for values, digits in ((self.ttft_ms, 0), (self.tpot_ms, 1))
        )
        return (
            f"| {self.load} | {self.system} | {ttft} | {tpot} | {self.good:.2f} | {self.per_second:.2f} "
            f"| {self.refused} | {self.preempted} |"
        )

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The identity of a row: a later run takes the place of an earlier one."""
        return self.load, self.system, self.source, self.where


def read_rows(file: Path) -> list[Row]:
    """Read the rows of a file; none where there is no file. Raises msgspec.ValidationError for another form."""
    return msgspec.json.decode(file.read_bytes(), type=list[Row]) if file.is_file() else []


def keep(row: Row, out: Path | None) -> None:
    """Add a row to a folder's file, so that whoever kills a run keeps what was measured."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    file = out / FILE
    write_rows([*(each for each in read_rows(file) if each.key != row.key), row], file)


def write_rows(rows: Iterable[Row], file: Path) -> None:
    """Write the rows in one step."""
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(list(rows)), indent=1) + b"\n")
    new.replace(file)
