"""The HTTP application: its routes, and the middleware around every request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from common import VERSION
from common.errors import ServingError
from common.tracing import NoTracer, Tracer
from gateway import openapi
from gateway.admission.policy import RefusedError
from gateway.answers.catalogue import Catalogue
from gateway.answers.changes import Changes, MadeAliases, ModelFiles
from gateway.answers.start import Answers
from gateway.batches.routes import BatchRoutes
from gateway.console.control import FleetControl
from gateway.console.routes import ConsoleFacts, ConsoleRoutes
from gateway.dialects import DIALECTS
from gateway.dialects.dialect import Dialect
from gateway.dialects.kserve.dialect import of_models
from gateway.dialects.ollama.models import RUNNING
from gateway.dialects.table import DialectTable
from gateway.http.api import JSON, ApiPart, get
from gateway.http.application import Application, Crashes, Greeting, Origins, Routes, ServedPaths, WebAccess
from gateway.http.body import BodyLimits
from gateway.http.exchange import request_scope
from gateway.http.problem import Problem, json_response, problem_of
from gateway.observe.attainment import ServiceLevels
from gateway.observe.fleet_metrics import FleetMetrics, HostedMetrics
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.request_metrics import Logged, RequestLog, RequestMetrics, count_usage
from gateway.observe.spans import ServerSpans
from gateway.observe.tenant_metrics import TenantLabels, TenantMetrics
from gateway.pooling.lines import PooledLines
from gateway.pooling.routes import PATHS, PoolingRoutes
from gateway.pooling.service import Answering, PoolingModels
from gateway.pooling.tensors import PooledTensors
from gateway.request.refused import Refusals
from gateway.request.spec import Aims, Generations, Loads
from gateway.responses.service import Joined, nothing_kept
from gateway.routes.aliases import AliasRoutes
from gateway.routes.door import Door, HttpDoor, KeyCheck
from gateway.routes.keys import KeyRoutes
from gateway.routes.models import KeptModelRoutes
from gateway.routes.operator import OperatorRoutes
from gateway.routes.serving import ServingRoutes
from gateway.routes.text import TextRoutes
from gateway.tenants.budgets import Budgets, LocalBudgets
from gateway.tenants.kept import KeptKeys
from gateway.tenants.tenants import Tenants

OPENAPI_PATH = "/openapi.json"
MAX_TOLD = 6  # paths suggested in a 404

MakeBatches = Callable[[Answers, DialectTable, GatewayMetrics, PooledLines], BatchRoutes]
MakeResponses = Callable[[Answers, DialectTable, GatewayMetrics, BodyLimits], Joined]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the HTTP side."""

    tenants: Tenants = field(default_factory=Tenants)  # by default no key is needed
    max_body_bytes: int = 10 << 20
    body_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    gateway_id: str = ""
    levels: ServiceLevels = field(default_factory=ServiceLevels)
    trace_url: str = ""  # link of the console to a trace
    web: WebAccess = field(default_factory=WebAccess)
    ollama_port: int = 0  # `/` there says that Ollama runs; 0: no such port
    log_requests: Logged = "errors"
    admits_by_goals: bool = False  # refuse who has a goal that can't be met
    ignores_unknown_fields: bool = False  # otherwise unknown fields are refused


def create_app(
    *,
    generations: Generations,
    catalogue: Catalogue,
    settings: HttpSettings,
    tracer: Tracer | None = None,
    budgets: Budgets | None = None,
    control: FleetControl | None = None,
    batches: MakeBatches | None = None,
    responses: MakeResponses = nothing_kept,
    keys: KeptKeys | None = None,
    loads: Loads | None = None,
    files: ModelFiles | None = None,
    pooling: PoolingModels | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
) -> FastAPI:
    """Build the application. It owns no connection: start and stop `generations` around it.

    `catalogue` has at least one model. `budgets` are counted in this process by default. Other gateways are asked, and answered,
    through `control`; without it there is no console. `batches` makes the Batch API's routes; without it there are none.
    `responses` makes those of kept responses; by default nothing is kept. `keys` are those made at run time; without them nobody
    makes any. `loads` are the models that hosts load when they are wanted; without it all have their workers or none.
    `files` are the models that are kept on this machine.
    `pooling` are those that make vectors and scores.
    """
    operations = {name: path.operation for name, path in PATHS.items()}
    table = DialectTable(dialects, ignores_unknown=settings.ignores_unknown_fields, traced=operations)
    budgets = budgets or LocalBudgets()
    changes = Changes(aliases=MadeAliases(keys, catalogue) if keys is not None else None, files=files)
    answers = Answers(
        generations=generations,
        catalogue=catalogue,
        budgets=budgets,
        default_deadline_s=settings.request_timeout_s,
        aims=Aims(settings.levels.goal, refuses_late=settings.admits_by_goals),
        loads=loads,
        changes=changes,
    )
    labels = TenantLabels()
    metrics = GatewayMetrics(catalogue.labels, tenants=labels)
    tenant_metrics = _observe(generations, catalogue, settings, metrics, budgets, labels)
    if loads is not None:
        metrics.registry.register(HostedMetrics(catalogue.labels, loads))
    body_limits = BodyLimits(max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    elsewhere = control.find if control is not None else None
    request_log = RequestLog(settings.log_requests)
    generations.timelines.on_end(request_log.ended)
    refusals = Refusals(request_log.refused)
    spans = ServerSpans(tracer or NoTracer())
    door = Door(answers, settings.tenants, metrics, refusals, spans, told=request_log.unauthorized)
    kept = responses(answers, table, metrics, body_limits)
    answering = Answering(
        pooling,
        budgets=budgets,
        timelines=generations.timelines,
        deadline_s=settings.request_timeout_s,
        catalogue=catalogue,
        loads=loads,
    )
    ignores = settings.ignores_unknown_fields
    pooled = PoolingRoutes(answering, metrics, body_limits, ignores_unknown=ignores)
    serving = ServingRoutes(table, answers, door, metrics, body_limits, kept.memories).routes
    tensors = None
    if pooling is not None:
        tensors = PooledTensors(pooled, body_limits, lambda name: bool(catalogue.pooled_name(name)))
        shared = {path: tensors.before(serving.posts[path]) for path in of_models("/infer")}
        serving = replace(serving, posts={**serving.posts, **shared})
    routes = [
        serving,
        *kept.routes,
        TextRoutes(answers, body_limits).routes,
        OperatorRoutes(
            generations,
            metrics,
            tenant_metrics,
            version=VERSION,
            gateway_id=settings.gateway_id,
            refusals=refusals,
            elsewhere=elsewhere,
        ).routes,
    ]
    routes.append(pooled.routes)
    if batches is not None:
        routes.append(batches(answers, table, metrics, PooledLines(pooling, answering, metrics, catalogue)).routes)
    if keys is not None:
        routes.append(KeyRoutes(keys, settings.tenants).routes)
        generations.timelines.on_end(partial(count_usage, keys.usage))
    if changes.aliases is not None:
        routes.append(AliasRoutes(changes.aliases, catalogue).routes)
    if changes.files is not None:
        routes.append(KeptModelRoutes(changes.files).routes)
    if control is not None:
        console = ConsoleRoutes(control, generations, tenant_metrics, _facts(catalogue, settings, loads), refusals)
        routes.append(console.routes)
    routes.append(_document(routes, table, settings.tenants))
    layers = _layers(settings, table, door)
    app = Application(
        layers, {**serving.posts, **pooled.routes.posts}, partial(_refusal, table), title="Baton", version=VERSION
    )
    for each in routes:
        each.add_to(app)
    app.state.door, app.state.pooled_tensors = door, tensors
    return app


def _layers(settings: HttpSettings, table: DialectTable, door: Door) -> list[Middleware]:
    """The middleware, outermost first."""

    return [
        Middleware(ServedPaths),
        Middleware(HttpDoor, door=door, table=table),
        Middleware(Crashes, refuse=table.refusal),
        Middleware(
            Origins,
            access=settings.web,
            tenants=settings.tenants,
            refuse=table.refusal,
            id_headers=table.id_headers,
        ),
        *([Middleware(Greeting, port=settings.ollama_port, text=RUNNING)] if settings.ollama_port else []),
        Middleware(KeyCheck, door=door, table=table),
    ]


def _observe(
    generations: Generations,
    catalogue: Catalogue,
    settings: HttpSettings,
    metrics: GatewayMetrics,
    budgets: Budgets,
    labels: TenantLabels,
) -> TenantMetrics:
    """Have ended requests counted by request, tenant and worker."""
    models, registry, tenants = catalogue.labels, metrics.registry, settings.tenants
    tenant_metrics = TenantMetrics(
        models,
        registry,
        workers=generations.fleet,
        budgets=budgets,
        limits=lambda: tenants.limits,  # their file may be reloaded
        labels=labels,
    )
    generations.timelines.on_end(RequestMetrics(models, registry).observe)
    generations.timelines.on_end(tenant_metrics.observe)
    FleetMetrics(generations.fleet, lambda: generations.differences).register(registry)
    return tenant_metrics


def _facts(catalogue: Catalogue, settings: HttpSettings, loads: Loads | None) -> ConsoleFacts:
    tenants = settings.tenants
    return ConsoleFacts(
        gateway_id=settings.gateway_id,
        catalogue=catalogue,
        version=VERSION,
        levels=settings.levels,
        trace_url=settings.trace_url,
        has_admin=lambda: tenants.keys.has_admin,  # keys may be reloaded
        loads=loads,
    )


def _document(routes: Sequence[Routes], table: DialectTable, tenants: Tenants) -> Routes:
    """The route of the OpenAPI document, which describes all `routes` and itself."""
    own = ApiPart(paths={OPENAPI_PATH: {"get": get(OPENAPI_PATH, "This document.", JSON)}})
    parts = [own, *(each.api for each in routes)]

    async def document(request: Request) -> Response:
        return json_response(
            openapi.document(
                parts,
                version=VERSION,
                dialects=table,
                needs_key=not tenants.open_to_all,
                needs_admin=tenants.needs_admin,
            )
        )

    return Routes(gets={OPENAPI_PATH: document}, api=own)


async def _refusal(table: DialectTable, request: Request, error: Exception) -> Response:
    """An error in the form of the request's dialect."""
    if isinstance(error, RefusedError) and error.waited:
        request_scope(request.scope).waited = True
    if isinstance(error, ServingError):
        return table.refusal(request.scope, problem_of(error))
    assert isinstance(error, HTTPException)
    return table.refusal(request.scope, _problem_of_http(table, request, error))


def _problem_of_http(table: DialectTable, request: Request, error: HTTPException) -> Problem:
    some = [path for path in table.entries if "{" not in path][:MAX_TOLD]
    served = f"POST {', '.join(some)} answer, GET {OPENAPI_PATH} tells of all others"
    path = request.url.path
    known = {404: f"no route {path[:200]}: {served}", 405: f"{request.method} is not allowed on {path[:200]}"}
    is_plain = error.detail == HTTPStatus(error.status_code).phrase  # raised by the router, or without a text
    message = known.get(error.status_code, error.detail) if is_plain else error.detail
    return Problem(status=error.status_code, message=str(message), headers=error.headers or {})
