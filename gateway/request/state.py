"""The state of one request at its gateway, without I/O.

    QUEUED ──claim──▶ CLAIMED ──first token──▶ PREFILLED ──settle / imported──▶ DECODING ──last token──▶ ENDED
       ▲─────────────────┴────────── new attempt (worker lost, failed, silent) ──────┘

Messages of other attempts than the current one are ignored. Tokens are taken by position: the next one is delivered, earlier ones
are dropped, later ones wait until the gap is filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from common.blocks import unpack_tokens
from common.errors import ServingError
from common.messages import SamplingParams, Tokens
from common.peers import Incarnation
from common.words import Role
from gateway.request.ends import Sign, verdict
from gateway.request.spec import GenerationSpec, TokenEvent

PROGRESS_TOKENS = 4  # tokens of one attempt that prove its path works
CLEAR_AFTER_TOKENS = 4  # progress that clears a suspect; > 2 because passes overlap
MAX_HELD = 64  # frames buffered beyond a gap


class Phase(Enum):
    QUEUED = "queued"
    CLAIMED = "claimed"
    PREFILLED = "prefilled"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """The facts of one request. Instants are seconds of the caller's monotonic clock."""

    spec: GenerationSpec
    deadline_at: float
    attempt: int = 0
    failed: int = 0  # attempts lost on the way, without progress in between: `gateway.request.ends`
    harmed: int = 0  # likewise, passes that failed with it
    proven: int = 0  # the last attempt that made progress
    phase: Phase = Phase.QUEUED
    generated: list[int] = field(default_factory=list)  # delivered tokens, across attempts
    assigned: str = ""  # the worker whose queue has the job
    candidates: list[str] = field(default_factory=list)  # decode workers of the placement
    claimed_by: Incarnation | None = None
    decoder: Incarnation | None = None
    speaker: Incarnation | None = None  # whose tokens may take the fast path `take_next`
    cached_tokens: int = 0  # tokens cached at the chosen worker
    cached_before: dict[str, int] = field(default_factory=dict)  # the same for workers of earlier attempts
    excluded: list[str] = field(default_factory=list)
    progress_at: float = 0.0  # when the current attempt was last heard of
    gap_since: float | None = None
    unanswered: int = 0  # unanswered probes
    deaths: int = 0  # workers that died computing it, without progress in between
    is_suspect: bool = False  # it may have killed a worker: `gateway.lifecycle.running`
    clear_at: int = 0  # generated tokens that clear it of suspicion
    began_with: int = 0  # generated tokens when the attempt began
    _held: dict[int, tuple[Tokens, Incarnation]] = field(default_factory=dict)

    @property
    def fruitless(self) -> int:
        """Attempts since the last progress, this one included."""
        return self.attempt - self.proven

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def next_position(self) -> int:
        return len(self.generated)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and delivered tokens: the start of a new attempt."""
        return self.spec.token_ids + self.generated

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of a new attempt: prompt logprobs came with the first token."""
        if self.spec.sampling.prompt_logprobs is None or not self.generated:
            return self.spec.sampling
        return msgspec.structs.replace(self.spec.sampling, prompt_logprobs=None)

    def waits(self, attempt: int) -> bool:
        """True if `attempt` is the current one and unclaimed."""
        return self.attempt == attempt and self.phase is Phase.QUEUED

    def has_generated(self, run: list[int]) -> bool:
        """True if these tokens were delivered, in sequence."""
        return any(self.generated[at : at + len(run)] == run for at in range(self.next_position))

    def is_closing(self, closing: list[int] | None) -> bool:
        """True if a thinking budget is spent, so that `closing` comes next."""
        grammar = self.spec.grammar
        return (
            grammar is not None
            and grammar.after == closing
            and grammar.budget is not None
            and grammar.budget <= self.next_position
        )

    def begin_attempt(self, now: float) -> bool:
        """Start another attempt; False once it is over."""
        if self.is_over:
            return False
        self.attempt += 1
        for worker in filter(None, (self.assigned, *self.candidates)):
            self.cached_before.setdefault(worker, self.cached_tokens if worker == self.assigned else 0)
        self.began_with = self.next_position
        self.phase = Phase.QUEUED
        self.assigned, self.candidates = "", []
        self.claimed_by = self.decoder = self.speaker = None
        self.gap_since, self.unanswered = None, 0
        self._held.clear()
        self.progress_at = now
        return True

    def gave_up(self, sign: Sign) -> ServingError | None:
        """Count the attempt's end; return the resulting error, if any."""
        self.speaker = None
        self.failed += sign is Sign.FAILED
        if sign is Sign.HARMED:
            self.harmed += 1
            self.suspect()
        return verdict(failed=self.failed, harmed=self.harmed)

    def suspect(self) -> None:
        """Mark it as a suspect, computed alone until it makes progress."""
        self.is_suspect, self.clear_at = True, self.next_position + CLEAR_AFTER_TOKENS
        self.speaker = None

    def is_past(self, attempt: int, position: int) -> bool:
        """True if an attempt's pass behind so many generated tokens (-1: unknown) has given its own."""
        return attempt == self.attempt and 0 <= position < self.next_position

    def exclude(self, worker: str, decode_workers: list[str]) -> None:
        """Place the next attempts elsewhere ("": nobody's fault), unless no decode worker would be left."""
        if worker and worker not in self.excluded:
            self.excluded.append(worker)
        if set(decode_workers) <= set(self.excluded):
            self.excluded.clear()  # better the same worker than none

    def placed(self, worker: str, candidates: list[str]) -> None:
        self.assigned, self.candidates = worker, candidates

    def claim(self, attempt: int, worker: Incarnation, now: float) -> str:
        """Compare-and-set: "" if `worker` may start the attempt (also again), else the reason against it."""
        if self.is_over:
            return "ended"
        if attempt != self.attempt:
            return "stale attempt"
        if self.claimed_by not in (None, worker):
            return "claimed by another worker"
        if self.phase is Phase.QUEUED:
            self.phase, self.claimed_by, self.progress_at = Phase.CLAIMED, worker, now
        return ""

    def settle(self, attempt: int, worker: Incarnation, decoder: Incarnation | None) -> bool:
        """Return True if the job may be acked: its sender holds the current claim, or the request is over."""
        if self.is_over:
            return True
        if attempt != self.attempt or self.claimed_by != worker:
            return False
        if decoder is not None:
            self._decodes(decoder)
        return True

    def imported(self, attempt: int, decoder: Incarnation) -> bool:
        """Record that the decode worker verified the KV; False if its attempt is old."""
        if attempt != self.attempt or self.is_over or not self.may_speak(decoder):
            return False
        self._decodes(decoder)
        return True

    def _decodes(self, decoder: Incarnation) -> None:
        self.decoder, self.speaker = decoder, None
        if self.phase in (Phase.CLAIMED, Phase.PREFILLED):
            self.phase = Phase.DECODING

    def flows(self, sender: Incarnation) -> None:
        """This attempt's identity is confirmed, so later frames may take the fast path `take_next`."""
        if self.phase is Phase.DECODING and self.decoder == sender and self.proven == self.attempt and not self._held:
            self.speaker = sender

    def take_next(self, tokens: Tokens, sender: Incarnation, now: float) -> int:
        """Take a token in the common case: the next one alone, from the attempt's decoder, and nothing else.

        -1: it isn't, and `take` decides.
        """
        packed, generated = tokens.token_ids, self.generated
        if (
            len(packed) != 4
            or tokens.position != len(generated)
            or tokens.attempt != self.attempt
            or sender != self.speaker
            or tokens.finish
            or tokens.logprobs
        ):
            return -1
        token_id = int.from_bytes(packed, "little")
        generated.append(token_id)
        self.progress_at, self.unanswered = now, 0
        return token_id

    def without_own(self, tokens: Tokens) -> Tokens:
        """The cached tokens, without those from this request's own earlier attempts at the worker.

        What an earlier attempt computed or handed over is found in the cache by the next, and is no hit.
        """
        before = self.cached_before.get(self.assigned)
        if before is None or tokens.cached_tokens <= before:
            return tokens
        return msgspec.structs.replace(tokens, cached_tokens=before)

    def take(self, tokens: Tokens, sender: Incarnation, now: float) -> list[TokenEvent]:
        """Take the tokens of a frame; return those deliverable now, in order."""
        if tokens.attempt != self.attempt or self.is_over or not self.may_speak(sender):
            return []
        self.progress_at, self.unanswered = now, 0
        if tokens.position > self.next_position:
            if len(self._held) < MAX_HELD:
                self._held[tokens.position] = (tokens, sender)
            self.speaker = None  # its next token releases those after it
            self.gap_since = self.gap_since if self.gap_since is not None else now
            self.decoder = self.decoder or (sender if sender != self.claimed_by else None)
            return []
        events = self._deliver(tokens, sender)
        while self._held and not self.is_over and min(self._held) <= self.next_position:
            events += self._deliver(*self._held.pop(min(self._held)))
        self.gap_since = now if self._held else None
        return events

    def _deliver(self, tokens: Tokens, sender: Incarnation) -> list[TokenEvent]:
        position = self.next_position
        skip = position - tokens.position
        ids = unpack_tokens(tokens.token_ids)[skip:]
        if not ids:
            return []
        event = TokenEvent(
            position=position,
            token_ids=ids,
            logprobs=tokens.logprobs[skip:],
            finish=tokens.finish,
            cached_tokens=tokens.cached_tokens if position == 0 else -1,
            prompt_logprobs=tokens.prompt_logprobs if position == 0 else None,
        )
        self.generated += ids
        if position + len(ids) - self.began_with >= PROGRESS_TOKENS:
            self.failed, self.proven = 0, self.attempt
        if tokens.finish:
            self.phase = Phase.ENDED
        elif sender != self.claimed_by:
            self._decodes(sender)
        elif self.phase is Phase.CLAIMED:
            self.phase = Phase.PREFILLED
        return [event]

    def is_misplaced(self, worker: str, roles: list[Role]) -> bool:
        """True if the job is queued at `worker`, whose roles no longer fit it."""
        role = Role.PREFILL if self.candidates else Role.DECODE
        return self.phase is Phase.QUEUED and self.assigned == worker and role not in roles

    def pardon(self, seconds: float) -> None:
        """Forgive the silence while this gateway itself was suspended."""
        self.progress_at += seconds
        if self.gap_since is not None:
            self.gap_since += seconds

    def lost(self, worker: Incarnation) -> bool:
        """True if the current attempt needs this worker."""
        if self.is_over:
            return False
        if self.phase is Phase.QUEUED:
            return self.assigned == worker[0]
        if self.phase is Phase.DECODING:
            return self.decoder == worker
        return worker in (self.claimed_by, self.decoder)

    @property
    def needs(self) -> list[str]:
        """The workers that the current attempt needs; see `lost`."""
        if self.is_over:
            return []
        if self.phase is Phase.QUEUED:
            return [self.assigned] if self.assigned else []
        holders = (self.decoder,) if self.phase is Phase.DECODING else (self.claimed_by, self.decoder)
        return [holder[0] for holder in holders if holder is not None]

    def may_speak(self, worker: Incarnation) -> bool:
        """True if tokens of the current attempt may come from this worker."""
        if self.claimed_by is None or worker == self.claimed_by:
            return self.claimed_by is not None
        return worker == self.decoder if self.decoder is not None else worker.worker in self.candidates

    def is_held_by(self, worker: Incarnation) -> bool:
        """True if this incarnation of a worker has the current attempt."""
        return worker in (self.claimed_by, self.decoder)

    def is_with(self, worker: str) -> bool:
        return any(holder is not None and holder[0] == worker for holder in (self.claimed_by, self.decoder))

    def workers(self) -> list[str]:
        """Every worker that may hold resources of the current attempt."""
        named = [worker[0] for worker in (self.claimed_by, self.decoder) if worker]
        undecided = [self.assigned, *self.candidates] if self.decoder is None else []
        return list(dict.fromkeys(name for name in [*named, *undecided] if name))
