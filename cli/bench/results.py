"""Results computed from samples, as JSON-ready values: percentiles, throughput, goodput, errors by kind; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cli.bench.client import Sample, percentile
from cli.bench.run import Run
from cli.bench.settings import BenchSettings
from cli.bench.steps import Step

TIMES = ("ttft", "itl", "tpot", "e2e")
SHARES = (0.5, 0.9, 0.95, 0.99)
Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """A finished step."""

    step: Step
    run: Run
    summary: Summary


def summarize(run: Run, settings: BenchSettings) -> Summary:
    """Latencies in milliseconds, rates per second. Goodput and attainment are None without an objective."""
    good = [sample for sample in run.samples if not sample.error]
    seconds = max(run.ended - run.started, 1e-9)
    prompt_tokens, tokens = sum(sample.prompt_tokens for sample in good), sum(sample.tokens for sample in good)
    return {
        "duration_s": seconds,
        "interrupted": run.interrupted,
        "settled_early": run.settled,
        "completed": len(good),
        "failed": len(run.samples) - len(good),
        "errors": dict(Counter(sample.error for sample in run.samples if sample.error)),
        "input_tokens": prompt_tokens,
        "output_tokens": tokens,
        "requests_per_s": len(good) / seconds,
        "input_tokens_per_s": prompt_tokens / seconds,
        "output_tokens_per_s": tokens / seconds,
        **_within(run, settings, seconds),
        **{f"{name}_ms": spread(values) for name, values in times_of(good).items()},
        "sent_late_ms": spread(run.late),
    }


def times_of(good: Sequence[Sample]) -> dict[str, list[float]]:
    """Values of each of `TIMES`, in seconds."""
    return {
        "ttft": [sample.ttft for sample in good],
        "itl": [gap for sample in good for gap in sample.gaps],
        "tpot": [sample.tpot for sample in good if sample.tokens > 1],
        "e2e": [sample.e2e for sample in good],
    }


def _within(run: Run, settings: BenchSettings, seconds: float) -> Summary:
    if not settings.has_objectives:
        return {"goodput_requests_per_s": None, "slo_attainment": None}
    within = sum(meets_slo(sample, settings) for sample in run.samples)
    return {"goodput_requests_per_s": within / seconds, "slo_attainment": within / max(1, len(run.samples))}


def meets_slo(sample: Sample, settings: BenchSettings) -> bool:
    """True if a complete answer met every objective."""
    pairs = (
        (sample.ttft, settings.ttft_slo_ms),
        (sample.tpot, settings.tpot_slo_ms),
        (sample.e2e, settings.e2e_slo_ms),
    )
    return not sample.error and all(not limit or seconds * 1e3 <= limit for seconds, limit in pairs)


def missed_already(run: Run, settings: BenchSettings) -> bool:
    """True if so many requests missed the objectives that the step can no longer meet them."""
    missed = sum(not meets_slo(sample, settings) for sample in run.samples)
    allowed = (1 - settings.slo_share) * settings.num_prompts
    return missed > allowed + 1e-6  # the product of shares is inexact


def names_of(values: dict[str, float]) -> list[str]:
    """Names of the percentiles in a spread: p50, p90, …"""
    return [name for name in values if name.startswith("p")]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and extremes in milliseconds; empty without values."""
    if not seconds:
        return {}
    values = {"mean": sum(seconds) / len(seconds), "min": min(seconds)}
    values |= {f"p{share * 100:g}": percentile(seconds, share) for share in SHARES}
    return {name: value * 1e3 for name, value in (values | {"max": max(seconds)}).items()}
