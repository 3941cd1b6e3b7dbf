"""Search of requests by their attributes, for the console's table; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from common.errors import InvalidRequestError
from gateway.request.refused import Refused
from gateway.request.timeline import Timeline
from gateway.tenants.tenants import Tenant

MAX_FOUND = 200
MAX_CHARS = 200
DEFAULT_FOUND = 100
ORDERS = {"newest": "received_unix", "ttft": "ttft_ms", "total": "total_ms"}
STATUSES = ("waiting", "running", "done", "error", "cancelled", "refused")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The filters; "" matches anything. `q`: in the id, the trace id, the tenant, its key, the model or a worker."""

    q: str = ""
    tenant: str = ""
    key: str = ""
    model: str = ""
    status: str = ""  # one of STATUSES
    worker: str = ""
    min_ms: float = 0.0  # minimum total
    limit: int = DEFAULT_FOUND
    order: str = "newest"  # one of ORDERS

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wanted:
        """Parse the filters. Raises InvalidRequestError, which names the field."""
        unknown = set(query) - {one.name for one in fields(cls)}
        if unknown:
            raise InvalidRequestError(f"unknown field {sorted(unknown)[0][:40]!r}", param=sorted(unknown)[0][:40])
        for name, value in query.items():
            if len(value) > MAX_CHARS:
                raise InvalidRequestError(f"{name}: longer than {MAX_CHARS} characters", param=name)
        if query.get("status") and query["status"] not in STATUSES:
            raise InvalidRequestError(f"status: not one of {', '.join(STATUSES)}", param="status")
        if query.get("order") and query["order"] not in ORDERS:
            raise InvalidRequestError(f"order: not one of {', '.join(ORDERS)}", param="order")
        texts = {name: query.get(name, "") for name in ("q", "tenant", "key", "model", "status", "worker")}
        most = int(_number(query, "limit", DEFAULT_FOUND, most=MAX_FOUND))
        order = query.get("order") or "newest"
        return cls(**texts, min_ms=_number(query, "min_ms", 0.0, most=1e9), limit=most, order=order)

    def suits(self, line: Timeline, now: float) -> bool:
        attempt = line.attempt
        workers = (attempt.claimed_by or attempt.prefill, attempt.decoder) if attempt is not None else ()
        known = (line.request_id, line.traceparent[3:35], line.model, *workers)
        ended = line.ended_at if line.ended_at is not None else now
        return (
            self._suits(line.asker, line.model, _status(line.status), known)
            and self.worker in ("", *workers)
            and (ended - line.received_at) * 1000 >= self.min_ms
        )

    def suits_refused(self, one: Refused) -> bool:
        known = (one.request_id, one.trace_id, one.model, one.detail)
        return self._suits(one.asker, one.model, "refused", known) and not self.worker and one.took_ms >= self.min_ms

    def _suits(self, asker: Tenant, model: str, status: str, known: Iterable[str]) -> bool:
        text = self.q.lower()
        return (
            self.tenant in ("", asker.name)
            and self.key in ("", asker.key)
            and self.model in ("", model)
            and self.status in ("", status)
            and (not text or any(text in one.lower() for one in (asker.name, asker.key, *known)))
        )


def _status(status: str) -> str:
    return status if status in STATUSES else "done"


def _number(query: Mapping[str, str], name: str, default: float, *, most: float) -> float:
    try:
        value = float(query[name]) if query.get(name) else default
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise InvalidRequestError(f"{name}: a number from 0 to {most:g} is needed", param=name)
    return value


def found(wanted: Wanted, lines: Iterable[Timeline], refused: Iterable[Refused], now: float) -> list[Json]:
    """Matching summaries of this gateway, sorted. `now` is of its monotonic clock."""
    by: dict[str, Callable[[Timeline], float]] = {
        "newest": lambda line: line.received_unix,
        "ttft": lambda line: line.ttft_ms or 0.0,
        "total": lambda line: (line.ended_at or now) - line.received_at,
    }
    suiting = sorted((line for line in lines if wanted.suits(line, now)), key=by[wanted.order], reverse=True)
    told = [line.summary() for line in suiting[: wanted.limit]]
    told += [one.as_json() for one in refused if wanted.suits_refused(one)][: wanted.limit]
    return ordered(told, wanted)


def ordered(told: Sequence[Json], wanted: Wanted) -> list[Json]:
    """The first `limit` summaries in order."""
    return sorted(told, key=lambda one: -(one[ORDERS[wanted.order]] or 0.0))[: wanted.limit]
