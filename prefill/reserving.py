"""Asking decode candidates for a lease: best first, in rounds, until one grants it or none can."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

from common.errors import UnavailableError
from common.messages import (
    Cancel,
    Feature,
    Reserve,
    ReserveAgain,
    ReserveReply,
    WorkerState,
    features_of,
)
from common.words import Refusal, Role
from prefill.request import HandoffRecord, PrefillRequest
from prefill.stop import Stop
from worker.context import RoleContext

RESERVE_TIMEOUT_S = 1.0
ASK_AGAIN_S = 0.05  # after a round without room
WANTED_CHECK_S = 2.0  # how often the gateway is asked if it still wants the attempt
CANCEL_TIMEOUT_S = 1.0
MAX_SILENT_ROUNDS = 5


class Reserving:
    """Asks for one request's lease, and tracks who may still reply."""

    def __init__(self, request: PrefillRequest, context: RoleContext, record: HandoffRecord) -> None:
        self._request = request
        self._context = context
        self._record = record
        self._candidates = Candidates(request.job.decode_workers)
        self._silent: set[str] = set()  # asked, without a reply in time
        self._full: set[str] = set()  # may hold blocks back for it
        self._keepers: dict[str, int] = {}  # candidates that keep the job, each in this incarnation

    async def lease(self) -> tuple[str, ReserveReply] | None:
        """Return the worker that grants a lease, and the lease; None when the request was stopped.

        The attempt ends when all candidates refuse for good or stay silent, or when its gateway no longer wants it (which it
        may have said while this worker was cut off).
        """
        self._record.asked_at = asked_gateway_at = time.monotonic()
        while not self._request.stopped:
            num_silent = 0
            for worker in self._candidates.open:
                reply = await self._ask(worker)
                if reply is None:
                    num_silent += 1
                    continue
                self._request.waits_for_room = reply.reason is Refusal.FULL
                if reply.granted and reply.region is not None:
                    return worker, reply
                self._record.refusals += 1
                if reply.reason is Refusal.CANCELLED:  # the gateway told all candidates; one that knows is enough
                    self._request.stop(Stop.CANCELLED)
                    return None
                self._candidates.refused(worker, reply)
            self._request.asked_all = True
            self._request.changed.set()  # it may now continue in this worker
            stop = self._candidates.round_ended(num_silent=num_silent)
            if stop is not None:
                self._request.stop(stop, self._candidates.detail)
                return None
            if time.monotonic() - asked_gateway_at > WANTED_CHECK_S:
                asked_gateway_at = time.monotonic()
                if not await self._context.jobs.is_wanted(self._request.claimed):
                    self._request.stop(Stop.SUPERSEDED)
                    return None
            await asyncio.sleep(ASK_AGAIN_S)
        return None

    def take_back(self, *, but: str) -> None:
        """Cancel the question at silent and full candidates: a suspended one would grant a lease later."""
        cancel = Cancel(
            request_id=self._request.id,
            attempt=self._request.job.attempt,
            traceparent=self._request.job.context,
            reason="reserved elsewhere",
            worker=self._context.identity.worker,
        )
        for worker in (self._silent | self._full) - {but}:
            self._context.background.spawn(self._tell(worker, cancel))

    async def _ask(self, worker: str) -> ReserveReply | None:
        if worker == self._context.identity.worker:
            # It continues here without a lease; otherwise it would be here twice.
            takes = self._context.roles.takes(Role.DECODE)
            return ReserveReply(granted=False, reason=Refusal.FULL if takes else Refusal.DRAINING)
        known = self._context.messenger.peers.states.get(worker)
        if known is not None and (lacks := features_of(self._request.job.work) - known.can):
            detail = f"it doesn't follow {' and '.join(sorted(lacks))}"
            return ReserveReply(granted=False, reason=Refusal.DRAINING, detail=detail)
        was_silent = worker in self._silent
        self._silent.add(worker)  # the request may end before the reply comes
        try:
            reply = await self._question(worker, known)
        except UnavailableError:
            return None
        if reply is not None and reply.reason is Refusal.FULL:
            self._full.add(worker)
        if not was_silent:  # a question in flight may arrive after this cancellation
            self._silent.discard(worker)
        return reply

    async def _question(self, worker: str, known: WorkerState | None) -> ReserveReply | None:
        """Ask with the job, and without it while the worker keeps it. Raises UnavailableError."""
        job, remaining_ms, identity = self._request.job, self._request.claimed.remaining_ms(), self._context.identity
        if known is not None and self._keepers.get(worker) == known.incarnation:
            reply = await self._send(worker, ReserveAgain(**identity.head(job), remaining_ms=remaining_ms))
            if reply is None or reply.reason is not Refusal.UNKNOWN_JOB:
                return reply
        reserve = Reserve(
            job=job,
            worker=identity.worker,
            incarnation=identity.incarnation,
            remaining_ms=remaining_ms,
            layout=self._context.cache.layout,
            num_ranks=len(self._context.transfers.region.each),
        )
        self._keepers.pop(worker, None)
        reply = await self._send(worker, reserve)
        if reply is not None and known is not None and Feature.RESERVE_AGAIN in known.can:
            self._keepers[worker] = known.incarnation
        return reply

    async def _send(self, worker: str, message: Reserve | ReserveAgain) -> ReserveReply | None:
        reply = await self._context.messenger.ask(worker, message, timeout_s=RESERVE_TIMEOUT_S)
        return reply if isinstance(reply, ReserveReply) else None

    async def _tell(self, worker: str, cancel: Cancel) -> None:
        with contextlib.suppress(UnavailableError):
            await self._context.messenger.ask(worker, cancel, timeout_s=CANCEL_TIMEOUT_S)


class Candidates:
    """The candidates of one attempt, best first, and what their replies decide. A final refusal is not asked again."""

    def __init__(self, workers: Iterable[str]) -> None:
        self._open = list(workers)
        self._refused: dict[str, ReserveReply] = {}  # final refusals by worker
        self._silent_rounds = 0  # consecutive rounds in which every open candidate was silent

    @property
    def open(self) -> list[str]:
        """Candidates worth asking."""
        return list(self._open)

    @property
    def detail(self) -> str:
        """Details of the final refusals, for people."""
        return "; ".join(f"{worker}: {reply.detail or reply.reason}" for worker, reply in self._refused.items())

    def refused(self, worker: str, reply: ReserveReply) -> None:
        """Record a candidate's refusal."""
        if reply.reason.is_final:
            self._open.remove(worker)
            self._refused[worker] = reply

    def round_ended(self, *, num_silent: int) -> Stop | None:
        """Return the outcome of the attempt, if it is decided, after each candidate was asked once."""
        self._silent_rounds = self._silent_rounds + 1 if num_silent == len(self._open) else 0
        if self._open and self._silent_rounds < MAX_SILENT_ROUNDS:
            return None
        reasons = {reply.reason for reply in self._refused.values()}
        if Refusal.DRAINING in reasons:
            return Stop.NOBODY_DECODES
        if self._open:
            return Stop.NOBODY_ANSWERS
        return Stop.INVALID if reasons == {Refusal.INVALID} else Stop.REFUSED
