"""Checks of the processes on the bus: names claimed twice, and workers that a gateway with this model would refuse."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator

from cli.doctor.settings import DoctorSettings
from common import subjects
from common.blocks import tokenizer_fingerprint
from common.bus import connect_bus
from common.errors import UnavailableError
from common.messages import GatewayState, gateway_state_decoder
from common.peers import CONTESTED, Peers
from common.words import Role
from engine.checkpoint.fingerprint import files_fingerprint
from gateway.placement.agreement import Agreement, Own
from gateway.request.placement import Unlike
from modelfiles.files import TOKENIZER, read_file
from services.runtime.checks.finding import Finding

LISTEN_S = 2.5  # gateways send one each second: two gateways are heard twice each
CONNECT_S = 3.0


class Gateways:
    """The incarnations heard under each gateway's name."""

    def __init__(self) -> None:
        self.lives: dict[str, list[int]] = defaultdict(list)

    def saw(self, state: GatewayState) -> None:
        lives = self.lives[state.gateway]
        if lives[-1:] != [state.incarnation]:
            lives.append(state.incarnation)

    @property
    def contested(self) -> list[str]:
        """Names under which an older incarnation was heard after a newer one."""
        return sorted(name for name, lives in self.lives.items() if len(set(lives)) < len(lives))


async def check_fleet(settings: DoctorSettings) -> AsyncIterator[Finding]:
    """Listen briefly and return findings."""
    peers, gateways = Peers(), Gateways()
    nats = dataclasses.replace(settings.nats(), connect_timeout_s=CONNECT_S)
    try:
        async with connect_bus(nats, name="doctor", owns_streams=False) as bus:
            await peers.start(bus)
            await bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, gateways.saw)
            await asyncio.sleep(LISTEN_S)
            await peers.close()
    except UnavailableError:
        return
    for finding in findings(peers, gateways, settings):
        yield finding


def findings(peers: Peers, gateways: Gateways, settings: DoctorSettings) -> list[Finding]:
    """Return the problems of the workers and gateways heard."""
    raw = read_file(settings.model, TOKENIZER)
    own = raw and Own(tokenizer=tokenizer_fingerprint(raw), files=files_fingerprint(settings.model))
    serves = {settings.served_name: own} if own else {}
    agreement = Agreement(peers, serves)
    found = [
        Finding("fleet", "fail", f"gateway {name}: {CONTESTED}", "--gateway-id gives it one")
        for name in gateways.contested
    ]
    for one in agreement.differences():
        text, _, remedy = one.text.partition(": ")
        is_fatal = one.what is Unlike.NAME
        found.append(Finding("fleet", "fail" if is_fatal else "warn", f"{one.worker} gets no work: {text}", remedy))
    if not found:
        heard = f"{len(peers.states)} workers and {len(gateways.lives)} gateways on the bus"
        decode = len(agreement.ready(Role.DECODE))
        found = [Finding("fleet", "ok", f"{heard}, {decode} decode for {settings.served_name!r}")]
    return found
