"""The console's routes: the page, its data, and an operator's orders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field, StrictBool, StrictStr
from starlette.exceptions import HTTPException

from common.errors import InvalidRequestError
from common.messages import RolesReply
from gateway.answers.catalogue import Catalogue
from gateway.console.assets import MAX_DEPTH, load_assets, load_pages
from gateway.console.control import FleetControl
from gateway.console.feed import Feed
from gateway.console.messages import ConsoleAsk
from gateway.console.parts import merged, own_part
from gateway.console.recorder import SPANS, Recorder, merged_history
from gateway.console.search import Wanted, found, ordered
from gateway.console.state import gateway_json, model_json, pooled_json, worker_json
from gateway.http.api import JSON, ApiPart, fields, get, path_parameters, post
from gateway.http.application import Routes
from gateway.http.body import BodyLimits, read_fields
from gateway.http.fields import StrictFields
from gateway.http.problem import json_response
from gateway.http.streaming import EVENTS, ByteStream
from gateway.observe.attainment import ServiceLevels
from gateway.observe.tenant_metrics import TenantMetrics
from gateway.request.refused import Refusals
from gateway.request.spec import Generations, Loads
from gateway.tenants.tenants import CONSOLE_PAGES

FRESH_S = 0.5  # a state this fresh is shared by further viewers
ORDER_LIMITS = BodyLimits(max_bytes=4096, timeout_s=5.0)

_FIGURES = ("in_flight", "waiting", "latencies", "placed", "refused", "events", "tenants")
_LOG = ("log", "lost", "planners", "decisions")
_FILES = ("text/html", "text/css", "text/javascript", "image/svg+xml")
_GETS = {
    "/": ("The console, a page.", "text/html"),
    "/console/static/{name}": ("A file of the page.", *_FILES),
    "/console/static/{folder}/{name}": ("A file of the page.", *_FILES),
    "/console/state": ("The fleet, and what all gateways do: docs/console.md.", JSON),
    "/console/events": ("The same as server-sent events, as it changes.", EVENTS),
    "/console/history": ("What all gateways measured lately: span=10m, 1h or 6h.", JSON),
    "/console/search": ("Requests of all gateways that suit, refused ones too.", JSON),
    "/console": ("The same page.", "text/html"),
    "/console/{page}": ("The same page: chat, overview, requests, fleet, …", "text/html"),
    "/console/{page}/{name}": ("The same page, about one request, one chat, …", "text/html"),
    "/console/{page}/{name}/{rest}": ("The same page, which says that there is none of this address.", "text/html"),
}
_ROLES, _DRAIN = "/admin/workers/{worker}/roles", "/admin/workers/{worker}/drain"


class RolesOrder(StrictFields):
    """The roles whose new work a worker shall take."""

    roles: Annotated[list[Annotated[StrictStr, Field(max_length=32)]], Field(min_length=1, max_length=8)]


class DrainOrder(StrictFields):
    """A drain order: `draining` false ends it; without a body it starts."""

    draining: StrictBool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleFacts:
    """Facts about this gateway that are in no heartbeat."""

    gateway_id: str
    catalogue: Catalogue
    version: str
    levels: ServiceLevels
    trace_url: str  # URL of a trace, with {trace_id} for its id
    has_admin: Callable[[], bool]
    loads: Loads | None = None


class ConsoleRoutes:
    """The page, its state, and orders to workers."""

    def __init__(
        self,
        control: FleetControl,
        generations: Generations,
        tenants: TenantMetrics,
        facts: ConsoleFacts,
        refusals: Refusals,
    ) -> None:
        self._control = control
        self._generations = generations
        self._tenants = tenants
        self._facts = facts
        self._feed = Feed(self._sections, leaving=control.leaving)
        self._refusals = refusals
        self._recorder = Recorder(generations, refusals)
        control.answer_with(self._tell)
        control.record_with(self._recorder)
        self._assets, self._pages = load_assets(), load_pages()
        self._building = asyncio.Lock()
        self._state: tuple[float, dict[str, Any]] | None = None
        self.routes = Routes(
            gets={
                "/": self.page,
                "/console/static/{name}": self.asset,
                "/console/static/{folder}/{name}": self.asset,
                "/console/state": self.state,
                "/console/events": self.events,
                "/console/history": self.history,
                "/console/search": self.search,
                "/console": self.page,
                "/console/{page}": self.page,
                "/console/{page}/{name}": self.page,
                "/console/{page}/{name}/{rest:path}": self.page,
            },
            posts={_ROLES: self.set_roles, _DRAIN: self.drain},
            api=_api(),
        )

    async def page(self, request: Request) -> Response:
        """The page, at the root and at each page's address; a browser gets it at wrong addresses, too."""
        depth, given = request.scope["raw_path"].count(b"/") - 1, request.path_params
        is_known = given.get("page", CONSOLE_PAGES[0]) in CONSOLE_PAGES and "rest" not in given
        if depth > MAX_DEPTH or not (is_known or "text/html" in request.headers.get("accept", "")):
            raise HTTPException(404)
        return self._pages[depth].response(request, status_code=200 if is_known else 404)

    async def asset(self, request: Request) -> Response:
        """A file of the page."""
        asset = self._assets.get("/".join(request.path_params.values()))
        if asset is None:
            raise HTTPException(404)
        return asset.response(request)

    async def state(self, request: Request) -> Response:
        """The fleet as this gateway hears it, and the activity of all gateways."""
        async with self._building:  # concurrent callers share the result
            if self._state is None or time.monotonic() - self._state[0] > FRESH_S:
                picture = await self._picture()
                self._state = time.monotonic(), picture
        picture = dict(self._state[1])
        del picture["requests"]
        return json_response(picture)

    async def events(self, request: Request) -> Response:
        """`state` as server-sent events: `fleet`, `figures` and `requests`, as they change (docs/console.md)."""
        return ByteStream(await self._feed.watch(), close=_nothing_to_close, headers={})

    async def history(self, request: Request) -> Response:
        """Measurements of all gateways in `span`, after `since`, as columns."""
        span = request.query_params.get("span", "1h")
        if span not in SPANS:
            raise InvalidRequestError(f"span: not one of {', '.join(SPANS)}", param="span")
        since = request.query_params.get("since", "0")
        if not (since.isdecimal() and len(since) < 12):
            raise InvalidRequestError(f"since: {since[:20]!r} is not in unix seconds", param="since")
        ask = ConsoleAsk(history=span, since=float(since))
        told = await self._everybody(ask, "history")
        picture = merged_history(told, span, time.time(), ask.since)
        return json_response(picture | {"levels": asdict(self._facts.levels)})

    async def search(self, request: Request) -> Response:
        """Summaries of requests in order, with their `gateway`."""
        wanted = Wanted.of(request.query_params)
        told = await self._everybody(ConsoleAsk(search=dict(request.query_params)), "found")
        lines = [line | {"gateway": gateway} for gateway, lines in told.items() for line in lines]
        return json_response({"requests": ordered(lines, wanted)})

    async def _everybody(self, ask: ConsoleAsk, field: str) -> dict[str, Any]:
        """Each gateway's `field`, this one's first. One of release 0.1.0 does not know it."""
        own, others = await asyncio.gather(self._tell(ask), self._control.ask(ask))
        parts = {self._facts.gateway_id: own} | others
        return {name: part[field] for name, part in parts.items() if isinstance(part, dict) and field in part}

    async def _sections(self) -> dict[str, Any]:
        picture = await self._picture()
        del picture["time_unix"]  # each event has its own
        return {
            "requests": picture.pop("requests"),
            "figures": {name: picture.pop(name) for name in _FIGURES},
            "log": {name: picture.pop(name) for name in _LOG},
            "fleet": picture,
        }

    async def _picture(self) -> dict[str, Any]:
        """The activity of all gateways, and the figures of the fleet."""
        facts, recorder = self._facts, self._recorder
        models = [model_json(model, facts.loads) for model in facts.catalogue.all()]
        models += [pooled_json(name, model) for name, model in facts.catalogue.pooled.items()]
        differences = {one.worker: one.text for one in self._generations.differences}
        asked = await asyncio.gather(self._own_part(), self._control.ask(ConsoleAsk()))
        parts = {facts.gateway_id: asked[0]} | asked[1]
        contested = self._control.contested()
        heard = [gateway_json(gateway) for gateway in self._control.gateways()]
        return {
            "gateway": facts.gateway_id,
            "version": facts.version,
            "model": models[0]["name"],
            "max_model_len": models[0]["max_model_len"],
            "models": models,
            "has_admin": facts.has_admin(),
            "not_ready": self._generations.not_ready_reason,
            "not_ready_since": recorder.chronicle.not_ready_since,
            "trace_url": facts.trace_url,
            "time_unix": round(time.time(), 3),
            "levels": asdict(facts.levels),
            "workers": [
                worker_json(worker)
                | {"is_contested": worker.worker in contested, "differs": differences.get(worker.worker, "")}
                for worker in self._control.workers()
            ],
            "gateways": [one | {"in_flight": parts.get(one["id"], {}).get("in_flight")} for one in heard],
            **merged(parts),
            "log": recorder.chronicle.as_json(),
            "lost": recorder.chronicle.lost(),
            "planners": recorder.decisions.planners(time.time()),
            "decisions": recorder.decisions.as_json(),
        }

    async def _own_part(self) -> dict[str, Any]:
        await self._tenants.refresh()
        return own_part(self._generations, self._tenants.as_json(), now=time.monotonic(), unix=time.time())

    async def _tell(self, ask: ConsoleAsk) -> Any:
        """Answer a console, another gateway's or this one's."""
        timelines = self._generations.timelines
        if ask.history in SPANS:
            return {"history": self._recorder.history.as_json(ask.history, ask.since)}
        if ask.search is not None:
            wanted = Wanted.of(ask.search)
            return {"found": found(wanted, timelines.all(), self._refusals.newest(), time.monotonic())}
        if not ask.request_id:
            return await self._own_part()
        return [line.as_json() for line in timelines.find(ask.request_id)]

    async def set_roles(self, request: Request) -> Response:
        """Set the roles of a worker: `{"roles": ["prefill", "decode"]}`."""
        worker = self._worker(request)
        order = await read_fields(request, ORDER_LIMITS, RolesOrder)
        return _answer(worker, await self._control.set_roles(worker, order.roles))

    async def drain(self, request: Request) -> Response:
        """`{"draining": true}`, also without a body: drain the worker; false: let it take work again."""
        worker = self._worker(request)
        order = await read_fields(request, ORDER_LIMITS, DrainOrder, default=b"{}")
        return _answer(worker, await self._control.drain(worker, draining=order.draining))

    def _worker(self, request: Request) -> str:
        worker: str = request.path_params["worker"]
        if worker not in {state.worker for state in self._control.workers()}:
            raise HTTPException(404, f"no worker {worker[:64]!r} is heard: GET /console/state lists them")
        return worker


async def _nothing_to_close() -> None:
    """No-op: a watcher holds nothing."""


def _answer(worker: str, reply: RolesReply) -> Response:
    if not reply.accepted:
        raise HTTPException(409, f"{worker}: {reply.reason}")
    return json_response({"worker": worker, "roles": reply.roles})


def _api() -> ApiPart:
    answer = fields({"worker": {"type": "string"}, "roles": {"type": "array", "items": {"type": "string"}}})
    orders = {path: post(body, answer) for path, body in ((_ROLES, RolesOrder), (_DRAIN, DrainOrder))}
    for path, operation in orders.items():
        operation["parameters"] = path_parameters(path)
    orders[_DRAIN]["requestBody"]["required"] = False
    gets = {path: {"get": get(path, *said)} for path, said in _GETS.items()}
    return ApiPart(
        paths=gets | {path: {"post": operation} for path, operation in orders.items()}, bodies=(RolesOrder, DrainOrder)
    )
