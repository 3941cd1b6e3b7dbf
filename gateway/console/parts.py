"""The activity of gateways as JSON that travels between them; pure.

`own_part` makes one gateway's part, `merged` one picture of all. Parts of other releases may lack or add fields.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.console.state import MAX_HANDOFFS, WINDOW_S, counted, failed_handoffs, handoffs, percentile
from gateway.request.spec import Generations
from gateway.request.timeline import Timeline

LISTS = ("waiting", "running", "latest", "slowest")
MAX_LISTED = 20  # entries of a list
MAX_TENANTS = 50  # shown: those with the highest cost
MAX_LINKS = 200  # shown: those that moved most
_COUNTS = ("ended", "errors", "cancelled", "prompt_tokens", "cached_tokens", "completion_tokens")

Part = Mapping[str, Any]


def own_part(generations: Generations, tenants: list[dict[str, Any]], *, now: float, unix: float) -> dict[str, Any]:
    """This gateway's activity. `now` is of its monotonic clock, `unix` the same instant."""
    counters = generations.counters
    return activity(generations.timelines.since(now - WINDOW_S), now, unix) | {
        "in_flight": generations.in_flight,
        "waiting": {tier: {"requests": r, "tokens": t} for tier, (r, t) in generations.waiting.items()},
        "placed": counted(counters, "placed"),
        "refused": counted(counters, "refused"),
        "events": {name: count for name, count in sorted(counters.items()) if ":" not in name},
        "tenants": tenants,
        "requests": generations.timelines.as_json(MAX_LISTED),
    }


def activity(lines: Sequence[Timeline], now: float, unix: float) -> dict[str, Any]:
    """Activity within the last minute."""
    moved = handoffs(lines, now, unix)
    return {
        "handovers": moved[:MAX_HANDOFFS],
        "links": _links(moved, failed_handoffs(lines, now)),
        "samples": _samples(lines, now),
    }


def _links(moved: Iterable[Mapping[str, Any]], failed: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
    """Handoffs by (from, to), summed. `pushed_bytes` are those whose `push_ms` is known."""
    by_pair: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list, {pair: [] for pair in failed})
    for handoff in moved:
        by_pair[handoff["from"], handoff["to"]].append(handoff)
    return [
        {
            "from": source,
            "to": target,
            "handovers": len(found),
            "bytes": sum(one["bytes"] for one in found),
            "pushed_bytes": sum(one["bytes"] for one in found if one["push_ms"]),
            "push_ms": sum(one["push_ms"] for one in found if one["push_ms"] and one["bytes"]),
            "transfer_ms": percentile([one["transfer_ms"] for one in found], 0.5),
            "failures": failed.get((source, target), 0),
        }
        for (source, target), found in by_pair.items()
    ]


def _samples(lines: Iterable[Timeline], now: float) -> dict[str, Any]:
    """Requests that ended within the last minute: their number, and the times of each."""
    ended = [line for line in lines if line.ended_at is not None and now - line.ended_at <= WINDOW_S]
    return {
        "ended": len(ended),
        "errors": sum(line.status == "error" for line in ended),
        "cancelled": sum(line.status == "cancelled" for line in ended),
        "prompt_tokens": sum(line.prompt_tokens for line in ended if line.ttft_ms is not None),
        "cached_tokens": sum(line.cached_tokens for line in ended),
        "completion_tokens": sum(line.completion_tokens for line in ended),
        "ttft_ms": [round(line.ttft_ms, 3) for line in ended if line.ttft_ms is not None],
        "tpot_ms": [round(ms, 3) for line in ended if (ms := line.tpot_ms) is not None],
    }


def merged(parts: Mapping[str, Part]) -> dict[str, Any]:
    """One picture from gateway -> part; docs/console.md describes the fields."""
    all_parts = list(parts.values())
    moved = [one | {"gateway": name} for name, part in parts.items() for one in part.get("handovers", [])]
    moved.sort(key=lambda one: one["at_unix"], reverse=True)
    return {
        "in_flight": sum(part.get("in_flight", 0) for part in all_parts),
        "waiting": _added_waiting(all_parts),
        "handovers": moved[:MAX_HANDOFFS],
        "links": _merged_links(all_parts),
        "latencies": _latencies([part.get("samples", {}) for part in all_parts]),
        "placed": _added(part.get("placed", {}) for part in all_parts),
        "refused": _added(part.get("refused", {}) for part in all_parts),
        "events": _added(part.get("events", {}) for part in all_parts),
        "tenants": _merged_tenants(all_parts),
        "requests": _merged_requests(parts),
    }


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _added_waiting(parts: Iterable[Part]) -> dict[str, dict[str, int]]:
    waiting: dict[str, Counter[str]] = defaultdict(Counter)
    for part in parts:
        for tier, counts in part.get("waiting", {}).items():
            waiting[tier].update(counts)
    return {tier: dict(counts) for tier, counts in waiting.items()}


def _merged_links(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """`bytes_per_s`: null without timed pushes; `transfer_ms`: the median, weighted by handoffs."""
    by_pair: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for part in parts:
        for link in part.get("links", []):
            by_pair[link["from"], link["to"]].append(link)
    found = []
    for (source, target), links in sorted(by_pair.items()):
        push_ms = sum(link["push_ms"] for link in links)
        medians = [link["transfer_ms"] for link in links for _ in range(link["handovers"])]
        found.append(
            {
                "from": source,
                "to": target,
                "handovers": len(medians),
                "bytes": sum(link["bytes"] for link in links),
                "bytes_per_s": round(1000 * sum(link["pushed_bytes"] for link in links) / push_ms) if push_ms else None,
                "transfer_ms": percentile(medians, 0.5),
                "failures": sum(link.get("failures", 0) for link in links),
            }
        )
    return sorted(
        sorted(found, key=lambda link: -link["bytes"])[:MAX_LINKS], key=lambda link: (link["from"], link["to"])
    )


def _latencies(samples: list[Mapping[str, Any]]) -> dict[str, Any]:
    ttft = [ms for sample in samples for ms in sample.get("ttft_ms", [])]
    tpot = [ms for sample in samples for ms in sample.get("tpot_ms", [])]
    return {
        "window_s": WINDOW_S,
        **{name: sum(sample.get(name, 0) for sample in samples) for name in _COUNTS},
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p95_ms": percentile(ttft, 0.95),
        "tpot_p50_ms": percentile(tpot, 0.5),
    }


def _merged_tenants(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Tenants' usage, summed. Each gateway knows all budgets: the highest figure counts."""
    by_name: dict[str, dict[str, Any]] = {}
    for part in parts:
        for one in part.get("tenants", []):
            known = by_name.setdefault(one["tenant"], {"tenant": one["tenant"], "budgets": {}})
            for name, value in one.items():
                if isinstance(value, int | float):
                    known[name] = round(known.get(name, 0) + value, 3)
            for name, budget in one.get("budgets", {}).items():
                known["budgets"][name] = max(budget, known["budgets"].get(name, budget), key=lambda each: each["used"])
    cost = {name: one.get("prefill_s", 0) + one.get("decode_s", 0) for name, one in by_name.items()}
    return [by_name[name] for name in sorted(by_name, key=lambda name: (-cost[name], name))[:MAX_TENANTS]]


def _merged_requests(parts: Mapping[str, Part]) -> dict[str, list[dict[str, Any]]]:
    """The first entries of each list: `waiting` and `slowest` sorted by duration, the others newest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in LISTS:
        entries = [
            entry | {"gateway": gateway}
            for gateway, part in parts.items()
            for entry in part.get("requests", {}).get(name, [])
        ]
        order = _slowest_first if name == "slowest" else _oldest_first if name == "waiting" else _newest_first
        found[name] = sorted(entries, key=order)[:MAX_LISTED]
    return found


def _slowest_first(entry: Mapping[str, Any]) -> float:
    return -(entry.get("ttft_ms") or 0.0)


def _oldest_first(entry: Mapping[str, Any]) -> float:
    return float(entry.get("received_unix") or 0.0)


def _newest_first(entry: Mapping[str, Any]) -> float:
    return -_oldest_first(entry)
