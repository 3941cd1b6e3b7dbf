"""The worker's identity: the head of its messages, and the subjects that carry its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from msgspec import UnsetType

from common import subjects
from common.messages import AttemptMessage, GatewayState, Job


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
