"""Somebody with one process's own credentials, who says everything that there is to say in others' names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec
import nats

from common import subjects
from common.access import inbox_of, read_login
from common.blocks import pack_tokens
from common.messages import (
    Cancel,
    Claim,
    Drain,
    Failed,
    Frame,
    GatewayState,
    Handoff,
    Imported,
    LeaseAborted,
    Received,
    SetRoles,
    Settle,
    Tokens,
    Trying,
    WorkerState,
    WriterDone,
    encode,
)
from tests.chaos.cluster import ChaosCluster

Said = tuple[str, msgspec.Struct]


@contextlib.asynccontextmanager
async def client_of(cluster: ChaosCluster, user: str) -> AsyncIterator[nats.NATS]:
    """A plain connection with the user's password."""
    login = read_login(cluster.users.nats_file(user))

    async def ignore(error: Exception) -> None:
        """The server's refusals are what is tried."""

    client = await nats.connect(
        cluster.nats.address,
        user=login.user,
        password=login.password,
        inbox_prefix=inbox_of(login.user),
        error_cb=ignore,
    )
    try:
        yield client
    finally:
        await client.close()


async def say(client: nats.NATS, said: Sequence[Said]) -> None:
    """All of it. What the server forbids it does not carry."""
    for subject, message in said:
        await client.publish(subject, encode(message))
    await client.flush()


def heartbeats(victim: WorkerState, speaker: str) -> Iterator[Said]:
    """Another life, the end and a fault of `victim`, on its subject and on the speaker's own."""
    for changes in ({"incarnation": 99}, {"status": "stopped"}, {"status": "broken"}, {"status": "draining"}):
        state = msgspec.structs.replace(victim, **changes)
        state = msgspec.structs.replace(
            state, region=msgspec.structs.replace(state.region, incarnation=state.incarnation)
        )
        for subject in (subjects.heartbeat(speaker), subjects.heartbeat(victim.worker)):
            yield subject, state


def words(victim: WorkerState, speaker: str, gateway: str, requests: Sequence[str]) -> Iterator[Said]:
    """What `victim` would tell a gateway about these requests, on every subject on which it can be told."""
    for request in requests:
        head = {"request_id": request, "attempt": 1, "worker": victim.worker, "incarnation": victim.incarnation}
        told = [
            Claim(**head),
            Settle(**head, decode_worker=speaker, decode_incarnation=1),
            Failed(**head, code="invalid_request", message="forged", retryable=False),
            Failed(**head, code="worker_failed", message="forged", retryable=True, dead_worker=victim.worker),
            Imported(**head, transferred_blocks=1, transferred_bytes=1, reused_blocks=0, transfer_ms=1.0),
            Trying(**head),
        ]
        for message in told:
            for subject in (
                subjects.gateway(gateway),
                *(subjects.gateway(gateway, one) for one in (speaker, victim.worker)),
            ):
                yield subject, message
        tokens = [
            Tokens(request_id=request, attempt=1, position=position, token_ids=pack_tokens([7]), finish=finish)
            for position in range(200)
            for finish in ("", "stop")
        ]
        frame = Frame(worker=victim.worker, incarnation=victim.incarnation, tokens=tokens)
        for subject in (subjects.frames(gateway), *(subjects.frames(gateway, one) for one in (speaker, victim.worker))):
            yield subject, frame


def requests_to(
    victim: WorkerState, other: WorkerState, speaker: str, ids: Sequence[str], *, may_order: bool
) -> Iterator[Said]:
    """What a peer, a gateway or a planner would ask of `victim`, the peer in the name of `other`."""
    unnamed, peer = subjects.worker(victim.worker), subjects.peer(victim.worker, speaker)
    own = [subjects.order(victim.worker, speaker), subjects.plan(victim.worker, speaker)]
    orders = [unnamed, subjects.order(victim.worker, "gateway"), peer]
    for order in (
        SetRoles(roles=["prefill"]),
        SetRoles(roles=["decode"]),
        Drain(),
    ):  # a gateway's right in its own name
        yield from ((subject, order) for subject in (*orders, *([] if may_order else own)))
    orders += own
    for request in ids:
        head = {"request_id": request, "attempt": 1}
        for name in ({}, {"worker": other.worker}, {"gateway": "gateway"}, {"gateway": speaker}):
            yield from ((subject, Cancel(**head, **name)) for subject in orders)
        for name in ({}, {"gateway": "gateway"}, {"gateway": speaker}):
            yield from ((subject, Received(**head, **name)) for subject in orders)
        head |= {"worker": other.worker, "incarnation": other.incarnation}
        for lease in range(1, 20):
            generation = (victim.incarnation + lease) % 2**63
            about = {**head, "lease_id": lease, "generation": generation}
            for message in (WriterDone(**about), LeaseAborted(**about, reason="forged")):
                yield from ((subject, message) for subject in (unnamed, peer))
            handoff = Handoff(
                **about, decode_incarnation=victim.incarnation, digests=b"", first_token=7, remaining_ms=1000
            )
            yield from ((subject, handoff) for subject in (unnamed, peer))


def gatebeats(victim: str, speaker: str) -> Iterator[Said]:
    """Another life of a gateway: its workers would end its requests."""
    for subject in (subjects.gateway_heartbeat(speaker), subjects.gateway_heartbeat(victim)):
        yield subject, GatewayState(gateway=victim, incarnation=99)
        yield subject, GatewayState(gateway=victim, incarnation=99, named=True)
