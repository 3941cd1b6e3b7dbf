"""Answers of models that pool: check, charge, tokenise, split over workers, join. The same for all APIs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec import UNSET

from common.bus import Bus
from common.errors import DeadlineExceededError, InvalidRequestError, ServingError, UnavailableError
from common.messages import Pool, Pooled, WorkerState
from common.peers import Peers
from common.tracing import Tracer
from common.words import Role
from gateway.answers.answer import charge
from gateway.answers.catalogue import Catalogue
from gateway.http.exchange import RequestScope
from gateway.http.problem import ForbiddenError, ModelNotFoundError
from gateway.placement.agreement import Agreement, Own
from gateway.pooling.fleet import PoolingFleet, Turn, described, ended_well, pieces
from gateway.pooling.texts import Fitting, PooledText, PooledTexts, TextTokenizer
from gateway.request.spec import NOT_ALLOWED, Loads
from gateway.request.timeline import Timeline, Timelines
from gateway.tenants.budgets import Budgets
from gateway.tenants.tenants import Tenant
from modelfiles.pooling import CLASSIFY, CLASSIFY_TOKENS, EACH, EMBED, LEXICAL, Pooling

FLOAT_BYTES = 4
GIVEN_UP = "nobody waits for it any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A question to a model, in neutral terms."""

    model: str
    inputs: Sequence[PooledText] = ()
    work: str = EMBED
    name: str = "input"  # the body's field with the inputs
    dimensions: int = 0
    is_raw: bool = False
    fitting: Fitting
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The answer: float32 rows of each input."""

    values: list[bytes]  # each input's rows one behind the other
    width: int
    tokens: list[int]  # counts, by input
    model: str  # its own name
    headers: Mapping[str, str]  # the tenant's remaining budget

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.values))


class Fleet(Protocol):
    """The workers of a model: `PoolingFleet`, or those of one process."""

    @property
    def longest(self) -> int | None: ...

    @property
    def num_ready(self) -> int: ...

    @property
    def max_answer_bytes(self) -> int: ...

    def turn_away(self, tokens: int) -> None: ...

    async def ask(self, message: Pool, turn: Turn) -> Pooled: ...


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A served model that pools."""

    name: str
    tokenizer: TextTokenizer
    fleet: Fleet

    @property
    def pooling(self) -> Pooling:
        return self.tokenizer.pooling


class PoolingModels:
    """The models that pool, by name."""

    def __init__(
        self,
        bus: Bus,
        peers: Peers,
        tokenizers: Mapping[str, TextTokenizer],
        known: Mapping[str, Own],
        *,
        gateway_id: str,
        tracer: Tracer | None = None,
    ) -> None:
        self.agreement = Agreement(peers, known)
        self._new_fleet = partial(PoolingFleet, bus, peers, gateway_id=gateway_id, tracer=tracer)
        self._fleets: dict[str, PoolingFleet] = {}  # also of models that went: they listen to peers for ever
        self._called = {name: own.called or name for name, own in known.items()}
        self.models = {name: self._model(name, tokenizer) for name, tokenizer in tokenizers.items()}

    def _model(self, name: str, tokenizer: TextTokenizer) -> PooledModel:
        if name not in self._fleets:
            self._fleets[name] = self._new_fleet(partial(self._ready, name))
        return PooledModel(name, tokenizer, self._fleets[name])

    def add(self, name: str, tokenizer: TextTokenizer, own: Own) -> None:
        """Serve a further model."""
        self._called[name] = own.called or name
        self.agreement.add(name, own)
        self.models[name] = self._model(name, tokenizer)

    def drop(self, name: str) -> None:
        """Serve a model no longer, if it is here."""
        if self.models.pop(name, None) is not None:
            self.agreement.drop(name)

    def is_ready(self, name: str) -> bool:
        """True if a worker of the model takes work."""
        return name in self.models and bool(self._ready(name))

    def _ready(self, name: str) -> list[WorkerState]:
        called = self._called[name]
        return [state for state in self.agreement.ready(Role.POOL) if state.model == called]

    @property
    def num_ready(self) -> int:
        """Ready workers of all models."""
        return len(self.agreement.ready(Role.POOL)) if self.models else 0

    def num_ready_of(self, name: str) -> int:
        """Ready workers of one model; "": of all."""
        return len(self._ready(name)) if name else self.num_ready

    def find(self, name: str) -> PooledModel | None:
        """A model by its name; "" is the only one."""
        if not name and len(self.models) == 1:
            return next(iter(self.models.values()))
        return self.models.get(name)


class Models(Protocol):
    """The models that pool: `PoolingModels`, or one alone."""

    @property
    def models(self) -> Mapping[str, PooledModel]: ...

    def find(self, name: str) -> PooledModel | None: ...


class Answering:
    """Answers wishes, with budgets, deadlines and timelines as generating has them."""

    def __init__(
        self,
        models: Models | None,
        *,
        budgets: Budgets,
        timelines: Timelines,
        deadline_s: float,
        catalogue: Catalogue | None = None,
        loads: Loads | None = None,
    ) -> None:
        """`models`: None: there are none. `catalogue`: knows aliases and the models that generate. `loads`: see `create_app`."""
        self._models, self._budgets, self._timelines = models, budgets, timelines
        self._deadline_s, self._catalogue, self._loads = deadline_s, catalogue, loads

    def find(self, name: str, work: str = "") -> PooledModel:
        """A model that does such work, or any. Raises ModelNotFoundError, InvalidRequestError."""
        catalogue = self._catalogue
        meant = name if catalogue is None else catalogue.pooled_name(name) or name
        model = None if self._models is None else self._models.find(meant) or self._only(name, work)
        if model is None:
            raise self._missing(name)
        if work and work not in model.pooling.works:
            raise InvalidRequestError(_elsewhere(model, work), param="model")
        return model

    def _missing(self, name: str) -> ServingError:
        pools = ", ".join(map(repr, self._models.models)) if self._models is not None else ""
        if self._catalogue is not None and name in self._catalogue:
            remedy = f"{pools} can" if pools else "serve a model of embeddings beside it"
            said = f"the model {name!r} generates text and does not support embeddings or scores: {remedy}"
            return InvalidRequestError(said, param="model")
        if self._catalogue is not None and self._catalogue.is_coming(name):
            return UnavailableError(f"the model {name!r} may be here in a moment: ask again")
        said = f"the model {name!r} does not exist" if name or not pools else "several models are served: name one"
        return ModelNotFoundError(
            f"{said}; for vectors and scores this gateway serves {pools or 'none'}",
            param="model",
        )

    def _only(self, name: str, work: str) -> PooledModel | None:
        """The only model that does such work, for a request that names none."""
        does = [one for one in self._models.models.values() if work in one.pooling.works] if self._models else []
        return does[0] if len(does) == 1 and not name and work else None

    async def answer(self, wish: Wish, scope: RequestScope, *, index: int = 0) -> Rows:
        """The rows of all inputs. `index`: how many questions of this request came before.

        Raises ModelNotFoundError, InvalidRequestError, ContextLengthError; OverloadedError and RateLimitedError, before anything
        is computed; UnavailableError, DeadlineExceededError, and StepFailedError if a worker's passes fail.
        """
        model = self.find(wish.model, wish.work)
        _check_dimensions(wish.dimensions, model.pooling)
        until = time.monotonic() + self._deadline_s
        async with self._loaded(model.name, scope.tenant, until):
            return await self._answered(model, wish, scope, until, index=index)

    @asynccontextmanager
    async def _loaded(self, model: str, tenant: Tenant, until: float) -> AsyncIterator[None]:
        """Have a model loaded that hosts offer, and kept until its answer is there. Raises ServingError."""
        loads = self._loads
        if loads is None or loads.find(model) is None:
            yield
            return
        if loads.must_load(model) and not tenant.may_load(model):
            raise ForbiddenError(NOT_ALLOWED.format(model=model), param="model")
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await loads.load(model)
        except TimeoutError:
            raise DeadlineExceededError(f"the deadline passed before model {model!r} was loaded") from None
        with loads.using(model):
            yield

    async def _answered(self, model: PooledModel, wish: Wish, scope: RequestScope, until: float, *, index: int) -> Rows:
        """The rows, by the workers that are there."""
        pooling, longest = model.pooling, model.fleet.longest
        if longest is None:
            raise UnavailableError(f"no worker of model {model.name!r} is ready")
        texts = await model.tokenizer.texts(wish.inputs, wish.fitting, longest=longest, name=wish.name)
        if wish.work in EACH:
            _check_rows(texts, model.fleet.max_answer_bytes // (FLOAT_BYTES * pooling.width_of(wish.work)), wish.name)
        model.fleet.turn_away(texts.tokens)
        name = f"{scope.request_id}-{index}" if index else scope.request_id
        charged = await charge(self._budgets, scope.tenant, name, tokens=texts.tokens, ttl_s=self._deadline_s)
        line = Timeline(
            request_id=name,
            received_at=scope.received_at,
            submitted_at=time.monotonic(),
            prompt_tokens=texts.tokens,
            traceparent=scope.trace.context,
            asker=scope.tenant,
            model=model.name,
        )
        priority = min(wish.priority, scope.tenant.max_priority)
        turn = Turn(tenant=scope.tenant, until=until, priority=priority, line=line)
        self._timelines.start(line)
        used, error, cancelled = None, None, ""
        try:
            values, width = await _computed(model, wish, texts, turn, scope)
            used = texts.tokens
            ended_well(line)
        except asyncio.CancelledError as left:
            cancelled = str(left.args[0]) if left.args else GIVEN_UP
            raise
        except BaseException as failure:
            error = failure
            raise
        finally:
            if charged is not None:
                charged.settle(used)
            self._timelines.end(line, error=error, cancelled=cancelled)
            scope.trace.attributes |= described(line, scope.trace)
        headers = charged.headers if charged is not None else {}
        return Rows(
            values=values, width=width, tokens=[one.count for one in texts.inputs], model=model.name, headers=headers
        )


async def _computed(
    model: PooledModel, wish: Wish, texts: PooledTexts, turn: Turn, scope: RequestScope
) -> tuple[list[bytes], int]:
    """Each input's rows, and their width: pieces are asked for at once. Raises as `Fleet.ask`, the first error alone."""
    parts = pieces(
        [one.count for one in texts.inputs],
        workers=model.fleet.num_ready,
        row_bytes=FLOAT_BYTES * (wish.dimensions or model.pooling.width_of(wish.work)),
        rows_a_token=wish.work in EACH,
    )
    pairs = any(one.second for one in texts.inputs)
    asked = [
        Pool(
            request_id=scope.request_id,
            remaining_ms=0,
            inputs=[one.packed for one in texts.inputs[part]],
            work=wish.work,
            seconds=[one.second for one in texts.inputs[part]] if pairs else [],
            skipped=texts.skipped,
            dimensions=wish.dimensions,
            adapter=wish.fitting.adapter,
            salt=scope.tenant.salt(""),
            is_raw=wish.is_raw,
            traceparent=scope.trace.context or UNSET,
        )
        for part in parts
    ]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(model.fleet.ask(one, turn)) for one in asked]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    values = list[bytes]()
    for task, part in zip(tasks, parts, strict=True):
        reply = task.result()
        values += _rows(reply.values, reply.width, reply.rows or [1] * (part.stop - part.start))
    if len(values) != len(texts.inputs):
        raise UnavailableError("a worker answered with other rows than were asked for")
    return values, tasks[0].result().width


def _rows(values: bytes, width: int, rows: Sequence[int]) -> list[bytes]:
    found, at = list[bytes](), 0
    for count in rows:
        end = at + FLOAT_BYTES * width * count
        found.append(values[at:end])
        at = end
    if at != len(values):
        raise UnavailableError("a worker's rows are not of the width that it says")
    return found


def _check_rows(texts: PooledTexts, most: int, name: str) -> None:
    """Raises InvalidRequestError if an input's vectors are more than a worker's answer carries."""
    for at, one in enumerate(texts.inputs):
        if one.count > most:
            raise InvalidRequestError(
                f"{name} {at} has {one.count} tokens, and vectors of {most} are sent at most: split it", param=name
            )


def _check_dimensions(dimensions: int, pooling: Pooling) -> None:
    """Raises InvalidRequestError."""
    if dimensions > pooling.size:
        raise InvalidRequestError(
            f"dimensions: this model's vectors have {pooling.size}, not {dimensions}", param="dimensions"
        )
    if dimensions and pooling.sizes and dimensions not in pooling.sizes:
        known = ", ".join(map(str, pooling.sizes))
        raise InvalidRequestError(
            f"dimensions: this model was trained for {known}, not for {dimensions}", param="dimensions"
        )


def _elsewhere(model: PooledModel, work: str) -> str:
    makes, lacks, where = "vectors", "scores", "/v1/embeddings"
    if work == LEXICAL:
        lacks = "weights of words"
    if not model.pooling.modes:
        makes, lacks, where = "vectors of tokens", "others", "/pooling, /embed_all, /score or /rerank"
    if model.pooling.scoring is not None:
        makes, lacks, where = "scores", "vectors", "/rerank, /score or /classify"
        if work in (CLASSIFY, CLASSIFY_TOKENS):
            has_steps = model.pooling.scoring.step is not None
            makes, lacks = ("scores of steps", "others") if has_steps else ("scores of texts", "those of tokens")
            where = "/pooling" if has_steps else "/classify"
    return f"the model {model.name!r} makes {makes}, and no {lacks}: ask it at {where}"
