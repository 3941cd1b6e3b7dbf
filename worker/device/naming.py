"""Naming the next suspect (`worker.device.trials`), so that gateways know which request killed this worker."""

from __future__ import annotations

import contextlib

from common.bus import Bus
from common.errors import UnavailableError
from common.messages import Trying
from engine.sequence import Sequence
from worker.device.trials import Trials
from worker.identity import Identity

NAMING_TIMEOUT_S = 0.5  # then the suspect is tried unnamed: other requests wait


class Naming:
    """Tells the gateways with suspects here which one is next."""

    def __init__(self, *, bus: Bus, identity: Identity, trials: Trials) -> None:
        self._bus = bus
        self._identity = identity
        self._trials = trials

    async def name(self, suspect: Sequence) -> None:
        """Return once the server has it: waiting for a busy gateway would delay every request."""
        trying = Trying(
            request_id=suspect.request_id,
            attempt=suspect.attempt,
            position=suspect.num_generated,
            traceparent=self._trials.context(suspect),
            worker=self._identity.worker,
            incarnation=self._identity.incarnation,
        )
        with contextlib.suppress(UnavailableError):
            for gateway in self._trials.gateways:
                await self._bus.publish(self._identity.to_gateway(gateway), trying)
            await self._bus.flush(NAMING_TIMEOUT_S)
