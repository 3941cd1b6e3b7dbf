"""The form of every benchmark's results: a JSON list of `Result` for machines and a markdown page for people.

Both are written anew after every result, each in one step, so whoever kills a run keeps what was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Self

import msgspec

MISSING = "–"
MAX_OTHERS = 30  # rows without a target on the page; the JSON has all


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured figure. All of `value`, `target`, `floor` and `reference` are in `unit`.

    Raises ValueError for a name or unit that is empty, and for a number that is not finite or, beside `value`, not positive.
    """

    name: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    target: float | None = None  # what we want to reach; 0: it should never happen
    floor: float | None = None  # what physics allows: the least time, the highest rate
    reference: float | None = None  # what another engine reached under the same conditions

    def __post_init__(self) -> None:
        if not self.name or not self.unit:
            raise ValueError(f"a result needs a name and a unit: {self.name!r} in {self.unit!r}")
        if not math.isfinite(self.value):
            raise ValueError(f"{self.name} = {self.value}")
        for field in ("target", "floor", "reference"):
            bound = getattr(self, field)
            may_be_zero = field == "target" and self.better == "lower"
            if bound is not None and not (math.isfinite(bound) and (bound > 0 or (may_be_zero and bound == 0))):
                raise ValueError(f"{self.name}: {field} = {bound}")

    @property
    def met(self) -> bool | None:
        """True if the target is reached; None without one."""
        return None if self.target is None else self.excess(self.target) <= 0

    @property
    def target_beyond_floor(self) -> bool:
        """True if the target is beyond the roofline."""
        if self.target is None or self.floor is None:
            return False
        return self.target < self.floor if self.better == "lower" else self.target > self.floor

    @property
    def fraction_of_floor(self) -> float | None:
        """The fraction of the roofline that is reached; None without a floor."""
        if self.floor is None or self.value <= 0:
            return None
        return self.floor / self.value if self.better == "lower" else self.value / self.floor

    def excess(self, bound: float) -> float:
        """The share of `bound` by which the value is on its worse side; negative on its better side."""
        if bound == 0:
            return math.inf if self.value > 0 else 0.0
        return (self.value - bound if self.better == "lower" else bound - self.value) / bound


RESULTS = Path(__file__).with_name("results")
NOTES = "## Notes\n"


def notes_of(stem: str, folder: Path = RESULTS) -> str:
    """The notes at the end of a results page, from their heading on; "" where it has none.

    They are written by hand. A new run keeps them: read them before it writes the page.
    """
    page = folder / f"{stem}.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    _, heading, notes = text.partition(NOTES)
    return heading + notes


class ResultsPage:
    """Collects results and keeps `<folder>/<stem>.json` and `.md` up to date.

    `facts` head the page: date, device, versions, command. `notes` in markdown are its last part.
    """

    def __init__(self, folder: Path, stem: str, *, title: str, facts: Mapping[str, str], notes: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._json, self._markdown = folder / f"{stem}.json", folder / f"{stem}.md"
        self._title, self.notes = title, notes
        self._facts = dict(facts)
        self.results: list[Result] = []
        self.remarks: list[str] = []  # what was left out or failed in this run

    def add(self, *results: Result) -> Self:
        """Add results and write both files. Raises ValueError for a name that is there already."""
        known = {result.name for result in self.results}
        for result in results:
            if result.name in known:
                raise ValueError(f"two results named {result.name!r}")
            known.add(result.name)
            self.results.append(result)
        self.write()
        return self

    def state(self, name: str, fact: str) -> None:
        """Add a fact to the page's head; it is written with the next result."""
        self._facts[name] = fact

    def write(self) -> None:
        """Write both files."""
        _replace(self._json, msgspec.json.format(msgspec.json.encode(self.results), indent=1) + b"\n")
        page = markdown(
            self.results,
            title=self._title,
            facts=self._facts,
            remarks=self.remarks,
            notes=self.notes,
            file=self._json.name,
        )
        _replace(self._markdown, page.encode())


def read_results(file: Path) -> list[Result]:
    """Read what `ResultsPage` wrote. Raises msgspec.ValidationError when the file has another form."""
    return msgspec.json.decode(file.read_bytes(), type=list[Result])


def markdown(
    results: Iterable[Result],
    *,
    title: str,
    facts: Mapping[str, str],
    remarks: Iterable[str] = (),
    notes: str = "",
    file: str = "the JSON file",
) -> str:
    """The page, what a reader wants first: how many targets are met, which are missed, then tables, remarks, notes.

    Figures that should be 0 and are 0 are counted, not listed: they are in `file`.
    """
    results = list(results)
    aimed = [result for result in results if result.target is not None]
    others = [result for result in results if result.target is None]
    missed = [result for result in aimed if not result.met]
    silent = [result for result in aimed if result.target == 0 and result.value == 0]
    parts = [f"# {title}\n\n" + "".join(f"- {name}: {fact}\n" for name, fact in facts.items())]
    if aimed:
        parts.append(f"**{len(aimed) - len(missed)} of {len(aimed)} targets are met.**\n")
    if missed:
        parts.append("## Missed\n\n" + "".join(map(_miss, missed)))
    if listed := [result for result in aimed if result not in silent]:
        parts.append("## Targets\n\n" + _table(listed))
    if silent:
        parts.append("## Nothing happened that should not\n\n" + _counted(silent, file))
    if others:
        more = f"\n{len(others) - MAX_OTHERS} more are in `{file}`.\n" if len(others) > MAX_OTHERS else ""
        parts.append("## Also measured\n\n" + _table(others[:MAX_OTHERS]) + more)
    if remarks := list(remarks):
        parts.append("## Remarks\n\n" + "".join(f"- {remark}\n" for remark in remarks))
    if notes:
        parts.append(notes.strip() + "\n")
    return "\n".join(parts)


def number(value: float | None) -> str:
    """Three or more significant digits, thousands grouped; a dash for nothing."""
    if value is None:
        return MISSING
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 6)}f}"


def _counted(silent: list[Result], file: str) -> str:
    """The counted events, by the words after the case's name."""
    kinds = Counter(result.name.rpartition(": ")[2] for result in silent)
    rows = "".join(f"| {kind} | {count} |\n" for kind, count in kinds.most_common(MAX_OTHERS))
    rest = len(kinds) - min(len(kinds), MAX_OTHERS)
    tail = f"\nAnd {rest} more kinds" if rest else "\nEach"
    return f"| 0 of these, as it should be | cases |\n|---|--:|\n{rows}{tail}, case by case, in `{file}`.\n"


def _table(results: list[Result]) -> str:
    lines = [
        "| what | measured | unit | target | met | floor | of floor | reference | against reference |",
        "|---|--:|---|--:|---|--:|--:|--:|--:|",
    ]
    for result in results:
        fraction = result.fraction_of_floor
        cells = [
            result.name,
            number(result.value),
            result.unit,
            number(result.target),
            {None: MISSING, True: "met", False: "**missed**"}[result.met],
            number(result.floor),
            MISSING if fraction is None else f"{fraction:.0%}",
            number(result.reference),
            MISSING if result.reference is None else _compare(result, result.reference),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _compare(result: Result, bound: float) -> str:
    excess = result.excess(bound)
    return f"{abs(excess):.1%} {'worse' if excess > 0 else 'better'}"


def _miss(result: Result) -> str:
    assert result.target is not None
    line = (
        f"- {result.name}: {number(result.value)} {result.unit}, target {number(result.target)}: "
        f"{number(abs(result.value - result.target))} {result.unit}"
        + (f" ({result.excess(result.target):.1%}) short" if result.target else " too many")
    )
    if result.target_beyond_floor:
        line += f"; the target lies beyond the floor of {number(result.floor)} {result.unit}"
    return line + "\n"


def _replace(file: Path, content: bytes) -> None:
    temporary = file.with_suffix(file.suffix + ".new")
    temporary.write_bytes(content)
    temporary.replace(file)
