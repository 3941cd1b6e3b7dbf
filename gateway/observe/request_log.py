"""A log line for each ended request: never its contents, and only the name of its key."""

from __future__ import annotations

import logging
from typing import Any, Literal

from common.messages.arrivals import RateLimit
from gateway.request.refused import Refused
from gateway.request.timeline import Timeline
from gateway.tenants.tenants import Tenant

log = logging.getLogger("baton.requests")

Logged = Literal["off", "errors", "all"]
MAX_REFUSALS_A_SECOND = 20  # anybody may cause refusals


class RequestLog:
    """`errors`: only failed or refused ones. An error's text may quote the request, so only its code is logged."""

    def __init__(self, logged: Logged) -> None:
        self._logged = logged
        self._limit = RateLimit(MAX_REFUSALS_A_SECOND)
        self._unsaid = 0

    def ended(self, line: Timeline) -> None:
        """Log an ended choice."""
        failed = line.status == "error"
        if self._logged == "off" or (self._logged == "errors" and not failed):
            return
        attempt = line.attempt
        facts = _who(line.request_id, line.traceparent[3:35], line.asker, line.model) | {
            "outcome": line.status,
            "code": line.detail.partition(":")[0] if failed else "",
            "why": line.detail if line.status == "cancelled" else "",
            "prompt_tokens": line.prompt_tokens,
            "cached_tokens": line.cached_tokens,
            "completion_tokens": line.completion_tokens,
            "ttft_ms": None if line.ttft_ms is None else round(line.ttft_ms, 1),
            "total_ms": None if line.ended_at is None else round(1000 * (line.ended_at - line.received_at), 1),
            "placement": attempt.reason if attempt else "",
            "prefill": (attempt.claimed_by or attempt.prefill) if attempt else "",
            "decode": attempt.decoder if attempt else "",
            "attempts": line.num_attempts if line.num_attempts > 1 else None,
        }
        log.log(
            logging.WARNING if failed else logging.INFO, f"request.{'failed' if failed else 'done'}", extra=_told(facts)
        )

    def refused(self, one: Refused) -> None:
        """Log a request that was refused before it ran."""
        facts = _who(one.request_id, one.trace_id, one.asker, one.model)
        self._refuse(facts | {"outcome": "refused", "code": one.code, "total_ms": round(one.took_ms, 1)})

    def unauthorized(self, request_id: str, path: str) -> None:
        """Log a request without a key for its path."""
        self._refuse({"request_id": request_id, "outcome": "refused", "code": "invalid_api_key", "path": path[:200]})

    def _refuse(self, facts: dict[str, Any]) -> None:
        if self._logged == "off":
            return
        if not self._limit.allows():
            self._unsaid += 1
            return
        log.info("request.refused", extra=_told(facts | {"unsaid": self._unsaid or None}))
        self._unsaid = 0


def _who(request_id: str, trace_id: str, asker: Tenant, model: str) -> dict[str, Any]:
    return {"request_id": request_id, "trace_id": trace_id, "tenant": asker.name, "key": asker.key, "model": model}


def _told(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value not in (None, "")}
