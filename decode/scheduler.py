"""Continuous batching: the sequences of the next pass, and preemption when blocks run out.

Order of a pass: each running sequence that decodes gets its token; the rest of the budget goes to prompts computed here
(local prefill, or preempted sequences) in the order of their `Pacing`, running or waiting, which are admitted then. If a
sequence can't grow, the youngest of the lowest priority is preempted, one that was passed often last: its blocks go back (full
ones stay cached, and of states its `ResumePoint`) and it waits again, behind whose turn it is (`worker.serving.turns`).
Sampling depends on (seed, position) alone, so its text does not change.

A sequence with a draft (`decode.drafts`) sits out until the tokens are known that its pass accepts, and one whose token in
flight is likely to be followed by a draft until that token is. The others go on with two passes in flight, or wait, too, where
the steps that those miss cost more. In stages, each has a part of the streams (`decode.micro_batches`).

A pass in flight keeps its sequences' blocks (`HeldBlocks`). A victim in such a pass is therefore left out of the plan, so
that the next plan finds it free.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from decode.drafts.speculation import NO_SPECULATION, Speculation
from decode.pacing import UNDIVIDED, UNPACED, Division, Pacing, Plan
from decode.request import DecodeRequest
from decode.resume_point import ResumePoint
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.engine import Chunk
from engine.groups import LEAST_AHEAD
from engine.sequence import Sequence
from worker.context import Elsewhere
from worker.device.trials import Trials
from worker.serving.allocation import HeldBlocks, admit, cover, expected_cached, grow, lacks, needs
from worker.serving.chunks import schedule
from worker.serving.turns import MOST_PASSED, Turns, Wait
from worker.serving.twins import awaits_twin


class DecodeScheduler:
    """Owns the order of the sequences, and through the pool their blocks."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        max_sequences: int,
        max_model_len: int,
        pacing: Pacing = UNPACED,
        expected: Callable[[], int] = lambda: 0,
        trials: Trials | None = None,
        turns: Turns | None = None,
        speculation: Speculation = NO_SPECULATION,
    ) -> None:
        """`pacing`: the order of prompts, and how many of their tokens join a pass.

        `expected()`: sequences that are about to join. They have their places, and passes without decoding are bounded, too.
        """
        self._trials = trials or Trials()
        self._turns = turns or Turns()
        self._pacing = pacing
        self._expected = expected
        self._pool = pool
        self._max_sequences = max_sequences
        self._max_model_len = max_model_len
        self.running: list[DecodeRequest] = []  # with blocks, in order of arrival
        self.waiting: deque[DecodeRequest] = deque()  # without blocks
        self.blocks = HeldBlocks(pool)
        self.resume_point = ResumePoint(pool)
        self._speculation = speculation
        self._num_verifying = 0  # drafts in flight
        self._may_draft = False  # there is room, also for the state behind a drafted token
        self._in_flight: dict[Sequence, DecodeRequest] = {}
        self.preemptions = 0
        self.elsewhere = Elsewhere()
        self.batches: Division = UNDIVIDED

    def __iter__(self) -> Iterator[DecodeRequest]:
        yield from self.running
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def lacks_blocks(self) -> bool:
        """True if a waiting request found no room."""
        return any(request.sequence in self._turns for request in self.waiting)

    def join(self, request: DecodeRequest) -> None:
        """Add a sequence that already holds its blocks (after a handoff)."""
        self.running.append(request)

    def enqueue(self, request: DecodeRequest) -> None:
        """Add a sequence without blocks (local prefill)."""
        request.num_expected = expected_cached(self._pool, request.sequence)
        self.waiting.append(request)

    def remove(self, request: DecodeRequest) -> None:
        """Remove a sequence; its blocks go back when no pass uses them. Unknown ones are ignored."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._turns.leaves(request.sequence)
            self.elsewhere.left(request.sequence)
        self.blocks.give_back(request.sequence)
        self.resume_point.drop(request.sequence)

    def landed(self, chunk: Chunk) -> DecodeRequest:
        """Record the end of the chunk's pass, with or without a result. Its request may have left meanwhile."""
        request = self._in_flight[chunk.sequence]
        self._num_verifying -= bool(chunk.drafted)
        self.blocks.landed(chunk.sequence)
        if not self.blocks.in_use(chunk.sequence):
            del self._in_flight[chunk.sequence]
        return request

    def plan(self, token_budget: int) -> list[Chunk]:
        """Plan the next pass. A chunk's positions stay covered by its block table until the chunk has `landed`.

        Without a chunk, planning needs a finished pass, blocks or requests.
        """
        if len(self._pool.groups) > 1:
            self._keep_resume_point()
        self.elsewhere.store_ahead()
        verifying = 0 if self.batches.are_several else self._num_verifying
        if self._speculation.stops_the_others(verifying, len(self.running)):
            return []
        plan = self._planned(token_budget)
        while not plan.shares and plan.has_preempted:  # the one in turn was itself preempted: try the others
            plan = self._planned(token_budget)
        self.batches.planned([request.sequence for request in plan.shares])
        self._note_waits(plan)
        drafted = self._drafted(plan, most_rows=token_budget - sum(plan.shares.values()) + len(plan.shares))
        return [
            self._schedule(request, num_tokens, drafted.get(request.sequence, ()))
            for request, num_tokens in plan.shares.items()
        ]

    def _note_waits(self, plan: Plan) -> None:
        """Note why prompts that no pass has begun go on to wait; those of this one count as begun after it."""
        now, is_full = time.monotonic(), len(self.running) >= self._max_sequences - self._expected()
        for request in (*self.waiting, *plan.shares):
            if request.started_at:
                continue
            if self.elsewhere.is_loading(request.sequence):
                reason = Wait.LOAD
            elif request.sequence in self._turns:
                reason = Wait.ROOM
            else:
                reason = Wait.PLACE if is_full else Wait.PROMPTS
            request.waits.note(reason, since=request.began_at, now=now)

    def _planned(self, token_budget: int) -> Plan:
        plan = Plan(token_budget, turns=self._in_turn())
        has_room = self._pool.num_free - self._spare >= self._pool.fixed
        self._may_draft = has_room and self._speculation is not NO_SPECULATION
        candidates = [request for request in self.running if self._goes_on(request)]
        held_back = self._held_back(candidates)
        candidates = [request for request in candidates if request.sequence not in held_back]
        candidates = self.batches.of_next(candidates, self.running, others_wait=bool(self.waiting))
        for request in candidates:
            if not request.is_prompt:
                self._add(request, plan)
        running = set(candidates)
        for request in [one for one in plan.turns if one in running]:
            self._bound_prompts(plan, context=request.sequence.num_scheduled)
            if not plan.is_short and not plan.is_full:
                self._admit_waiting(plan, held_back, before=plan.turns[request])
            self._add(request, plan)
        if self.waiting and not plan.is_short and not plan.is_full:
            self._bound_prompts(plan, context=None)  # its context is known when the next prompt is admitted
            self._admit_waiting(plan, held_back)
        return plan

    def _add(self, request: DecodeRequest, plan: Plan) -> None:
        """Add a running request's next tokens to the plan, as far as there is room for them."""
        if request in plan.left_out or plan.scores_another(request):
            return
        num_tokens = self._coverable(request, min(request.sequence.num_next, plan.token_budget))
        if num_tokens > 0 and self._make_room(request, num_tokens, plan):
            plan.add(request, num_tokens)

    def _held_back(self, candidates: list[DecodeRequest]) -> set[Sequence]:
        """Suspects that wait: the one with the fewest tokens sampled here goes first."""
        if self._trials.is_idle:
            return set()
        in_turn = sorted(candidates, key=lambda request: request.sequence.num_generated - request.num_before)
        return self._trials.held_back([request.sequence for request in (*in_turn, *self.waiting)])

    def _bound_prompts(self, plan: Plan, *, context: int | None) -> None:
        """Bound the prompt tokens of the pass, so that neither streams nor prompts that arrive wait too long."""
        if plan.is_bounded:
            return
        plan.is_bounded = True
        streams = [*plan.shares] or [one for one in self.running if not one.is_prompt]  # all of them may sit out
        if streams or self._expected():
            prompts = [one for one in plan.turns if one.is_prompt]
            if prompts and not prompts[0].sequence.tables:
                context = None  # known when it is admitted
            budget = self._pacing.tokens(streams, prompts, context=context)
        else:
            budget = self._pacing.tokens_alone()
        plan.token_budget = min(plan.token_budget, budget)

    def _goes_on(self, request: DecodeRequest) -> bool:
        """True if a token follows the one in flight, and no draft waits for that; assumed if only a stop token can tell."""
        sequence = request.sequence
        if not sequence.num_pending:
            return True
        if sequence.num_unscheduled < 1:  # its draft is being verified
            return False
        num_generated = sequence.num_generated + sequence.num_pending
        if num_generated >= sequence.sampling.max_tokens or sequence.num_tokens >= self._max_model_len:
            return False
        return not (self._most_drafted(request) and self._speculation.awaits(sequence, rows=len(self.running)))

    def _most_drafted(self, request: DecodeRequest) -> int:
        """Tokens that may be drafted, with room for the one sampled behind them; 0 = none."""
        sequence = request.sequence
        if not self._may_draft or sequence.is_suspect:
            return 0
        most = min(sequence.sampling.max_tokens + sequence.num_prompt_tokens, self._max_model_len)
        return max(0, most - len(sequence.token_ids) - 1)

    def _drafted(self, plan: Plan, *, most_rows: int) -> dict[Sequence, tuple[int, ...]]:
        """The drafts of the pass, as far as free blocks reach: nobody is preempted for them.

        `most_rows`: of sequences and drafted tokens together.
        """
        wanted = {
            request.sequence: most
            for request in plan.shares
            if not request.sequence.num_pending
            and request.sequence.num_unscheduled == 1
            and (most := self._most_drafted(request))
        }
        if not wanted:
            return {}
        drafts = self._speculation.drafts(wanted, rows=len(plan.shares), most_rows=most_rows)
        drafts = {sequence: tokens for sequence, tokens in drafts.items() if self._has_room(sequence, len(tokens))}
        for sequence in wanted if self._speculation.ahead else ():
            self._has_room(sequence, len(drafts.get(sequence, ())) + self._speculation.ahead)
        return drafts

    def _has_room(self, sequence: Sequence, num_drafted: int) -> bool:
        """Cover a draft with free blocks, leaving one for each running sequence; return False without them."""
        num_positions = min(sequence.num_scheduled + 1 + num_drafted, self._max_model_len)
        if lacks(self._pool, sequence, num_tokens=num_positions) > self._pool.num_free - self._spare:
            return False
        grow(self._pool, sequence, num_tokens=num_positions)
        return True

    def _coverable(self, request: DecodeRequest, num_tokens: int) -> int:
        """Number of a prompt's next tokens that have their entries, or get them without preemption.

        None only while a pass is in flight: what it leaves behind will do.
        """
        if not request.is_prompt:
            return num_tokens
        return cover(self._pool, request.sequence, num_tokens, spare=self._spare)

    def _make_room(self, request: DecodeRequest, num_tokens: int, plan: Plan) -> bool:
        """Cover the chunk with blocks, preempting others if necessary; return False if the request itself must wait."""
        num_positions = request.sequence.num_scheduled + num_tokens
        while True:
            if plan.waits_for_blocks and lacks(self._pool, request.sequence, num_tokens=num_positions):
                return False  # an earlier request waits for these blocks
            try:
                grow(self._pool, request.sequence, num_tokens=num_positions)
                return True
            except OutOfBlocksError:
                plan.is_short = True
            if self.blocks.awaited:
                plan.waits_for_blocks = True  # freed at the end of the passes in flight
                continue
            victim = self._victim()
            plan.leave_out(victim)
            if self.blocks.in_use(victim.sequence):
                plan.waits_for_blocks = True  # the next plan can preempt the victim
                continue
            self._preempt(victim)
            plan.has_preempted = True
            if victim is request:
                return False

    def _victim(self) -> DecodeRequest:
        youngest_first = reversed(self.running)
        return min(youngest_first, key=lambda request: (request.passed >= MOST_PASSED, request.job.priority))

    def _preempt(self, request: DecodeRequest) -> None:
        self.running.remove(request)
        self.blocks.give_back(request.sequence)
        self.resume_point.give_way(request.sequence)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
        self._wait(request)  # its freed blocks are kept for it, if it was overtaken often

    def _keep_resume_point(self) -> None:
        """Update the resume point. A lone sequence is never preempted, and held blocks would only reduce room."""
        if len(self.running) > 1:
            self.resume_point.keep(self._victim().sequence, spare=self._spare)
        else:
            self.resume_point.drop()

    def _in_turn(self) -> dict[DecodeRequest, float]:
        """Return prompts in their turns, with these; order who waits so, and move a request that is due blocks to the front."""
        prompts = [*(one for one in self.running if one.is_prompt), *self.waiting]
        turns = dict(sorted(((one, self._pacing.turn(one)) for one in prompts), key=lambda each: each[1]))  # stable
        waiting = set(self.waiting)
        self.waiting = deque(request for request in turns if request in waiting)
        for sequence in self._turns.due:
            for request in self.waiting:
                if request.sequence is sequence:
                    self.waiting.remove(request)
                    self.waiting.appendleft(request)
                    return turns
        return turns

    def _admit_waiting(self, plan: Plan, held_back: set[Sequence], *, before: float = math.inf) -> None:
        """Admit those whose turn is `before` a running prompt's."""
        most = self._max_sequences - self._expected()
        computing = [one for one in self.running if one.sequence.num_computed < len(one.sequence.token_ids) - 1]
        for request in list(self.waiting):
            if plan.token_budget <= 0 or len(self.running) >= most:
                return
            if before < math.inf and plan.turns.get(request, -math.inf) >= before:
                return
            if request.sequence in held_back or plan.scores_another(request):
                return
            before_it = [one.sequence for one in computing if one.job.priority >= request.job.priority]
            if before_it and awaits_twin(self._pool, request.sequence, before_it):
                continue
            if not self._admit(request, ahead=plan.token_budget):
                if self.elsewhere.is_pulled(request.sequence):
                    continue
                plan.is_full = True
                return
            self.waiting.remove(request)
            self.running.append(request)
            computing.append(request)
            self.elsewhere.left(request.sequence)
            request.passed = max(request.passed, self._turns.admitted(request.sequence))
            num_tokens = min(request.sequence.num_next, plan.token_budget)
            plan.add(request, cover(self._pool, request.sequence, num_tokens, spare=self._spare))

    def _admit(self, request: DecodeRequest, *, ahead: int) -> bool:
        """Give it blocks, and windows' entries for `ahead` tokens. Else it waits, and all behind it.

        For what it has in host memory or at a peer it waits first, but for no blocks then; behind a pull nobody waits.
        """
        pool, spare = self._pool, self._room_to_grow + self._turns.kept_from(request.sequence)
        num_tokens = len(request.sequence.token_ids) + 1
        if pool.num_free >= needs(pool, num_tokens=num_tokens, ahead=ahead, spare=spare) + spare:
            if self.elsewhere.brings(request.sequence):
                return False
            with contextlib.suppress(OutOfBlocksError):  # with the entries that it found it needs more
                admit(pool, request.sequence, num_tokens=num_tokens, spare=spare, ahead=ahead)
                return True
        for one in self.waiting:
            self._wait(one)
        return False

    def _wait(self, request: DecodeRequest) -> None:
        pool, spare, num_tokens = self._pool, self._room_to_grow, len(request.sequence.token_ids) + 1
        needed = spare + needs(pool, num_tokens=num_tokens, ahead=LEAST_AHEAD, spare=spare)
        self._turns.waits(request.sequence, blocks=max(needed, pool.num_free + 1), passed=request.passed)

    @property
    def _room_to_grow(self) -> int:
        """One block for each running sequence."""
        return len(self.running) * self._pool.growth

    def _schedule(self, request: DecodeRequest, num_tokens: int, drafted: tuple[int, ...]) -> Chunk:
        self.blocks.launched(request.sequence)
        self._in_flight[request.sequence] = request
        request.started_at = request.started_at or time.monotonic()
        pool, nobody_waits = self._pool, not self._turns.are_open
        chunk = schedule(
            pool, request.sequence, num_tokens, drafted=drafted, spare=self._spare, leaves_ends=nobody_waits
        )
        self._num_verifying += bool(chunk.drafted)
        return chunk

    @property
    def _spare(self) -> int:
        """Return the blocks that state snapshots and prompts' windows leave: one a running sequence, and one a state."""
        return self._room_to_grow + self._pool.fixed
