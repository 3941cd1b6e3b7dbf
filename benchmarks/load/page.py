"""The page of measured loads: each figure beside its target and vLLM's, and a picture of first tokens.

python -m benchmarks.load.page RUN/load.json … --out DIR      load.md, load.json and load.svg; of a load twice, the later one
python -m benchmarks.load.page RUN/load.json … --out DIR --page load-two-cards
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.load.figures import Quantiles, Row
from benchmarks.results_format import Result, ResultsPage, notes_of

UNMEASURED: Quantiles = (math.nan, math.nan, math.nan)


class Known(NamedTuple):
    """Targets of a load, and what vLLM 0.33 reached on a card of the same kind (2026-11-24)."""

    ttft_ms: tuple[float | None, float | None, float | None]
    tpot_p99_ms: float | None
    good: float | None
    per_second: float | None
    vllm_ttft_ms: Quantiles
    vllm_tpot_p99_ms: float | None = None
    vllm_good: float | None = None
    vllm_per_second: float | None = None
    tpot_p90_ms: float | None = None
    vllm_tpot_p90_ms: float | None = None


KNOWN = {
    "chat 8/s": Known((None, None, None), None, None, None, (40, 102, 190), 9.4, 0.99),
    "chat 14/s": Known((None, None, None), None, None, None, (50, 105, 194), 12.9, 1.0),
    "chat 20/s": Known((65, 190, 450), 16, 0.97, None, (69, 203, 545), 21.1, 0.93),
    "fp8 chat 28/s": Known((90, 170, 270), 16, 0.97, None, (99, 179, 287), 22, 0.95),
    "fp8 chat 36/s": Known((None, None, None), None, None, 28, (164, 326, 525), 43, None, 26.1),
    "long prompts x0.8": Known((1400, 3000, None), 70, None, 1.6, (1526, 3416, math.nan), None, None, 1.49),
    "long prompts x0.8, known": Known((100, 1300, 2000), None, None, None, (209, 1500, 2159), None, None, 1.94),
    "chat 40/s, both roles": Known((70, None, 320), 9.3, None, None, UNMEASURED),
    "chat 40/s, 1P+1D": Known((70, None, 320), 9.3, None, None, UNMEASURED),
    "long prompts x1, both roles": Known((None, None, None), None, None, None, (807, 1987, 2708), 201, 0.53),
    "long prompts x1, 1P+1D": Known((None, None, None), None, None, None, (807, 1987, 2708), 201, 0.53),
    "long prompts x1.6, both roles": Known((None, 1300, None), None, None, None, (172, 1468, 3148), 98, 0.73),
    "long prompts x1.6, 1P+1D": Known((None, 1500, None), None, None, None, (172, 1468, 3148), 98, 0.73, None, 12, 27),
}
UNKNOWN = Known((None, None, None), None, None, None, UNMEASURED)
PAGES = {  # title and reference
    "load": ("One worker under load", "vLLM 0.33 on one H200, the same loads by one client (2026-11-24)"),
    "load-two-cards": ("Two cards under load", "two vLLM 0.33 on two H200s behind a prefix-hash proxy (2026-11-22)"),
}
QUANTILES = ("p50", "p90", "p99")


def results_of(row: Row) -> list[Result]:
    """The figures of a load."""
    known, name = (
        KNOWN.get(row.load, UNKNOWN),
        row.load.replace("/s", "").replace(",", "").replace("+", "").replace(" ", "_").lower(),
    )

    def lower(what: str, value: float, target: float | None, reference: float | None) -> Result:
        reference = None if reference is None or math.isnan(reference) else reference
        return Result(name=f"{name}_{what}", value=value, unit="ms", better="lower", target=target, reference=reference)

    firsts = zip(QUANTILES, row.ttft_ms, known.ttft_ms, known.vllm_ttft_ms, strict=True)
    found = [lower(f"ttft_{which}", value, target, reference) for which, value, target, reference in firsts]
    found.append(lower("tpot_p50", row.tpot_ms[0], None, None))
    found.append(lower("tpot_p90", row.tpot_ms[1], known.tpot_p90_ms, known.vllm_tpot_p90_ms))
    found.append(lower("tpot_p99", row.tpot_ms[2], known.tpot_p99_ms, known.vllm_tpot_p99_ms))
    shares = (
        ("good", row.good, "share", known.good, known.vllm_good),
        ("per_second", row.per_second, "req/s", known.per_second, known.vllm_per_second),
    )
    return found + [
        Result(name=f"{name}_{what}", value=value, unit=unit, better="higher", target=target, reference=reference)
        for what, value, unit, target, reference in shares
    ]


LEFT, WIDTH, BAR, GAP = 170, 700, 12, 14  # pixels
LEAST_MS, MOST_MS = 10.0, 10_000.0
SHADES = ("#1f5fbf", "#6f9fe0", "#bcd3f5"), ("#8a8a8a", "#b5b5b5", "#dcdcdc")


def picture(rows: Iterable[Row]) -> str:
    """An SVG with two bars a load, Baton's and vLLM's first tokens: p50, p90 and p99 on a logarithmic scale."""
    parts, top = list[str](), 34
    for row in rows:
        bars = (("Baton", row.ttft_ms, SHADES[0]), ("vLLM 0.33", KNOWN.get(row.load, UNKNOWN).vllm_ttft_ms, SHADES[1]))
        parts.append(f'<text x="8" y="{top + BAR + 3}" font-weight="bold">{row.load}</text>')
        for at, (who, values, shades) in enumerate(bars):
            y = top + at * (BAR + 2)
            for value, shade in reversed([*zip(values, shades, strict=True)]):
                if not math.isnan(value):
                    parts.append(
                        f'<rect x="{LEFT}" y="{y}" width="{_x(value) - LEFT:.0f}" height="{BAR}" fill="{shade}"/>'
                    )
            told = " / ".join("–" if math.isnan(value) else f"{value:,.0f}" for value in values)
            longest = max((value for value in values if not math.isnan(value)), default=LEAST_MS)
            parts.append(f'<text x="{_x(longest) + 5:.0f}" y="{y + BAR - 2}">{who}: {told}</text>')
        top += 2 * BAR + 2 + GAP
    ticks = "".join(
        f'<line x1="{_x(ms):.0f}" x2="{_x(ms):.0f}" y1="24" y2="{top - 6}" stroke="#e4e4e4"/>'
        f'<text x="{_x(ms):.0f}" y="18" text-anchor="middle">{ms:,.0f} ms</text>'
        for ms in (10, 100, 1000, 10_000)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 210}" height="{top}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{ticks}{"".join(parts)}</svg>\n'
    )


def _x(ms: float) -> float:
    """The place of a time, from `LEFT` on."""
    share = math.log(min(MOST_MS, max(LEAST_MS, ms)) / LEAST_MS) / math.log(MOST_MS / LEAST_MS)
    return LEFT + WIDTH * share


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.load.page", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="load.json of runs, the later ones last")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", choices=PAGES, default="load", help="its name, which is that of the files as well")
    options = parser.parse_args(arguments)
    found = {row.load: row for run in options.runs for row in msgspec.json.decode(run.read_bytes(), type=list[Row])}
    rows = [found[load] for load in (*KNOWN, *(load for load in found if load not in KNOWN)) if load in found]
    facts = {
        row.load: f"{row.source} on {row.where}, {row.seconds:g} s of arrivals, {row.requests} requests"
        + "".join(f", {row.facts[key]}" for key in ("date", "commit", "versions") if key in row.facts)
        for row in rows
    }
    title, facts["reference"] = PAGES[options.page]
    page = ResultsPage(options.out, options.page, title=title, facts=facts, notes=notes_of(options.page))
    page.add(*(result for row in rows for result in results_of(row)))
    page.write()
    (options.out / f"{options.page}.svg").write_text(picture(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
