"""Models that pool, as lines of batches ask them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from gateway.http.body import BodyLimits
from gateway.http.exchange import RequestTrace
from gateway.tenants.tenants import Tenant

OPERATION = "embeddings"  # a line's, in traces


class PooledLines(Protocol):
    """Answers lines of some endpoints: `gateway.pooling.lines`."""

    @property
    def endpoints(self) -> tuple[str, ...]: ...

    @property
    def names(self) -> Collection[str]: ...

    @property
    def is_ready(self) -> bool: ...

    async def answer(
        self,
        endpoint: str,
        raw: bytes,
        *,
        tenant: Tenant,
        priority: int,
        request_id: str,
        trace: RequestTrace,
        limits: BodyLimits,
    ) -> Any: ...
