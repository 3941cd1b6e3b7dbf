"""What workers say of the requests: claims, tokens, hand-overs, failures, and that they are gone."""

from __future__ import annotations

import time

from msgspec import UnsetType

from common.errors import (
    PlaceAgainError,
    error_from_code,
)
from common.messages import (
    Ack,
    Claim,
    ClaimReply,
    Failed,
    Frame,
    GatewayReply,
    Imported,
    Received,
    Settle,
    SettleReply,
    ToGateway,
    Tokens,
    Trying,
    WorkerState,
)
from gateway.active import ActiveRequest
from gateway.attempts import Attempts
from gateway.owner import Worker


class Listening(Attempts):
    """Takes the messages and heartbeats of workers."""

    async def _handle(self, message: ToGateway) -> GatewayReply | None:
        active = self._active.get(message.request_id)
        worker = (message.worker, message.incarnation)
        self._pulse.heard(message.worker, time.monotonic())
        match message:
            case Claim():
                return self._claim(active, message, worker)
            case Settle():
                if active is None:
                    return SettleReply(ack=True)  # over already; the job must not come again
                decoder = (message.decode_worker, message.decode_incarnation) if message.decode_worker else None
                active.settled(message)
                return SettleReply(ack=active.state.settle(message.attempt, worker, decoder))
            case Imported():
                if active is not None and active.state.imported(message.attempt, worker):
                    active.imported(message)
                return Ack(known=active is not None)
            case Trying():
                self._suspects.trying(worker, message.request_id)
                return Ack(known=active is not None)
            case Failed():
                self._failed(active, message)
                return Ack(known=active is not None)

    def _claim(self, active: ActiveRequest | None, message: Claim, worker: Worker) -> ClaimReply:
        if active is None:
            return ClaimReply(granted=False, reason="unknown")
        now = time.monotonic()
        refusal = active.state.claim(message.attempt, worker, now)
        if refusal:
            self._counters["claims_refused"] += 1
            return ClaimReply(granted=False, reason=refusal)
        if not message.is_held:
            active.claimed_at = now
            active.timeline.claimed(worker[0], now)
        return ClaimReply(granted=True, remaining_ms=max(0, int((active.state.deadline_at - now) * 1000)))

    def _failed(self, active: ActiveRequest | None, message: Failed) -> None:
        if active is None or message.attempt != active.state.attempt:
            return
        if message.retryable:
            tried = message.code != PlaceAgainError.code
            blame = message.dead_worker or (message.worker if tried else "")
            death = self._death_of(message.dead_worker, is_certain=True) if message.dead_worker else None
            self._spawn(self._retry(active, message.message, blame=blame, tried=tried, death=death))
        else:
            self._end(active, error_from_code(message.code, message.message))

    def _on_frame(self, frame: Frame) -> None:
        sender = (frame.worker, frame.incarnation)
        self._pulse.heard(frame.worker, time.monotonic())
        for tokens in frame.tokens:
            active = self._active.get(tokens.request_id)
            if active is None:
                if tokens.finish:
                    self._received(frame.worker, tokens, tokens.traceparent)
                continue
            self._take(active, tokens, sender)

    def _take(self, active: ActiveRequest, tokens: Tokens, sender: Worker) -> None:
        state, now = active.state, time.monotonic()
        if tokens.attempt != state.attempt:
            self._counters["stale_tokens"] += 1
            return
        was_first = state.next_position == 0
        events = state.take(tokens, sender, now)
        if events and was_first:
            active.explain_first_token(tokens, now)
        for event in events:  # before all else: what comes below are tasks, and the client's token would wait for them
            active.timeline.took(tokens, len(event.token_ids), event.finish, now)
            active.events.put_nowait(event)
        if events and was_first:
            self._room.computed(state.spec)
        if events and active.prefilled != state.attempt:
            active.prefilled = state.attempt
            self._release(state, "prefill")
        self._suspects.heard(state, sender)
        if state.is_over:
            self._received(sender[0], tokens, active.context)
            self._end(active, None)  # now: who reads the last event goes on to cancel what is left

    def _received(self, worker: str, last: Tokens, traceparent: str | UnsetType) -> None:
        """Tell the worker that its last tokens are here."""
        received = Received(request_id=last.request_id, attempt=last.attempt, traceparent=traceparent)
        self._spawn(self._orders.received(worker, received))

    def _heard(self, worker: str) -> None:
        """A heartbeat arrived."""
        now = time.monotonic()
        self._pulse.heard(worker, now)
        self._fleet.heard(worker, now)

    def _on_changed(self, worker: WorkerState) -> None:
        for active in list(self._active.values()):
            self._take_back(active, worker)

    def _on_lost(self, worker: str, incarnation: int) -> None:
        self._move_from((worker, incarnation), "worker lost", died=not self._peers.left(worker, incarnation))
