"""Messages from workers: claims, tokens, handoffs, failures, heartbeats."""

from __future__ import annotations

from msgspec import UnsetType

from common import subjects
from common.errors import error_from_code
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
from common.peers import Incarnation, incarnation_of
from common.tasks import Ready
from gateway.admission.capacity import Fleet
from gateway.admission.rooms import WaitingRooms
from gateway.lifecycle.attempts import Attempts, Why
from gateway.lifecycle.outbox import Means
from gateway.lifecycle.probes import Losses
from gateway.lifecycle.running import Event, Keeping, Seen
from gateway.request.active import ActiveRequest
from gateway.request.ends import End

MAX_FRAME_TOKENS = 4096  # the workers' own limit
MAX_SENDERS = 4096


class Inbox:
    def __init__(
        self,
        seen: Seen,
        means: Means,
        keeping: Keeping,
        attempts: Attempts,
        losses: Losses,
        rooms: WaitingRooms,
        fleet: Fleet,
    ) -> None:
        self._seen, self._means, self._keeping = seen, means, keeping
        self._attempts = attempts
        self._losses = losses
        self._rooms = rooms
        self._fleet = fleet
        self._senders: dict[str, Incarnation] = {}

    # -- of release 0.1.0, whose subjects don't bind the speaker -------------------------------------------------------

    def answer_unnamed(self, message: ToGateway) -> Ready[GatewayReply | None]:
        return self.answer(message) if self._may_be_unnamed(message) else Ready(None)

    def take_unnamed(self, frame: Frame) -> None:
        if self._may_be_unnamed(frame):
            self.take_frame(frame)

    def _may_be_unnamed(self, message: ToGateway | Frame) -> bool:
        if self._seen.peers.speaks_unnamed(message.worker):
            return True
        self._means.bus.refuse("unnamed", f"somebody speaks as {message.worker[:64]!r}, which says its name")
        return False

    # -- messages ------------------------------------------------------------------------------------------------------

    def answer(self, message: ToGateway) -> Ready[GatewayReply | None]:
        """Handle a request synchronously and return the reply."""
        return Ready(self._answer(message))

    def _answer(self, message: ToGateway) -> GatewayReply:
        request = self._seen.running.find(message.request_id)
        sender = Incarnation(message.worker, message.incarnation)
        self._seen.pulse.heard(message.worker, self._keeping.clock())
        match message:
            case Claim():
                return self._claim(request, message, sender)
            case Settle():
                return self._settle(request, message, sender)
            case Imported():
                if request is not None and request.state.imported(message.attempt, sender):
                    request.imported(message, self._keeping.clock())
            case Trying():
                if request is None or not request.state.is_past(message.attempt, message.position):
                    self._seen.suspects.trying(sender, message.request_id, message.position)
            case Failed():
                if request is not None and request.state.is_held_by(sender):
                    self._failed(request, message)
        return Ack(known=request is not None)

    def _claim(self, request: ActiveRequest | None, message: Claim, sender: Incarnation) -> ClaimReply:
        if request is None:
            return ClaimReply(granted=False, reason="unknown")
        now = self._keeping.clock()
        if request.state.waits(message.attempt) and (lacks := self._lacks(request, sender)):
            # An older release may have come under the name.
            why = f"{sender.worker} isn't known to follow {' and '.join(sorted(lacks))}"
            self._attempts.move_soon(request, Why(end=End.ROLE_LOST, detail=why))
            return ClaimReply(granted=False, reason=why)
        if request.state.waits(message.attempt) and self._serves_another(request, sender):
            why = f"{sender.worker} has another model now"
            self._attempts.move_soon(request, Why(end=End.ROLE_LOST, detail=why))
            return ClaimReply(granted=False, reason=why)
        refusal = request.state.claim(message.attempt, sender, now)
        if refusal:
            self._keeping.counters[Event(request.state.spec.model, "claims_refused")] += 1
            return ClaimReply(granted=False, reason=refusal)
        if not message.is_held:
            request.claimed_at = now
            request.timeline.claimed(sender.worker, now)
        return ClaimReply(
            granted=True,
            remaining_ms=_ms_until(request.state.deadline_at, now),
            first_token_ms=-1 if request.state.next_position else _ms_until(request.first_token_by, now),
            age_ms=_ms_until(now, request.timeline.received_at),
        )

    def _serves_another(self, request: ActiveRequest, claimer: Incarnation) -> bool:
        """True if a name's new process has another model, as those of hosts may: a job of the one before waits in its queue."""
        known, wanted = self._seen.peers.states.get(claimer.worker), request.state.spec.model_fingerprint
        is_known = known is not None and known.incarnation == claimer.number
        return bool(wanted) and known is not None and is_known and known.model_fingerprint != wanted

    def _lacks(self, request: ActiveRequest, claimer: Incarnation) -> frozenset[str]:
        """The features that the request needs and the claimer isn't known to have."""
        known = self._seen.peers.states.get(claimer.worker)
        is_known = known is not None and known.incarnation == claimer.number
        return request.state.spec.features - (known.can if known is not None and is_known else frozenset())

    def _settle(self, request: ActiveRequest | None, message: Settle, sender: Incarnation) -> SettleReply:
        if request is None:
            return SettleReply(ack=True)  # the request is over: its job must not come again
        decoder = Incarnation(message.decode_worker, message.decode_incarnation) if message.decode_worker else None
        request.settled(message)
        return SettleReply(ack=request.state.settle(message.attempt, sender, decoder))

    def _failed(self, request: ActiveRequest, message: Failed) -> None:
        if message.attempt != request.state.attempt:
            return
        if not message.retryable:
            self._attempts.end(request, error_from_code(message.code, message.message))
            return
        end = End.of_code(message.code)
        why = Why(
            end=end,
            detail=message.message,
            blame=message.dead_worker or ("" if end is End.PLACE_AGAIN else message.worker),
            death=self._losses.death_of(message.dead_worker, is_certain=True) if message.dead_worker else None,
        )
        self._attempts.move_soon(request, why)

    # -- frames --------------------------------------------------------------------------------------------------------

    def take_frame(self, frame: Frame) -> None:
        sender, now = self._named(frame), self._keeping.clock()
        self._seen.pulse.heard(frame.worker, now)
        if len(frame.tokens) > MAX_FRAME_TOKENS:  # each unknown stream's end is answered
            self._means.bus.refuse(subjects.frames("any", frame.worker), f"{len(frame.tokens)} entries in a frame")
            return
        find, are_tried = self._seen.running.find, self._seen.suspects.are_tried
        for tokens in frame.tokens:
            request = find(tokens.request_id)
            if request is None:
                if tokens.finish:
                    self._acknowledge(frame.worker, tokens, tokens.traceparent)
            elif not are_tried and (token_id := request.state.take_next(tokens, sender, now)) >= 0:
                request.timeline.went_on(now)
                request.mailbox.add(tokens.position, token_id)
            else:
                self._take(request, tokens, sender, now)

    def _named(self, frame: Frame) -> Incarnation:
        """The sender as an interned object, which makes lookups in requests' states faster."""
        known = self._senders.get(frame.worker)
        if known is None or known.number != frame.incarnation:
            if len(self._senders) >= MAX_SENDERS:
                self._senders.clear()
            known = self._senders[frame.worker] = Incarnation(frame.worker, frame.incarnation)
        return known

    def _take(self, request: ActiveRequest, tokens: Tokens, sender: Incarnation, now: float) -> None:
        state = request.state
        if tokens.attempt != state.attempt:
            self._keeping.counters[Event(state.spec.model, "stale_tokens")] += 1
            return
        was_first = state.next_position == 0
        tokens = state.without_own(tokens) if was_first else tokens
        events = state.take(tokens, sender, now)
        if events and was_first:
            request.explain_first_token(tokens, now)
        if events and state.decoder == sender:
            request.place.decodes(now)
        for event in events:
            request.timeline.took(tokens, len(event.token_ids), event.finish, now)
            request.mailbox.put(event)
        if events and request.prefilled != state.attempt:
            request.prefilled = state.attempt
            self._rooms.computed(state.spec, is_first=was_first)
            self._attempts.release_prefill(request)
        if self._seen.suspects.are_tried or state.deaths or state.is_suspect:
            self._seen.suspects.heard(state, sender)
        elif events:
            state.flows(sender)
        if state.is_over:
            self._acknowledge(sender.worker, tokens, request.context)
            # End it before the loop turns: the reader of the last event cancels unfinished requests.
            self._attempts.end(request, None)

    def _acknowledge(self, worker: str, last: Tokens, traceparent: str | UnsetType) -> None:
        """Let the worker forget the stream: its last tokens are here."""
        received = Received(request_id=last.request_id, attempt=last.attempt, traceparent=traceparent)
        self._keeping.background.see_to(self._means.orders.received(worker, received))

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Subscribe to workers' heartbeats, role changes, and losses."""
        self._seen.peers.on_lost(self._on_lost)
        self._seen.peers.on_heard(self._on_heard)
        self._seen.peers.on_changed(self._on_changed)

    def _on_heard(self, worker: str) -> None:
        now = self._keeping.clock()
        self._seen.pulse.heard(worker, now)
        self._fleet.heard(worker, now)
        state = self._seen.peers.states.get(worker)
        if state is not None:
            self._seen.suspects.returned(incarnation_of(state))

    def _on_changed(self, worker: WorkerState) -> None:
        for request in self._seen.running:
            self._attempts.take_back(request, worker)

    def _on_lost(self, worker: str, incarnation: int) -> None:
        died = self._seen.pulse.is_fresh(worker, self._keeping.clock()) and not self._seen.peers.left(
            worker, incarnation
        )
        self._losses.lost(Incarnation(worker, incarnation), "worker lost", died=died)


def _ms_until(instant: float, now: float) -> int:
    return max(0, int((instant - now) * 1000))
