"""The tabs of `baton top`: rows and columns; pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.top.state import Json, State

CONTESTED = "2 have it"  # a name with two owners
KEPT = ("model", "running", "waiting", "queued_tokens", "kv_blocks", "kv_used", "kv_held", "kv_free")
LEVELS = " ▁▂▃▄▅▆▇█"
SPARKS = 16  # width of a worker's sparkline
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    key: str
    width: int
    worth: int = 1  # columns of low priority are dropped first if space is short
    is_text: bool = False
    show: Callable[[Any], str] | None = None


def number(value: Any) -> str:
    if isinstance(value, float):
        return "-" if not value else f"{value:.0f}" if value >= 1000 else f"{value:.1f}"
    return "-" if value is None else str(value)


def share(value: Any) -> str:
    return "-" if value is None else f"{value:.0%}"


def clock(unix: Any) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix)) if unix else "-"


def sparks(values: Sequence[float], columns: int) -> str:
    """The last values as bars, scaled to the highest."""
    lately = list(values)[-columns:]
    most = max(lately, default=0.0) or 1.0
    return "".join(LEVELS[min(8, -(-int(value / most * 1e6) * 8 // 1_000_000))] for value in lately).rjust(columns)


@dataclass(frozen=True, slots=True)
class Tab:
    name: str
    columns: Sequence[Column]
    rows: Callable[[State], list[Row]]
    sort: str
    descends: bool = False
    nothing: str = ""


# -- workers -------------------------------------------------------------------------------------------------------


def worker_rows(state: State) -> list[Row]:
    """Live workers, and recently lost ones."""
    rows = [worker_row(worker, state) for worker in state.section("fleet").get("workers", [])]
    known = {row["worker"] for row in rows}
    lost = [worker for worker in state.section("log").get("lost", []) if worker["id"] not in known]
    return rows + [worker_row(worker, state) | {"status": f"lost {clock(worker.get('lost_unix'))}"} for worker in lost]


def worker_row(worker: Json, state: State) -> Row:
    """One worker: KV in blocks, rates per second, times in milliseconds."""
    rate, busy = state.rates.get(worker["id"]), state.busy.get(worker["id"])
    return {
        "worker": worker["id"],
        "roles": ",".join(worker["roles"]),
        "status": CONTESTED if worker.get("is_contested") else worker["status"],
        **{name: worker[name] for name in KEPT},
        "ranks": worker.get("ranks", 1),
        "kv_share": (worker["kv_used"] + worker["kv_held"]) / worker["kv_blocks"] if worker["kv_blocks"] else None,
        "busy": min(1.0, busy.now) if busy is not None and busy.now is not None else None,
        "tokens_per_s": rate.now if rate is not None else None,
        "course": sparks(rate.samples if rate is not None else (), SPARKS),
        "prefill_tokens_per_s": worker["prefill_tokens_per_s"],
        "decode_step_ms": worker["decode_step_ms"],
        **_drafts(worker),
        **_tiers(worker),
        "link_gb_per_s": worker["link_bytes_per_s"] / 1e9,
    }


def _drafts(worker: Json) -> Row:
    """Accepted share of its drafts and tokens of a step that verified one, since its start; None without drafts."""
    drafts, drafted, accepted = (worker.get(name, 0) for name in ("drafts", "drafted_tokens", "accepted_tokens"))
    if not drafts or not drafted:
        return {"accepted": None, "draft_step": None}
    return {"accepted": accepted / drafted, "draft_step": 1 + accepted / drafts}


def _tiers(worker: Json) -> Row:
    """Used share of each tier below its pool, and prompt tokens found there since its start; None without the tier."""
    found: Row = {}
    for name in ("host", "disk"):
        tier = (worker.get("tiers") or {}).get(name)
        found[name] = tier["used_bytes"] / max(1, tier["bytes"]) if tier else None
        found[f"{name}_hits"] = tier["hit_tokens"] if tier else None
    return found


WORKERS = (
    Column("WORKER", "worker", 20, 9, is_text=True),
    Column("ROLES", "roles", 15, 7, is_text=True),
    Column("STATUS", "status", 14, 8, is_text=True),
    Column("RANKS", "ranks", 7, 2),
    Column("RUN", "running", 5, 8),
    Column("WAIT", "waiting", 6, 8),
    Column("TOK/S", "tokens_per_s", 8, 8),
    Column("LAST MINUTE", "course", SPARKS + 2, 4),
    Column("BUSY", "busy", 6, 8, show=share),
    Column("KV", "kv_share", 6, 8, show=share),
    Column("QUEUED", "queued_tokens", 8, 5),
    Column("USED", "kv_used", 7, 2),
    Column("HELD", "kv_held", 7, 3),
    Column("FREE", "kv_free", 8, 2),
    Column("HOST", "host", 6, 3, show=share),
    Column("HOST HITS", "host_hits", 11, 2),
    Column("DISK", "disk", 6, 3, show=share),
    Column("DISK HITS", "disk_hits", 11, 2),
    Column("PREFILL t/s", "prefill_tokens_per_s", 13, 4),
    Column("STEP ms", "decode_step_ms", 9, 5),
    Column("ACCEPT", "accepted", 8, 3, show=share),
    Column("TOK/DRAFT", "draft_step", 11, 3),
    Column("LINK GB/s", "link_gb_per_s", 11, 3),
    Column("MODEL", "model", 18, 1, is_text=True),
)

# -- requests ------------------------------------------------------------------------------------------------------


def request_rows(state: State) -> list[Row]:
    """All requests once: waiting, running, recently ended, or slow."""
    found: dict[str, Row] = {}
    for name in ("waiting", "running", "latest", "slowest"):
        for entry in state.section("requests").get(name, []):
            found.setdefault(entry["request_id"], _request_row(entry))
    return list(found.values())


def _request_row(entry: Json) -> Row:
    workers = [entry.get("prefill_worker"), entry.get("decode_worker")]
    kept = ("request_id", "status", "tenant", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_ms")
    phases = entry.get("phases_ms") or {}
    return {name: entry.get(name) for name in (*kept, "total_ms", "num_attempts", "gateway", "detail", "model")} | {
        "at": entry.get("received_unix"),
        "workers": " → ".join(worker for worker in workers if worker),
        "longest": max(phases, key=lambda name: phases[name] or 0.0) if phases else "",
    }


REQUESTS = (
    Column("AT", "at", 9, 7, is_text=True, show=clock),
    Column("REQUEST", "request_id", 20, 8, is_text=True),
    Column("STATUS", "status", 10, 9, is_text=True),
    Column("TTFT ms", "ttft_ms", 9, 9),
    Column("TOTAL ms", "total_ms", 10, 9),
    Column("PROMPT", "prompt_tokens", 8, 8),
    Column("CACHED", "cached_tokens", 8, 5),
    Column("TOKENS", "completion_tokens", 8, 8),
    Column("TRIES", "num_attempts", 7, 3),
    Column("LONGEST", "longest", 12, 4, is_text=True),
    Column("WORKERS", "workers", 24, 6, is_text=True),
    Column("TENANT", "tenant", 12, 5, is_text=True),
    Column("MODEL", "model", 16, 2, is_text=True),
    Column("GATEWAY", "gateway", 16, 1, is_text=True),
    Column("DETAIL", "detail", 30, 2, is_text=True),
)

# -- tenants -------------------------------------------------------------------------------------------------------


def tenant_rows(state: State) -> list[Row]:
    return [_tenant_row(one) for one in state.section("figures").get("tenants", [])]


def _tenant_row(one: Json) -> Row:
    names = ("tenant", "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "prefill_s", "decode_s")
    budgets: Mapping[str, Json] = one.get("budgets") or {}
    fullest = max((each["used"] / each["limit"] for each in budgets.values() if each.get("limit")), default=None)
    said = "  ".join(
        f"{name} {each['used']:g}/{each['limit']:g}" for name, each in budgets.items() if each.get("limit")
    )
    return {name: one.get(name) for name in names} | {
        "device_s": (one.get("prefill_s") or 0.0) + (one.get("decode_s") or 0.0),
        "good": one.get("good", 0) / one["judged"] if one.get("judged") else None,
        "fullest": fullest,
        "budgets": said,
    }


TENANTS = (
    Column("TENANT", "tenant", 18, 9, is_text=True),
    Column("REQUESTS", "requests", 10, 8),
    Column("PROMPT", "prompt_tokens", 12, 7),
    Column("CACHED", "cached_tokens", 12, 5),
    Column("GENERATED", "completion_tokens", 12, 7),
    Column("GOOD", "good", 6, 8, show=share),
    Column("DEVICE s", "device_s", 10, 8),
    Column("PREFILL s", "prefill_s", 11, 4),
    Column("DECODE s", "decode_s", 10, 4),
    Column("BUDGET", "fullest", 8, 6, show=share),
    Column("OF", "budgets", 40, 3, is_text=True),
)

# -- events --------------------------------------------------------------------------------------------------------


def event_rows(state: State) -> list[Row]:
    return [
        {name: one.get(name) for name in ("at_unix", "level", "kind", "what", "count")} | {"text": one.get("text", "")}
        for one in state.section("log").get("log", [])
    ]


EVENTS = (
    Column("AT", "at_unix", 9, 9, is_text=True, show=clock),
    Column("LEVEL", "level", 7, 5, is_text=True),
    Column("KIND", "kind", 9, 6, is_text=True),
    Column("TIMES", "count", 6, 3),
    Column("WHO", "what", 18, 8, is_text=True),
    Column("WHAT", "text", 60, 9, is_text=True),
)

TABS = (
    Tab("workers", WORKERS, worker_rows, "worker", nothing="no worker is heard"),
    Tab("requests", REQUESTS, request_rows, "at", descends=True, nothing="no request yet"),
    Tab("tenants", TENANTS, tenant_rows, "device_s", descends=True, nothing="no tenant asked for anything yet"),
    Tab("events", EVENTS, event_rows, "at_unix", descends=True, nothing="nothing happened yet"),
)
