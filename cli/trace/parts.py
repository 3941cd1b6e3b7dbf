"""A request's time split into parts, each with start and end; pure.

Its input is an entry of `/debug/requests/{id}` (docs/observability.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

Entry = Mapping[str, Any]
SHORTEST_WAIT_MS = 0.001  # instants are rounded


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of the waterfall; instants in milliseconds since the request was received."""

    name: str
    began: float
    ended: float
    note: str = ""
    ticks: tuple[float, ...] = ()  # single instants, instead of a bar
    aside: bool = False  # runs concurrently with other rows, so it adds no time

    @property
    def took(self) -> float:
        return max(0.0, self.ended - self.began)


@dataclass(frozen=True, slots=True)
class Part:
    """One attempt, or the time before the first."""

    title: str
    bars: Sequence[Bar]


def parts_of(request: Entry) -> list[Part]:
    """All rows, by attempt. Rows that are not `aside` are contiguous.

    Attempts are numbered as they are listed: the gateway also spends a number each time that it finds no worker.
    """
    total = max(request["total_ms"] or 0.0, 0.001)
    parts = [Part("", _before_attempts(request))]
    attempts = request["attempts"]
    for number, attempt in enumerate(attempts, 1):
        title = f"-- attempt {number}, because: {attempt['because']}" if attempt["because"] else ""
        until = attempts[number]["began_ms"] if number < len(attempts) else total
        bars = [*_bars(attempt, request["frame_ms"], total), *_wait(attempt, until)]
        parts.append(Part(title, bars))
    if request["frame_ms"]:
        parts.append(Part("", [_tokens(request)]))
    return parts


def longest(bars: Sequence[Bar], until: float | None = None) -> Bar | None:
    """The longest part that is not `aside`; with `until` among those that ended by then."""
    own = [bar for bar in bars if not bar.aside and not bar.ticks and (until is None or bar.ended <= until + 1e-6)]
    return max(own, key=lambda bar: bar.took, default=None)


def _before_attempts(request: Entry) -> list[Bar]:
    attempts = request["attempts"]
    placed = attempts[0]["began_ms"] if attempts else request["total_ms"]
    ahead = f", {request['ahead']} ahead" if request.get("ahead") else ""
    return [
        Bar("http", 0.0, request["submitted_ms"], "read, parsed, tokenised"),
        Bar("admission", request["submitted_ms"], placed, f"waited {request['waited_ms']:.1f} ms for its turn{ahead}"),
    ]


def _bars(attempt: Entry, frames: Sequence[float], total: float) -> list[Bar]:
    """The rows of one attempt so far. A worker's spans hang off the claim, or off the token that it sent."""
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
    return [*bars, *_after_the_first(attempt, frames, first, ended), *_failure(attempt, ended)]


def _after_the_first(attempt: Entry, frames: Sequence[float], first: float, ended: float) -> list[Bar]:
    """Return the part of the handoff after the first token, the wait for the second token, and the rest."""
    bars, since, transfer = list[Bar](), first, attempt["transfer"]
    if transfer is not None:
        verified = transfer["verified_ms"]
        bars.append(
            Bar("transfer", max(0.0, verified - transfer["transfer_ms"]), verified, _moved(transfer), aside=True)
        )
        since = max(first, verified)
        bars.append(Bar("handover", first, since, "after the first token"))
    worker = attempt["decoder"] or attempt["claimed_by"]
    second = next((at for at in frames if since < at <= ended and at > first), None)
    if second is not None:
        bars.append(Bar("decode wait", since, second, "until the second token"))
        since = second
    return [*bars, Bar("decode", since, ended, f"{worker}: {attempt['tokens']} tokens in all")]


def _failure(attempt: Entry, ended: float) -> list[Bar]:
    failed = attempt["outcome"] not in ("", "ok")
    return [Bar("given up", ended, ended, attempt["outcome"])] if failed else []


def _wait(attempt: Entry, until: float) -> list[Bar]:
    """The time from an abandoned attempt to the next one, or to the request's end."""
    if attempt["outcome"] in ("", "ok") or until - attempt["ended_ms"] < SHORTEST_WAIT_MS:
        return []
    return [Bar("no worker", attempt["ended_ms"], until, "until one could take it")]


def _moved(transfer: Entry) -> str:
    note = f"{transfer['blocks']} blocks, {transfer['bytes'] / 1e6:.2f} MB"
    if transfer["reused_blocks"]:
        note += f", {transfer['reused_blocks']} were there"
    if transfer["push_ms"]:
        rate = transfer["bytes"] / transfer["push_ms"] / 1e6
        note += f", pushed in {transfer['push_ms']:.2f} ms ({rate:.2g} GB/s), {transfer['late_push_ms']:.2f} not hidden"
    return note


def _tokens(request: Entry) -> Bar:
    arrivals = request["frame_ms"]
    gaps = [after - before for before, after in pairwise(arrivals)]
    note = f"{len(arrivals)} frames"
    if gaps:
        note += f", gaps: median {median(gaps):.1f}, longest {max(gaps):.1f} ms"
    return Bar("tokens", arrivals[0], arrivals[-1], note, tuple(arrivals), aside=True)
