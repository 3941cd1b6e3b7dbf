"""The paths of models that pool: a body in, rows asked for, the answer in the API's form."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response

from common.errors import ServingError
from gateway.http.api import ApiPart, post
from gateway.http.application import Routes
from gateway.http.body import BodyLimits, read_fields
from gateway.http.exchange import CLIENT_LEFT, ClientLeftError, RequestScope, request_scope, unless_gone
from gateway.http.fields import ignored_header
from gateway.http.problem import answer_of
from gateway.observe.metrics import GatewayMetrics
from gateway.pooling.apis import Api, Asking
from gateway.pooling.ollama import OllamaEmbed
from gateway.pooling.scores import Classify, Predict, Rerank, Score
from gateway.pooling.service import Answering
from gateway.pooling.similarity import Similarity
from gateway.pooling.sparse import TeiSparse
from gateway.pooling.vectors import SCHEMAS, CohereEmbed, Embeddings, Pooled, TeiEmbed
from modelfiles.pooling import EMBED, TOKENS

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Path:
    """An API at a path; `dialect` is its name in metrics, `operation` in traces, `error` the form of its errors."""

    api: Api[Any]
    dialect: str
    operation: str = "embeddings"
    error: str = "Error"


PATHS: Mapping[str, Path] = {
    "/v1/embeddings": Path(Embeddings(), "openai"),
    "/pooling": Path(Pooled(), "vllm", "pooling"),
    "/score": Path(Score(), "vllm", "score"),
    "/v1/score": Path(Score(), "vllm", "score"),
    "/classify": Path(Classify(), "vllm", "classify"),
    "/v1/classify": Path(Classify(), "vllm", "classify"),
    "/rerank": Path(Rerank(shows=True), "jina", "rerank"),
    "/v1/rerank": Path(Rerank(shows=True), "jina", "rerank"),
    "/v2/rerank": Path(Rerank(shows=False), "cohere", "rerank"),
    "/v1/embed": Path(CohereEmbed(version=1), "cohere"),
    "/v2/embed": Path(CohereEmbed(version=2), "cohere"),
    "/embed": Path(TeiEmbed(EMBED), "tei"),
    "/embed_all": Path(TeiEmbed(TOKENS), "tei"),
    "/embed_sparse": Path(TeiSparse(), "tei"),
    "/similarity": Path(Similarity(), "tei", "score"),
    "/predict": Path(Predict(), "tei", "classify"),
    "/api/embed": Path(OllamaEmbed(is_single=False), "ollama", error="OllamaError"),
    "/api/embeddings": Path(OllamaEmbed(is_single=True), "ollama", error="OllamaError"),
}


class PoolingRoutes:
    """The paths of all APIs for vectors and scores."""

    def __init__(
        self, answering: Answering, metrics: GatewayMetrics, body_limits: BodyLimits, *, ignores_unknown: bool = False
    ) -> None:
        self._answering, self._metrics, self._body_limits = answering, metrics, body_limits
        self._ignores_unknown = ignores_unknown
        bodies = dict.fromkeys(path.api.body for path in PATHS.values())
        self.routes = Routes(
            posts={name: partial(self._answer, name, path) for name, path in PATHS.items()},
            api=ApiPart(
                paths={
                    name: {"post": post(path.api.body, dict(path.api.described), error=path.error)}
                    for name, path in PATHS.items()
                },
                bodies=tuple(bodies),
                schemas=SCHEMAS,
            ),
        )

    async def _answer(self, name: str, path: Path, request: Request) -> Response:
        body = await read_fields(request, self._body_limits, path.api.body, ignores_unknown=self._ignores_unknown)
        return await self.answer(name, path, request, body)

    async def answer(self, name: str, path: Path, request: Request, body: Any) -> Response:
        """Answer a body, and count it. Raises ServingError."""

        async def tell(asking: Asking) -> Any:
            return await unless_gone(request, path.api.answer(body, asking))

        try:
            told, asking = await self.counted(name, path, body, request_scope(request.scope), tell)
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        return answer_of(told, headers={**asking.headers, **ignored_header(body)})

    async def counted(
        self, name: str, path: Path, body: Any, scope: RequestScope, tell: Callable[[Asking], Awaitable[Found]]
    ) -> tuple[Found, Asking]:
        """Count a body and what `tell` says to it; return that with the asking. Raises ServingError, ClientLeftError."""
        self._metrics.asked(path.dialect, name)
        asking = Asking(self._answering, scope)
        model = str(getattr(body, "model", ""))
        try:
            found = await tell(asking)
        except ServingError as error:
            self._metrics.failed(error.code, model=model)
            raise
        except (ClientLeftError, asyncio.CancelledError):
            self._metrics.failed("client_left", model=model)
            raise
        for model, tokens in asking.used.items():
            self._metrics.tokens.add(model, prompt=tokens, generated=0, cached=0)
            self._metrics.finished(model, "stop")
        return found, asking
