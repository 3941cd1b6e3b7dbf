"""Requests refused before they ran: a bounded ring, beside the timelines (docs/observability.md)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.errors import OverloadedError, ServingError, UnavailableError
from gateway.tenants.tenants import Tenant

MAX_REFUSED = 256
MAX_DETAIL_CHARS = 500
MAX_MODEL_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A refused request. It has the id of its HTTP request, as no answer was started."""

    request_id: str
    trace_id: str
    asker: Tenant
    model: str
    code: str
    detail: str
    took_ms: float  # since its receipt
    received_unix: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Any]:
        """As `Timeline.summary`, with the facts that a refused request has."""
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "tenant": self.asker.name,
            "key": self.asker.key,
            "model": self.model,
            "received_unix": round(self.received_unix, 3),
            "status": "refused",
            "detail": f"{self.code}: {self.detail}",
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "completion_tokens": 0,
            "ttft_ms": None,
            "total_ms": round(self.took_ms, 3),
            "num_attempts": 0,
            "prefill_worker": "",
            "decode_worker": "",
            "placement": "",
            "goal_ms": {"ttft": None, "tpot": None},
            "missed": "error",
            "phases_ms": {},
        }


class Refusals:
    """The newest refusals, and their counts: by the server's fault or lack of room, and by the client's mistake."""

    def __init__(self, told: Callable[[Refused], None] | None = None) -> None:
        """`told` is called with each of them."""
        self._told = told
        self._recent: deque[Refused] = deque(maxlen=MAX_REFUSED)
        self.counts: Counter[str] = Counter()  # "refused", "invalid"
        self.last_for_want_of_room: Refused | None = None

    def add(self, error: ServingError, *, request_id: str, trace_id: str, asker: Tenant, model: str, at: float) -> None:
        """`at`: when the request was received, by the monotonic clock."""
        took_s = time.monotonic() - at
        refused = Refused(
            request_id=request_id,
            trace_id=trace_id,
            asker=asker,
            model=model[:MAX_MODEL_CHARS],
            code=error.code,
            detail=error.message[:MAX_DETAIL_CHARS],
            took_ms=1000 * took_s,
            received_unix=time.time() - took_s,
        )
        self._recent.append(refused)
        if self._told is not None:
            self._told(refused)
        if isinstance(error, OverloadedError | UnavailableError):
            self.counts["refused"] += 1
            self.last_for_want_of_room = refused
        else:
            self.counts["invalid"] += 1

    def newest(self) -> list[Refused]:
        """Refusals, newest first."""
        return list(reversed(self._recent))

    def find(self, request_id: str) -> Refused | None:
        return next((one for one in reversed(self._recent) if one.request_id == request_id), None)
