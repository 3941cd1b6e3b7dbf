"""The parts of a TTFT: the client's instants and those of the gateway's timeline, request by request.

Both processes run on one host, where their monotonic clocks are one, so the ways between them are differences of instants:

    way_in       the client writes its first byte ─▶ the gateway has read the request's head
    http         until the request is read and tokenised; and from the first token until its event is given to the server
    admission … first_frame      between these two, as the gateway's timeline says (docs/http-api.md)
    way_out      from the event given to the server ─▶ the client has read it
"""

from __future__ import annotations

import http.client
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.bench.client import Sample

PARTS = ("way_in", "http", "admission", "queue", "prefill", "first_frame", "way_out")
KEPT_TIMELINES = 512  # a gateway keeps those of its newest requests


def read_timelines(host: str, port: int) -> dict[str, dict[str, Any]]:
    """The timelines of the newest requests that ended, by the id of their answer. Raises OSError, ValueError."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", f"/debug/requests?limit={KEPT_TIMELINES}")
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"/debug/requests answered {answer.status}: {text[:200].decode(errors='replace')}")
    return {line["request_id"].rpartition("-")[0]: line for line in json.loads(text)["latest"]}


def parts_of(sample: Sample, line: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of each part of one streamed request, and of what ran at the same time as them.

    Raises ValueError if one of `PARTS` is not known.
    """
    phases = {name: float(value) for name, value in line["phases_ms"].items()}
    if line["first_sent_at"] is None:
        raise ValueError(f"{line['request_id']} sent no token")
    phases["way_in"] = 1000 * (line["received_at"] - sample.arrived)
    phases["way_out"] = 1000 * (sample.first_at - line["first_sent_at"])
    missing = [part for part in PARTS if part not in phases]
    if missing:
        raise ValueError(f"{line['request_id']} does not say {', '.join(missing)}")
    return phases


def rest_of(sample: Sample, parts: Mapping[str, float]) -> float:
    """Return the milliseconds of the sample's time to first token that no part explains."""
    return 1000 * sample.ttft - sum(parts[part] for part in PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Means over requests, in milliseconds."""

    count: int  # requests whose timelines were there
    ttft: float
    parts: dict[str, float]  # `PARTS` first; the others are means of the requests that have them
    rest: float  # what no part explains
    unexplained: float  # mean absolute rest of a request / mean TTFT

    def __str__(self) -> str:
        texts = [f"{part} {self.parts[part]:.2f}" for part in PARTS]
        return f"mean TTFT {self.ttft:.2f} ms = {', '.join(texts)}, rest {self.rest:.3f} ms ({self.unexplained:.2%})"


def explain(samples: Sequence[Sample], lines: Mapping[str, Mapping[str, Any]]) -> Breakdown:
    """Explain the samples whose timelines are in `lines`. Raises ValueError when there is no such sample."""
    known = [sample for sample in samples if sample.answer in lines]
    if not known:
        raise ValueError(f"the gateway has no timeline of these {len(samples)} requests: it keeps {KEPT_TIMELINES}")
    parts = [parts_of(sample, lines[sample.answer]) for sample in known]
    rests = [rest_of(sample, one) for sample, one in zip(known, parts, strict=True)]
    ttft = 1000 * statistics.fmean(sample.ttft for sample in known)
    return Breakdown(
        count=len(known),
        ttft=ttft,
        parts=_means(parts),
        rest=statistics.fmean(rests),
        unexplained=statistics.fmean(map(abs, rests)) / ttft,
    )


def _means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {part: [] for part in PARTS}
    for one in parts:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return {name: statistics.fmean(found) for name, found in values.items()}
