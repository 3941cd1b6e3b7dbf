"""A request's charge to its tenant: made before admission, settled when its answer ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from common.errors import RateLimitedError
from gateway.tenants.budgets import UNLIMITED, Budgets, Grant
from gateway.tenants.tenants import Tenant

_settling: set[asyncio.Task[Any]] = set()  # an unreferenced task may be collected
_WHAT = {
    "requests": ("requests a minute", "requests_per_minute"),
    "tokens": ("tokens a minute", "tokens_per_minute"),
    "concurrent": ("requests at a time", "max_concurrent"),
}


class Charge:
    """One answer's charge."""

    def __init__(self, budgets: Budgets, grant: Grant) -> None:
        self._budgets = budgets
        self._grant = grant
        self._open = True
        self.headers = _headers(grant)

    def settle(self, used: int | None) -> None:
        """Settle the charge with the tokens used; None: it was not admitted. Idempotent, does not wait."""
        if self._open:
            self._open = False
            task = asyncio.ensure_future(self._budgets.settle(self._grant, used=used))
            _settling.add(task)
            task.add_done_callback(_settling.discard)


async def charge(
    budgets: Budgets, tenant: Tenant, request_id: str, *, tokens: int, ttl_s: float, used: Callable[[], int] = int
) -> Charge | None:
    """Charge at most `tokens`, of which `used()` are used so far; None for a tenant without limits. Raises RateLimitedError."""
    if tenant.limits == UNLIMITED:
        return None
    grant = await budgets.take(tenant.name, tenant.limits, request_id, tokens=tokens, ttl_s=ttl_s, used=used)
    if grant.refused:
        text, field = _WHAT[grant.refused]
        raise RateLimitedError(
            f"the limit of {getattr(tenant.limits, field)} {text} of this API key is reached; try again later",
            what=grant.refused,
            retry_after_s=grant.retry_after_s,
            headers=_headers(grant),
        )
    return Charge(budgets, grant)


def _headers(grant: Grant) -> dict[str, str]:
    """OpenAI's `x-ratelimit-…` headers for the configured limits."""
    headers = {}
    for what, limit, left, full_s in (
        ("requests", grant.limits.requests_per_minute, grant.remaining_requests, grant.full_requests_s),
        ("tokens", grant.limits.tokens_per_minute, grant.remaining_tokens, grant.full_tokens_s),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{what}"] = str(limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(left)
            headers[f"x-ratelimit-reset-{what}"] = duration(full_s)
    return headers


def duration(seconds: float) -> str:
    """A duration in OpenAI's form: 20ms, 7s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
