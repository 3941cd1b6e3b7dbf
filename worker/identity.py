"""The worker's identity: the head of its messages, the subjects that carry its name, and who is told under it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from msgspec import UnsetType

from common import subjects
from common.bus import Bus
from common.messages import (
    AttemptMessage,
    GatewayState,
    Job,
    ToGateway,
    ToWorker,
    WorkerReply,
    worker_reply_decoder,
)
from common.peers import Peers


class Head(TypedDict):
    """The first fields of every `WorkerMessage`."""

    request_id: str
    attempt: int
    traceparent: str | UnsetType
    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Identity:
    """One incarnation of a worker: a restart under the same name has another."""

    worker: str
    incarnation: int
    # Gateways of release 0.1.0, which listen on subjects without the speaker's name.
    _old_gateways: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def hears_old_gateways(self) -> bool:
        return bool(self._old_gateways)

    def heard(self, state: GatewayState) -> None:
        """Note from a gateway's heartbeat which subjects it listens on."""
        if state.named:
            self._old_gateways.discard(state.gateway)
        else:
            self._old_gateways.add(state.gateway)

    def forget(self, gateway: str) -> None:
        """Forget a gateway that is gone."""
        self._old_gateways.discard(gateway)

    def to_gateway(self, gateway: str) -> str:
        return subjects.gateway(gateway, self._name_for(gateway))

    def frames_to(self, gateway: str) -> str:
        return subjects.frames(gateway, self._name_for(gateway))

    def _name_for(self, gateway: str) -> str:
        return "" if gateway in self._old_gateways else self.worker

    def head(self, about: Job | AttemptMessage, *, trace: str | UnsetType | None = None) -> Head:
        """The head of a message about this attempt: `Failed(**identity.head(job), …)`.

        `trace`: a span below the attempt's, such as the transfer's; None = the attempt's own.
        """
        own = about.context if isinstance(about, Job) else about.traceparent
        return Head(
            request_id=about.request_id,
            attempt=about.attempt,
            traceparent=own if trace is None else trace,
            worker=self.worker,
            incarnation=self.incarnation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Messenger:
    """The bus to gateways and other workers, each under the subject that it listens on."""

    identity: Identity
    bus: Bus
    peers: Peers

    async def ask(self, worker: str, message: ToWorker, *, timeout_s: float) -> WorkerReply:
        """Raises UnavailableError."""
        return await self.bus.request(self._subject(worker), message, worker_reply_decoder, timeout_s=timeout_s)

    async def tell(self, worker: str, message: ToWorker) -> None:
        """Raises UnavailableError."""
        await self.bus.publish(self._subject(worker), message)

    async def tell_gateway(self, gateway: str, message: ToGateway) -> None:
        """Raises UnavailableError."""
        await self.bus.publish(self.identity.to_gateway(gateway), message)

    def _subject(self, worker: str) -> str:
        return self.peers.to(worker, self.identity.worker, subjects.peer)
