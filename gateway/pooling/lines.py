"""Lines of batches for models that pool: vectors and scores, beside what dialects answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from gateway.answers.catalogue import Catalogue
from gateway.http.body import BodyLimits, checked
from gateway.http.exchange import RequestScope, RequestTrace
from gateway.http.fields import parse_body
from gateway.observe.metrics import GatewayMetrics
from gateway.pooling.apis import Asking
from gateway.pooling.routes import PATHS
from gateway.pooling.service import Answering, PoolingModels
from gateway.tenants.tenants import Tenant

ENDPOINTS = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify")


class PooledNames(Collection[str]):
    """The names that a line may have: those of models that pool, and their aliases, as they are when it is read."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._catalogue.pooled_name(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalogue.pooled_names)

    def __len__(self) -> int:
        return len(self._catalogue.pooled_names)


class PooledLines:
    """Answers lines whose endpoint is one of `endpoints`."""

    def __init__(
        self, models: PoolingModels | None, answering: Answering, metrics: GatewayMetrics, catalogue: Catalogue
    ) -> None:
        """`models`: None: no model pools, or will, and no endpoint is offered."""
        self._models, self._answering, self._metrics = models, answering, metrics
        self.endpoints = ENDPOINTS if models is not None else ()
        self.names: Collection[str] = PooledNames(catalogue)

    @property
    def is_ready(self) -> bool:
        """True if a worker that pools is ready."""
        return self._models is not None and self._models.num_ready > 0

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
    ) -> Any:
        """The whole answer as JSON. Raises ServingError."""
        api = PATHS[endpoint].api
        body = await checked(raw, lambda given: parse_body(given, api.body), limits)
        most = min(priority, tenant.max_priority, getattr(body, "priority", 0))
        asking = Asking(self._answering, RequestScope(request_id=request_id, tenant=tenant, trace=trace))
        told = await api.answer(body.model_copy(update={"priority": most}), asking)
        for model, tokens in asking.used.items():
            self._metrics.tokens.add(model, prompt=tokens, generated=0, cached=0)
        return told
