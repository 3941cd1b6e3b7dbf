"""Jobs in, token frames out.

The intake fetches only what can start now, claims each job at its gateway, keeps it alive and settles it. JetStream accepts
a stale ack after the ack-wait, so the claim is the fence: a worker starts only a granted attempt, and acks only when the
gateway agrees.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from common.bus import Bus, Delivery
from common.errors import UnavailableError
from common.messages import (
    Cancel,
    Claim,
    ClaimReply,
    Failed,
    Frame,
    Job,
    Settle,
    SettleReply,
    Tokens,
    gateway_reply_decoder,
)
from common.tracing import in_trace
from worker.identity import Identity

log = logging.getLogger("baton.jobs")

FETCH_EXPIRES_S = 1.0  # longest time that a stopped worker holds its one pull
IN_PROGRESS_EVERY_S = 1.0
CLAIM_TIMEOUT_S = 1.0
SETTLE_TIMEOUT_S = 2.0
MAX_TOMBSTONES = 10_000
MAX_FRAME_TOKENS = 4096  # entries of a frame; logprobs make entries large


@dataclass(slots=True, kw_only=True, eq=False)
class ClaimedJob:
    """A job claimed by this worker, until it is settled, failed or dropped. Instants are `time.monotonic()`."""

    job: Job
    delivery: Delivery
    claimed_at: float
    deadline_at: float
    first_token_by: float = math.inf  # a later one is of no use
    received_at: float = 0.0  # by the gateway: `Job.goal` counts from here
    finished: bool = field(default=False)

    def remaining_ms(self) -> int:
        """Milliseconds left, never below 0."""
        return max(0, int((self.deadline_at - time.monotonic()) * 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTimes:
    """Parts of a handoff in milliseconds; see `Settle`."""

    push_ms: float
    late_push_ms: float
    handover_ms: float


class JobIntake:
    """Pulls this worker's jobs and passes the claimed ones to `start`."""

    def __init__(self, *, bus: Bus, identity: Identity) -> None:
        self._bus = bus
        self._identity = identity
        self._claiming = 0
        self._held: set[ClaimedJob] = set()
        self._room_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.expired = 0

    def room_changed(self) -> None:
        """Wake the intake: a role may take more jobs now."""
        self._room_changed.set()

    async def run(
        self, stopping: asyncio.Event, *, room: Callable[[], int], start: Callable[[ClaimedJob], Awaitable[None]]
    ) -> None:
        """Pull as many jobs as there is `room` for until `stopping`, and `start` the claimed ones.

        Returns without waiting for claimed jobs. Never cancels a pull in flight.
        """
        queue = await self._bus.jobs(self._identity.worker)
        while not stopping.is_set():
            self._room_changed.clear()
            num_jobs = room() - self._claiming
            if num_jobs <= 0:
                await _first(self._room_changed.wait(), stopping.wait())
                continue
            deliveries = await queue.fetch(num_jobs, expires_s=FETCH_EXPIRES_S)
            _heed_cancellation()  # a worker that lost its name would serve on under it
            for delivery in deliveries:
                if stopping.is_set():
                    await delivery.nak()
                    continue
                self._claiming += 1
                with in_trace(delivery.job.traceparent):  # covers the claim and the role's tasks for the job
                    self._spawn(self._claim(delivery, start))

    async def keep_alive(self) -> None:
        """Send JetStream `in_progress` for the claimed jobs each second, until cancelled."""
        while True:
            await asyncio.sleep(IN_PROGRESS_EVERY_S)
            for claimed in list(self._held):
                with contextlib.suppress(UnavailableError):
                    await claimed.delivery.in_progress()

    async def settle(
        self,
        claimed: ClaimedJob,
        *,
        decode_worker: str = "",
        decode_incarnation: int = 0,
        times: HandoffTimes | None = None,
    ) -> None:
        """Ack the job if the gateway agrees that this attempt is current; otherwise terminate the delivery."""
        if not self._finish(claimed):
            return
        settle = Settle(
            **self._identity.head(claimed.job),
            decode_worker=decode_worker,
            decode_incarnation=decode_incarnation,
            push_ms=times.push_ms if times else 0.0,
            late_push_ms=times.late_push_ms if times else 0.0,
            handover_ms=times.handover_ms if times else 0.0,
        )
        try:
            reply = await self._bus.request(
                self._identity.to_gateway(claimed.job.gateway),
                settle,
                gateway_reply_decoder,
                timeout_s=SETTLE_TIMEOUT_S,
            )
        except UnavailableError:
            reply = SettleReply(ack=False)  # the gateway is gone, and the request with it
        with contextlib.suppress(UnavailableError):
            if isinstance(reply, SettleReply) and reply.ack:
                await claimed.delivery.ack()
            else:
                await claimed.delivery.term()

    async def fail(
        self, claimed: ClaimedJob, *, code: str, message: str, retryable: bool, dead_worker: str = ""
    ) -> None:
        """Report the failure to the gateway, which decides about another attempt, and end the delivery."""
        if not self._finish(claimed):
            return
        failed = Failed(
            **self._identity.head(claimed.job),
            code=code,
            message=message[:500],
            retryable=retryable,
            dead_worker=dead_worker,
        )
        with contextlib.suppress(UnavailableError):
            await self._bus.publish(self._identity.to_gateway(claimed.job.gateway), failed)
        with contextlib.suppress(UnavailableError):
            await claimed.delivery.term()

    async def is_wanted(self, claimed: ClaimedJob) -> bool:
        """True if the gateway still grants this worker the attempt."""
        reply = await self._ask(claimed.job, is_held=True)
        return reply is None or reply.granted

    async def drop(self, claimed: ClaimedJob) -> None:
        """Terminate the delivery silently: the gateway cancelled the attempt."""
        if self._finish(claimed):
            with contextlib.suppress(UnavailableError):
                await claimed.delivery.term()

    async def close(self) -> None:
        """Wait for claims in flight."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLAIM_TIMEOUT_S * 2)

    def _finish(self, claimed: ClaimedJob) -> bool:
        self._held.discard(claimed)
        was_finished, claimed.finished = claimed.finished, True
        return not was_finished

    async def _claim(self, delivery: Delivery, start: Callable[[ClaimedJob], Awaitable[None]]) -> None:
        try:
            reply = await self._ask(delivery.job)
            if reply is None:
                await delivery.nak(1.0)
            elif not reply.granted:
                log.info("job.not_granted", extra={"request_id": delivery.job.request_id, "reason": reply.reason})
                await delivery.term()
            elif reply.remaining_ms <= 0:
                self.expired += 1
                await delivery.term()
            else:
                now = time.monotonic()
                claimed = ClaimedJob(
                    job=delivery.job,
                    delivery=delivery,
                    claimed_at=now,
                    deadline_at=now + reply.remaining_ms / 1000,
                    first_token_by=now + reply.first_token_ms / 1000 if reply.first_token_ms >= 0 else math.inf,
                    received_at=now - reply.age_ms / 1000,
                )
                self._held.add(claimed)
                await start(claimed)
        except UnavailableError:
            log.warning("job.claim_lost", extra={"request_id": delivery.job.request_id})
        finally:
            self._claiming -= 1
            self._room_changed.set()

    async def _ask(self, job: Job, *, is_held: bool = False) -> ClaimReply | None:
        """Ask the gateway; return None without a reply. It may be slow, so JetStream redelivers, up to `max_deliver` times."""
        claim = Claim(
            **self._identity.head(job),
            is_held=is_held,
        )
        try:
            reply = await self._bus.request(
                self._identity.to_gateway(job.gateway), claim, gateway_reply_decoder, timeout_s=CLAIM_TIMEOUT_S
            )
        except UnavailableError:
            return None
        return reply if isinstance(reply, ClaimReply) else None

    def _spawn(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _heed_cancellation() -> None:
    """Raise CancelledError in a task whose cancellation Python 3.11's `wait_for` swallowed, in the client of NATS."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _first(*waits: Awaitable[object]) -> None:
    """Return when any of the awaitables is done; cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class Tombstones:
    """The newest ended attempt of each request, up to a bound. The gateway's claim is the real fence."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def add(self, request_id: str, attempt: int) -> None:
        """Mark attempts up to `attempt` as ended."""
        self._attempts[request_id] = max(attempt, self._attempts.pop(request_id, 0))
        if len(self._attempts) > MAX_TOMBSTONES:
            self._attempts.popitem(last=False)

    def covers(self, request_id: str, attempt: int) -> bool:
        return attempt <= self._attempts.get(request_id, 0)


class Cancelled:
    """Cancelled attempts by gateway: a gateway's cancellation affects its own requests only."""

    def __init__(self) -> None:
        self._ended = Tombstones()

    def add(self, message: Cancel) -> None:
        """Record a gateway's cancellation of its own request, which may not have arrived yet."""
        self._ended.add(f"{message.gateway} {message.request_id}", message.attempt)

    def covers(self, job: Job) -> bool:
        """True if the job's own gateway cancelled it; a gateway of release 0.1.0 sends no name."""
        return any(self._ended.covers(f"{gateway} {job.request_id}", job.attempt) for gateway in (job.gateway, ""))


class FrameOutbox:
    """Collects `Tokens` and publishes one `Frame` for each gateway at `flush`, in order.

    A frame that the bus refused is not kept: the gateway notices the gap and asks for it (`Resend`).
    """

    def __init__(self, *, bus: Bus, identity: Identity) -> None:
        self._bus = bus
        self._identity = identity
        self._pending: dict[str, list[Tokens]] = defaultdict(list)
        self._ready = asyncio.Event()
        self.lost_frames = 0

    def add(self, gateway: str, tokens: Tokens) -> None:
        self._pending[gateway].append(tokens)
        self._ready.set()

    async def run(self) -> None:
        """Publish the tokens collected by `add` at the event loop's next turn, until cancelled."""
        while True:
            await self._ready.wait()
            await self.flush()

    async def flush(self) -> None:
        self._ready.clear()
        pending, self._pending = self._pending, defaultdict(list)
        for gateway, entries in pending.items():
            for start in range(0, len(entries), MAX_FRAME_TOKENS):
                await self._publish(gateway, entries[start : start + MAX_FRAME_TOKENS])

    async def _publish(self, gateway: str, entries: list[Tokens]) -> None:
        frame = Frame(worker=self._identity.worker, incarnation=self._identity.incarnation, tokens=entries)
        try:
            await self._bus.publish(self._identity.frames_to(gateway), frame)
        except UnavailableError:
            self.lost_frames += 1
