"""What `baton trace` shows, as text; pure. Its input is the answer of `/debug/requests` (docs/observability.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from common.log import printable

NAME = 12  # columns of a bar's name
TIMES = 22  # columns of a span's start and length
FEWEST_BAR = 16
LISTED = ("request_id", "status", "prompt_tokens", "completion_tokens", "ttft_ms", "total_ms", "num_attempts")


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of the waterfall; instants in milliseconds since the request was received."""

    name: str
    began: float
    ended: float
    note: str = ""
    ticks: tuple[float, ...] = ()  # single instants, instead of a bar


def waterfall(request: Mapping[str, Any], columns: int) -> list[str]:
    """The lines of one request, none longer than `columns`."""
    total = max(request["total_ms"] or 0.0, 0.001)
    cached = f", {request['cached_tokens']} of them cached" if request["cached_tokens"] else ""
    first = "no token" if request["ttft_ms"] is None else f"first token {request['ttft_ms']:.1f} ms"
    tokens = f"{request['prompt_tokens']} prompt tokens{cached}, {request['completion_tokens']} generated"
    lines = [
        f"{request['request_id']}   {request['status']}" + (f" ({request['detail']})" if request["detail"] else ""),
        f"{tokens}, {first}, {total:.1f} ms in all",
    ]
    if request["trace_id"]:
        lines.append(f"trace {request['trace_id']}")
    width = max(FEWEST_BAR, min(60, columns - NAME - TIMES - 30))
    lines.append("")
    lines += [_line(bar, total, width) for bar in _before_attempts(request)]
    for attempt in request["attempts"]:
        if attempt["because"]:
            lines.append(f"-- attempt {attempt['attempt']}, because: {attempt['because']}")
        lines += [_line(bar, total, width) for bar in _bars(attempt, total)]
    if request["frame_ms"]:
        lines.append(_line(_tokens(request), total, width))
    return [printable(line[:columns]).rstrip() for line in lines]


def table(requests: Mapping[str, Sequence[Mapping[str, Any]]], columns: int) -> list[str]:
    """The lines of the lists of requests, none longer than `columns`."""
    lines: list[str] = []
    for title in ("waiting", "running", "slowest", "latest"):
        lines += [f"{title}:", "   ".join(_column(name, name) for name in LISTED)]
        entries = requests.get(title, [])  # older gateways have no such list
        lines += ["   ".join(_column(name, entry[name]) for name in LISTED) for entry in entries]
        lines.append("")
    return [printable(line[:columns]).rstrip() for line in lines[:-1]]


def _before_attempts(request: Mapping[str, Any]) -> list[Bar]:
    attempts = request["attempts"]
    placed = attempts[0]["began_ms"] if attempts else request["total_ms"]
    return [
        Bar("http", 0.0, request["submitted_ms"], "read, parsed, tokenised"),
        Bar("admission", request["submitted_ms"], placed, f"waited {request['waited_ms']:.1f} ms for its turn"),
    ]


def _bars(attempt: Mapping[str, Any], total: float) -> list[Bar]:
    """One attempt's rows so far. A worker's spans hang on the claim, or on the token that it sent."""
    placement = attempt["placement"]
    ended = total if attempt["ended_ms"] is None else attempt["ended_ms"]
    published, claimed, first = attempt["published_ms"], attempt["claimed_ms"], attempt["first_token_ms"]
    why = ", ".join([placement["reason"], *(f"{name} {value:g}" for name, value in placement["costs"].items())])
    bars = [Bar("placement", attempt["began_ms"], ended if published is None else published, why)]
    if published is not None:
        bars.append(Bar("queue", published, ended if claimed is None else claimed, f"of {placement['prefill']}"))
    if claimed is None:
        return [*bars, *_failure(attempt, ended)]
    worker = attempt["claimed_by"]
    if first is None:
        bars.append(Bar("prefill", claimed, ended, f"{worker}: not finished"))
        return [*bars, *_failure(attempt, ended)]
    started = min(first, claimed + (attempt["worker_queue_ms"] or 0.0))
    computed = min(first, started + (attempt["prefill_ms"] or 0.0))
    bars += [Bar("wait", claimed, started, worker), Bar("prefill", started, computed, worker)]
    bars.append(Bar("first frame", computed, first, "to the gateway"))
    transfer = attempt["transfer"]
    if transfer is not None:
        bars.append(
            Bar("transfer", max(0.0, transfer["verified_ms"] - transfer["transfer_ms"]), transfer["verified_ms"])
        )
        bars[-1] = Bar(bars[-1].name, bars[-1].began, bars[-1].ended, _moved(transfer))
    since = first if transfer is None else max(first, transfer["verified_ms"])
    bars.append(Bar("decode", since, ended, f"{attempt['decoder'] or worker}: {attempt['tokens']} tokens in all"))
    return [*bars, *_failure(attempt, ended)]


def _failure(attempt: Mapping[str, Any], ended: float) -> list[Bar]:
    failed = attempt["outcome"] not in ("", "ok")
    return [Bar("given up", ended, ended, attempt["outcome"])] if failed else []


def _moved(transfer: Mapping[str, Any]) -> str:
    note = f"{transfer['blocks']} blocks, {transfer['bytes'] / 1e6:.2f} MB"
    if transfer["reused_blocks"]:
        note += f", {transfer['reused_blocks']} were there"
    if transfer["push_ms"]:
        rate = transfer["bytes"] / transfer["push_ms"] / 1e6
        note += f", pushed in {transfer['push_ms']:.2f} ms ({rate:.2g} GB/s), {transfer['late_push_ms']:.2f} not hidden"
    return note


def _tokens(request: Mapping[str, Any]) -> Bar:
    arrivals = request["frame_ms"]
    gaps = [after - before for before, after in pairwise(arrivals)]
    note = f"{len(arrivals)} frames"
    if gaps:
        note += f", gaps: median {median(gaps):.1f}, longest {max(gaps):.1f} ms"
    return Bar("tokens", arrivals[0], arrivals[-1], note, tuple(arrivals))


def _line(bar: Bar, total: float, width: int) -> str:
    def column(at: float) -> int:
        return min(width - 1, max(0, int(width * at / total)))

    cells = [" "] * width
    if bar.ticks:
        for at in bar.ticks:
            cells[column(at)] = "|"
    else:
        for index in range(column(bar.began), column(bar.ended) + 1):
            cells[index] = "█"
    took = max(0.0, bar.ended - bar.began)
    return f"{bar.name:<{NAME}}{bar.began:>10.1f}{took:>10.1f}  {''.join(cells)}  {bar.note}"


def _column(name: str, value: Any) -> str:
    text = "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
    return f"{text:<45}" if name == "request_id" else f"{text:>{max(9, len(name))}}"
