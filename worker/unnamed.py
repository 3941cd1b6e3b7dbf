"""Requests of release 0.1.0, whose subject `baton.worker.<id>` does not carry the speaker.

Who says its name elsewhere is not believed here. Orders need a gateway of that release.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from common import subjects
from common.bus import Bus
from common.messages import ANYBODY_THERE, Ack, Cancel, Drain, Received, RolesReply, SetRoles, ToWorker, WorkerReply
from common.messages.arrivals import claimed_by
from common.peers import Peers
from worker.identity import Identity

UPGRADE = "nobody of release 0.1.0 is heard here: upgrade whoever sent this"
OLD_WRITERS = "*"  # as a `Cancel.worker`: any writer without a name


class Unnamed:
    """Passes plausible requests on to `handle`."""

    def __init__(
        self,
        *,
        bus: Bus,
        peers: Peers,
        identity: Identity,
        handle: Callable[[ToWorker], Awaitable[WorkerReply | None]],
    ) -> None:
        self._bus = bus
        self._peers = peers
        self._identity = identity
        self._handle = handle

    async def handle(self, message: ToWorker) -> WorkerReply | None:
        speaker = claimed_by(message)
        if speaker is not None:
            if self._peers.speaks_unnamed(speaker):
                return await self._handle(message)
            return self._refuse(f"somebody speaks as {speaker}, which says its name")
        if self._identity.hears_old_gateways or message == ANYBODY_THERE:
            return await self._handle(message)
        if isinstance(message, SetRoles | Drain):
            self._refuse(UPGRADE)
            return RolesReply(accepted=False, roles=[], reason=UPGRADE)
        if isinstance(message, Received) or not any(map(self._peers.speaks_unnamed, self._peers.states)):
            return self._refuse(UPGRADE)
        if isinstance(message, Cancel):
            message = msgspec.structs.replace(message, worker=OLD_WRITERS)
        return await self._handle(message)

    def _refuse(self, why: str) -> Ack:
        self._bus.refuse(subjects.worker(self._identity.worker), why)
        return Ack(known=False)
