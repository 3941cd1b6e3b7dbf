"""A run's results as plain text: figures, tables and plots; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cli.bench.client import Sample
from cli.bench.results import SHARES, TIMES, Done, Summary, names_of
from cli.bench.run import Run
from cli.bench.settings import BenchSettings
from cli.bench.steps import MaxSearch

BAR = 40  # characters
TIME_LINE = 60  # columns
LEVELS = " ▁▂▃▄▅▆▇█"
MAX_ERRORS = 8  # error kinds shown
LATE_MS = 50.0  # later sends are reported


def render(summary: Summary, run: Run, settings: BenchSettings) -> str:
    """Figures of one step."""
    lines = [
        f"{summary['completed']} requests in {summary['duration_s']:.1f} s, {summary['failed']} failed"
        + (", interrupted: what was in flight is not counted" if summary["interrupted"] else ""),
        f"  {summary['requests_per_s']:.2f} requests/s   {summary['input_tokens_per_s']:.0f} prompt tokens/s   "
        f"{summary['output_tokens_per_s']:.0f} output tokens/s",
        *_goodput(summary, settings),
        *_errors(summary),
        *_lateness(summary),
        *_table(summary),
    ]
    good = [sample for sample in run.samples if not sample.error]
    if good:
        lines += [
            "",
            "time to first token, ms, and the share of requests up to there",
            *histogram([s.ttft * 1e3 for s in good]),
        ]
        lines += ["", *time_line(good, run.started)]
    return "\n".join(lines)


def _goodput(summary: Summary, settings: BenchSettings) -> list[str]:
    if summary["slo_attainment"] is None:
        return ["  goodput: no objective was given (--ttft-slo-ms, --tpot-slo-ms, --e2e-slo-ms)"]
    share, goodput = summary["slo_attainment"], summary["goodput_requests_per_s"]
    return [f"  goodput {goodput:.2f} requests/s, {share:.1%} within the objectives ({settings.objectives()})"]


def _errors(summary: Summary) -> list[str]:
    kinds = sorted(summary["errors"].items(), key=lambda kind: -kind[1])
    lines = [f"  {count} x {error}" for error, count in kinds[:MAX_ERRORS]]
    rest = sum(count for _, count in kinds[MAX_ERRORS:])
    return [*lines, f"  {rest} x something else (--output FILE.jsonl has all)"] if rest else lines


def _lateness(summary: Summary) -> list[str]:
    late = summary["sent_late_ms"]
    if late.get("max", 0.0) < LATE_MS:
        return []
    return [f"  sent up to {late['max']:.0f} ms late: --max-concurrency held requests back, or this machine is slow"]


def _table(summary: Summary) -> list[str]:
    columns = ["mean", "min", *names_of(summary["e2e_ms"]), "max"]
    rows = ["", "  ms   " + "".join(f"{column:>10}" for column in columns)]
    for name in TIMES:
        if values := summary[f"{name}_ms"]:
            rows.append(f"  {name.upper():5}" + "".join(f"{values[column]:10.2f}" for column in columns))
    return rows


# -- steps ---------------------------------------------------------------------------------------------------------


def step_head() -> str:
    """The header of a sweep's table."""
    high = f"p{SHARES[-1] * 100:g}"
    return (
        f"{'load':>24}{'done':>7}{'failed':>7}{'req/s':>9}{'tok/s':>9}{'TTFT p50':>10}{high:>9}{'TPOT p50':>10}"
        f"{high:>9}{'within':>9}"
    )


def step_row(done: Done) -> str:
    """A row of a sweep's table: medians, and the highest percentile."""
    summary = done.summary
    cells = [f"{done.step!s:>24}{summary['completed']:>7}{summary['failed']:>7}"]
    cells.append(f"{summary['requests_per_s']:>9.2f}{summary['output_tokens_per_s']:>9.0f}")
    for name in ("ttft", "tpot"):
        values: dict[str, float] = summary[f"{name}_ms"]
        high = names_of(values)[-1:] or ["p50"]
        cells.append(_number(values.get("p50"), 10) + _number(values.get(high[0]), 9))
    share = summary["slo_attainment"]
    stopped = " stopped early" if summary["settled_early"] else ""
    return "".join(cells) + ("        -" if share is None else f"{share:>9.1%}") + stopped


def _number(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.1f}"


def verdict(search: MaxSearch, settings: BenchSettings, last: Summary | None = None) -> str:
    """A search's result, and the definition of "within". `last`: the last step's results."""
    rule = f"at least {settings.slo_share:.0%} of the requests: {settings.objectives()}"
    if search.misses_alone and not search.met:
        said = f"has {alone(last, settings)}" if last and last["completed"] else "fails"
        return f"even one request at a time {said}: the objective is out of reach here ({rule})"
    if not search.met:
        return f"no rate was within the objectives ({rule})"
    missed = "none missed them" if search.missed == float("inf") else f"{search.missed:.4g} missed them"
    return f"highest rate within the objectives: {search.met:.4g} requests/s; {missed} ({rule})"


def alone(summary: Summary, settings: BenchSettings) -> str:
    """Medians that have an objective; only those above it, if there are any."""
    limits = {"ttft": settings.ttft_slo_ms, "tpot": settings.tpot_slo_ms, "e2e": settings.e2e_slo_ms}
    found = {name: summary[f"{name}_ms"]["p50"] for name, limit in limits.items() if limit and summary[f"{name}_ms"]}
    above = {name: median for name, median in found.items() if median > limits[name]}
    return ", ".join(f"{name.upper()} {median:.3g} ms" for name, median in (above or found).items())


# -- plots ---------------------------------------------------------------------------------------------------------


def histogram(values: Sequence[float], bins: int = 12) -> list[str]:
    """A histogram with equal bins and cumulative shares."""
    low, high = min(values), max(values)
    width = (high - low) / bins or 1.0
    counts = Counter(min(bins - 1, int((value - low) / width)) for value in values)
    used = bins if high > low else 1
    most, below, lines = max(counts.values()), 0, []
    for index in range(used):
        below += counts[index]
        bar = "█" * round(BAR * counts[index] / most) or ("▏" if counts[index] else "")
        lines.append(f"{low + (index + 1) * width:10.1f} │{bar:<{BAR}}│ {below / len(values):6.1%}")
    return lines


def slices(samples: Sequence[Sample], started: float, count: int) -> tuple[float, list[int], list[float]]:
    """Slices of the run's time: answers that ended in each, and the slowest TTFT of requests sent in it."""
    span = max(sample.ended for sample in samples) - started or 1e-9

    def column(at: float) -> int:
        return min(count - 1, max(0, int((at - started) / span * count)))

    ended = Counter(column(sample.ended) for sample in samples)
    slowest = [0.0] * count
    for sample in samples:
        at = column(sample.arrived)
        slowest[at] = max(slowest[at], sample.ttft)
    return span, [ended[index] for index in range(count)], slowest


def time_line(samples: Sequence[Sample], started: float) -> list[str]:
    """A timeline with a column for each slice: answers that ended, and the slowest TTFT."""
    span, ended, slowest = slices(samples, started, TIME_LINE)
    return [
        f"over {span:.1f} s",
        _row("answers that ended", [float(count) for count in ended], lambda most: f"{most:.0f}"),
        _row("slowest first token", slowest, lambda most: f"{most * 1e3:.0f} ms"),
    ]


def _row(label: str, values: Sequence[float], name: Callable[[float], str]) -> str:
    most = max(values) or 1.0
    line = "".join(LEVELS[-(-int(value / most * 1e6) * 8 // 1_000_000)] for value in values)
    return f"{label:>20} │{line}│ full: {name(most)}"


def progress_line(run: Run, settings: BenchSettings, seconds: float) -> str:
    """Progress of a running step."""
    good = sorted(sample.ttft for sample in run.samples if not sample.error)
    ended, of = len(run.samples), settings.num_prompts
    full = round(20 * ended / of)
    parts = [f"{seconds:6.1f} s  {'█' * full}{'░' * (20 - full)} {ended}/{of}", f"{run.in_flight} in flight"]
    if failed := ended - len(good):
        parts.append(f"{failed} failed")
    if good:
        tokens = sum(sample.tokens for sample in run.samples)
        parts.append(f"{ended / max(seconds, 1e-9):.2f} requests/s, {tokens / max(seconds, 1e-9):.0f} tokens/s")
        parts.append(f"TTFT p50 {good[len(good) // 2] * 1e3:.0f} ms")
    return ", ".join(parts)


def options_of(settings: BenchSettings) -> dict[str, Any]:
    """Return the settings stored with a result: no keys, no files."""
    left_out = {"action", "before", "after", "url", "api_key", "data_dir"}
    return settings.model_dump(exclude=left_out) | {"slo_share": settings.slo_share}
