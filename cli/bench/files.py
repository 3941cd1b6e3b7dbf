"""Result files: JSON, a page, a CSV row for each step, a JSON line for each request."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cli.bench.page import page
from cli.bench.report import options_of
from cli.bench.results import TIMES, Done, meets_slo
from cli.bench.settings import BenchSettings
from common.settings import ConfigError

FORMAT = 2  # the previous format had one step and no number


def document(
    settings: BenchSettings, url: str, model: str, done: Sequence[Done], chosen: Done, found: float | None
) -> Any:
    """A run as JSON-ready values. `chosen`: the step that represents the run; `found`: the highest rate."""
    metadata = metadata_of(settings)
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": metadata.pop("label", ""),
        "metadata": metadata,
        "client": {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()},
        "server": url,
        "model": model,
        "options": options_of(settings),
        "results": chosen.summary,
        "steps": [{"rate": one.step.rate, "concurrency": one.step.concurrency} | one.summary for one in done],
        "highest_rate": found,
    }


def metadata_of(settings: BenchSettings) -> dict[str, str]:
    """The key-value pairs of --metadata. Raises ConfigError."""
    pairs = [pair.partition("=") for pair in settings.metadata.split(",") if pair]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"--metadata {wrong[0]}: NAME=VALUE")
    return {name: value for name, _, value in pairs}


def table(told: Any) -> str:
    """The CSV of a document: a row for each step."""
    columns = ["label", "model", "rate", "concurrency", "completed", "failed", "duration_s"]
    columns += ["requests_per_s", "input_tokens_per_s", "output_tokens_per_s"]
    columns += ["goodput_requests_per_s", "slo_attainment"]
    names = [name for name in TIMES if any(step[f"{name}_ms"] for step in told["steps"])]
    times = [(name, key) for name in names for key in told["steps"][-1][f"{name}_ms"]]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*columns, *(f"{name}_{key}_ms" for name, key in times)])
    for step in told["steps"]:
        row = {"label": told["label"], "model": told["model"]} | step
        values = [row[name] for name in columns] + [step[f"{name}_ms"].get(key) for name, key in times]
        writer.writerow([round(value, 6) if isinstance(value, float) else value for value in values])
    return out.getvalue()


def lines(settings: BenchSettings, done: Sequence[Done]) -> str:
    """One JSON line a request of each step: instants in seconds since the step began, durations in milliseconds."""
    rows = []
    for index, one in enumerate(done):
        for sample in sorted(one.run.samples, key=lambda sample: sample.arrived):
            row: dict[str, Any] = {"step": index, "rate": one.step.rate, "concurrency": one.step.concurrency}
            row |= {"id": sample.answer, "sent_s": round(sample.arrived - one.run.started, 6)}
            row |= {"prompt_tokens": sample.prompt_tokens, "tokens": sample.tokens, "error": sample.error}
            if not sample.error:
                row |= {name: round(getattr(sample, name) * 1e3, 4) for name in ("ttft", "tpot", "e2e")}
                row["itl"] = [round(gap * 1e3, 4) for gap in sample.gaps]
            if settings.has_objectives:
                row["within"] = meets_slo(sample, settings)
            rows.append(json.dumps(row))
    return "".join(f"{row}\n" for row in rows)


def write(settings: BenchSettings, told: Any, done: Sequence[Done], chosen: Done) -> None:
    """Write each file of --output in the form that its ending says. Raises ConfigError for one that can't be written."""
    forms: dict[str, Callable[[], str]] = {
        ".html": lambda: page(told, done, chosen, within=settings.objectives()),
        ".csv": lambda: table(told),
        ".jsonl": lambda: lines(settings, done),
    }
    for path in settings.outputs:
        form = forms.get(path.suffix, lambda: json.dumps(told, indent=2) + "\n")
        try:
            path.write_text(form(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror}") from None


def check_writable(settings: BenchSettings) -> None:
    """Check before minutes of load that every file's folder exists. Raises ConfigError."""
    for path in settings.outputs:
        if not path.resolve().parent.is_dir():
            raise ConfigError(f"--output {path}: there is no folder {path.resolve().parent}")


def read(path: str) -> Any:
    """Read a JSON document of `--output`, in this format or the previous one. Raises ConfigError."""
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        steps = told.get("steps") or [{"rate": told["options"].get("request_rate", 0.0)} | told["results"]]
        empty = {"concurrency": 0, "rate": 0.0}
        return told | {"steps": [empty | step for step in steps], "label": told.get("label") or Path(path).name}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path}: no JSON result of `baton bench --output`") from None
