"""What the samples say: percentiles, throughput, goodput, errors by kind, and plots in plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cli.bench.client import Sample, percentile
from cli.bench.run import Run
from cli.bench.settings import BenchSettings

PERCENTILES = (0.5, 0.9, 0.95, 0.99)
BAR = 40  # characters
TIME_LINE = 60  # columns
LEVELS = " ▁▂▃▄▅▆▇█"


def summarize(run: Run, settings: BenchSettings) -> dict[str, Any]:
    """The results as JSON-ready values: latencies in milliseconds, rates per second."""
    good = [sample for sample in run.samples if not sample.error]
    seconds = max(run.ended - run.started, 1e-9)
    several = [sample for sample in good if sample.tokens > 1]
    within = sum(meets_slo(sample, settings) for sample in good)
    prompt_tokens, tokens = sum(sample.prompt_tokens for sample in good), sum(sample.tokens for sample in good)
    return {
        "duration_s": seconds,
        "interrupted": run.interrupted,
        "completed": len(good),
        "failed": len(run.samples) - len(good),
        "errors": dict(Counter(sample.error for sample in run.samples if sample.error)),
        "input_tokens": prompt_tokens,
        "output_tokens": tokens,
        "requests_per_s": len(good) / seconds,
        "input_tokens_per_s": prompt_tokens / seconds,
        "output_tokens_per_s": tokens / seconds,
        "goodput_requests_per_s": within / seconds,
        "slo_attainment": within / max(1, len(run.samples)),
        "ttft_ms": spread([sample.ttft for sample in good]),
        "itl_ms": spread([gap for sample in good for gap in sample.gaps]),
        "tpot_ms": spread([sample.tpot for sample in several]),
        "e2e_ms": spread([sample.e2e for sample in good]),
    }


def meets_slo(sample: Sample, settings: BenchSettings) -> bool:
    """Whether a whole answer came within every objective."""
    pairs = (
        (sample.ttft, settings.ttft_slo_ms),
        (sample.tpot, settings.tpot_slo_ms),
        (sample.e2e, settings.e2e_slo_ms),
    )
    return not sample.error and all(not limit or seconds * 1e3 <= limit for seconds, limit in pairs)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and extremes in milliseconds; empty for no values."""
    if not seconds:
        return {}
    values = {"mean": sum(seconds) / len(seconds), "min": min(seconds)}
    values |= {f"p{share * 100:g}": percentile(seconds, share) for share in PERCENTILES}
    return {name: value * 1e3 for name, value in (values | {"max": max(seconds)}).items()}


def render(summary: dict[str, Any], run: Run) -> str:
    lines = [
        f"{summary['completed']} requests in {summary['duration_s']:.1f} s, {summary['failed']} failed"
        + (", interrupted: what was in flight is not counted" if summary["interrupted"] else ""),
        f"  {summary['requests_per_s']:.2f} requests/s   {summary['input_tokens_per_s']:.0f} prompt tokens/s   "
        f"{summary['output_tokens_per_s']:.0f} output tokens/s",
        f"  goodput {summary['goodput_requests_per_s']:.2f} requests/s, {summary['slo_attainment']:.1%} within the SLO",
        *(f"  {count} x {error}" for error, count in sorted(summary["errors"].items())),
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


def _table(summary: dict[str, Any]) -> list[str]:
    columns = ("mean", "min", *(f"p{share * 100:g}" for share in PERCENTILES), "max")
    rows = ["", "  ms   " + "".join(f"{column:>10}" for column in columns)]
    for name in ("ttft", "itl", "tpot", "e2e"):
        if values := summary[f"{name}_ms"]:
            rows.append(f"  {name.upper():5}" + "".join(f"{values[column]:10.2f}" for column in columns))
    return rows


def histogram(values: Sequence[float], bins: int = 12) -> list[str]:
    """Bars over equal ranges, each with the share of values up to its end."""
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


def time_line(samples: Sequence[Sample], started: float) -> list[str]:
    """Over the run, one column a slice of time: how many answers ended, and the slowest first token."""
    span = max(sample.ended for sample in samples) - started or 1e-9

    def column(at: float) -> int:
        return min(TIME_LINE - 1, max(0, int((at - started) / span * TIME_LINE)))

    ended = Counter(column(sample.ended) for sample in samples)
    slowest = [0.0] * TIME_LINE
    for sample in samples:
        at = column(sample.arrived)
        slowest[at] = max(slowest[at], sample.ttft)
    return [
        f"over {span:.1f} s",
        _row("answers that ended", [float(ended[index]) for index in range(TIME_LINE)], lambda most: f"{most:.0f}"),
        _row("slowest first token", slowest, lambda most: f"{most * 1e3:.0f} ms"),
    ]


def _row(label: str, values: Sequence[float], name: Callable[[float], str]) -> str:
    most = max(values) or 1.0
    line = "".join(LEVELS[-(-int(value / most * 1e6) * 8 // 1_000_000)] for value in values)
    return f"{label:>20} │{line}│ full: {name(most)}"
