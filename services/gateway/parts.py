"""The components of one gateway, built from its settings: started before HTTP and closed after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI

from common import subjects
from common.bus import NatsBus
from common.messages import gateway_state_decoder
from common.peers import Peers
from common.store import Store
from common.tracing import Tracer
from common.wire import Wire
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings, create_app
from gateway.batches.service import Batches
from gateway.console.control import FleetControl
from gateway.console.messages import ConsoleAsk, console_told_decoder
from gateway.lifecycle.requests import OwnerSettings, OwnModels, Requests
from gateway.placement.agreement import Own
from gateway.placement.enrolment import Enrolment
from gateway.placement.incumbents import Incumbents
from gateway.placement.ledger import Ledger
from gateway.placement.memory import Memory
from gateway.pooling.service import PoolingModels
from gateway.pooling.texts import TextTokenizer
from gateway.responses.service import Responses, nothing_kept
from gateway.tenants.budgets import SharedBudgets
from gateway.tenants.kept import KeptKeys
from gateway.tenants.tenants import Tenants
from services.gateway.files import read_newcomer, read_own
from services.gateway.kept import KeptFiles
from services.gateway.settings import GatewaySettings
from services.runtime.names import ANSWER_S, Name, held, made_up, new_incarnation
from services.runtime.tracer import open_tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The components of the HTTP application: all started, except batches and kept responses, whose routes come first."""

    gateway_id: str
    tenants: Tenants
    requests: Requests
    pooling: PoolingModels
    budgets: SharedBudgets
    keys: KeptKeys
    control: FleetControl
    batches: Batches | None
    responses: Responses | None
    tracer: Tracer


@asynccontextmanager
async def started(
    settings: GatewaySettings,
    *,
    bus: NatsBus,
    disk: Wire,
    store: Store,
    tenants: Tenants,
    tokenizers: Mapping[str, ChatTokenizer],
    models: Mapping[str, Own],
    texts: Mapping[str, TextTokenizer],
) -> AsyncIterator[Parts]:
    """Start the parts; close them in reverse order. `disk` is the connection to what NATS keeps on disk."""
    gateway_id, incarnation = settings.gateway_id or made_up("gateway"), new_incarnation()
    async with held(bus, _name(bus, gateway_id, incarnation)):
        peers = Peers()
        await peers.start(bus)
        tracer = open_tracer(
            settings.otlp_endpoint, service="gateway", instance=gateway_id, rest_share=settings.trace_rest_share
        )
        ledger = Ledger(store)
        enrolment = Enrolment(ledger, peers, gateway_id=gateway_id)
        enrolment.start()
        memory = Memory(store, models)
        incumbents = Incumbents(written=await memory.read())
        own = OwnerSettings(
            gateway_id=gateway_id,
            incarnation=incarnation,
            limits=settings.limits(),
            levels=settings.levels(),
            keep_s=settings.model_keep_s,
        )
        pooling = PoolingModels(bus, peers, texts, read_own(settings, texts), gateway_id=gateway_id, tracer=tracer)
        served = OwnModels(
            tokenizers=tokenizers,
            known=models,
            aliases=settings.aliases,
            incumbents=incumbents,
            pooling=pooling,
            patterns=settings.patterns,
            read=partial(read_newcomer, settings) if settings.patterns else None,
        )
        requests = Requests(bus, ledger, peers, own, served, tracer=tracer)
        await requests.start()
        memory.start(incumbents)
        control = FleetControl(bus, peers, gateway_id=gateway_id)
        await control.start()
        budgets = SharedBudgets(store)
        keys = KeptKeys(disk, tenants, gateway_id=gateway_id, incarnation=incarnation)
        try:
            async with budgets.renewing(), keys.following():
                yield Parts(
                    gateway_id=gateway_id,
                    tenants=tenants,
                    requests=requests,
                    pooling=pooling,
                    budgets=budgets,
                    keys=keys,
                    control=control,
                    batches=Batches(disk, settings.batches(), tenants, tracer=tracer)
                    if settings.batch_store_mb
                    else None,
                    responses=Responses(disk, settings.responses(), tenants, tracer=tracer)
                    if settings.responses_store_mb
                    else None,
                    tracer=tracer,
                )
        finally:  # also when the name is lost, which cancels
            await requests.close()
            await memory.close()
            await enrolment.close()
            await control.close()
            await peers.close()
            await asyncio.to_thread(tracer.close)


def _name(bus: NatsBus, gateway: str, incarnation: int) -> Name:
    # A gateway's user may publish no other request to gateways. No request has this id, so the reply is short.
    subject, question = subjects.console(gateway), ConsoleAsk(request_id=gateway)
    return Name(
        id=gateway,
        incarnation=incarnation,
        flag="--gateway-id",
        beats=subjects.gateway_heartbeat(gateway),
        beat_decoder=gateway_state_decoder,
        ask=lambda: bus.request(subject, question, console_told_decoder, timeout_s=ANSWER_S),
    )


def app_of(parts: Parts, settings: GatewaySettings) -> FastAPI:
    return create_app(
        generations=parts.requests,
        budgets=parts.budgets,
        catalogue=parts.requests.catalogue,
        settings=HttpSettings(
            tenants=parts.tenants,
            max_body_bytes=settings.max_body_mb << 20,
            request_timeout_s=settings.request_timeout_s,
            levels=settings.levels(),
            gateway_id=parts.gateway_id,
            log_requests=settings.log_requests,
            admits_by_goals=settings.admit_by == "goal",
            ignores_unknown_fields=settings.unknown_fields == "ignore",
            trace_url=settings.trace_url,
            web=settings.web(),
            ollama_port=settings.ollama_port,
        ),
        tracer=parts.tracer,
        control=parts.control,
        keys=parts.keys,
        loads=parts.requests.hosts,
        files=KeptFiles(),
        pooling=parts.pooling if parts.pooling.models or settings.patterns else None,
        batches=parts.batches.connect if parts.batches is not None else None,
        responses=parts.responses.connect if parts.responses is not None else nothing_kept,
    )
