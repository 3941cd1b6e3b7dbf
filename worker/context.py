"""The shared parts of a worker, as its roles see them, with its counters and the tasks that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from common.errors import UnavailableError
from common.messages import (
    DRAFT_POSITIONS,
    Ages,
    EvictedBlocks,
    HostTierTotals,
    Job,
    KVLayout,
    PullTotals,
    WorkerTotals,
)
from common.tracing import Tracer
from engine.cache.block_pool import BlockPool
from engine.grammars.grammars import Grammars
from engine.sequence import Sequence
from kvtransfer.transport import Transfers
from worker.device.prompt_budget import PromptBudget
from worker.device.trials import Trials
from worker.identity import Identity, Messenger
from worker.pulls.puller import Puller
from worker.roles import Roles
from worker.serving.allocation import admit_in_turn, needs
from worker.serving.jobs import FrameOutbox, JobIntake
from worker.serving.turns import Turns
from worker.serving.twins import awaits_twin
from worker.tier.host_tier import HostTier

log = logging.getLogger("baton.worker")


@dataclass(slots=True)
class Totals:
    """Counters that the roles add to, on the event loop."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    stateless_tokens: int = 0
    generated_tokens: int = 0
    pushed_blocks: int = 0
    pushed_bytes: int = 0
    push_s: float = 0.0
    kept_bytes: int = 0  # handed over without being sent: they were here
    failed_steps: int = 0
    out_of_memory: int = 0
    refused_handoffs: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    def admitted(self, sequence: Sequence, *, prompt_tokens: int) -> None:
        """Count the lookup of so many tokens in the prefix cache, at the sequence's first admission."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += min(prompt_tokens, sequence.num_found or 0)
        self.stateless_tokens += sequence.num_stateless

    def pushed(self, *, blocks: int, num_bytes: int, seconds: float) -> None:
        """Count blocks written to a decode worker."""
        self.pushed_blocks += blocks
        self.pushed_bytes += num_bytes
        self.push_s += seconds

    def verified(self, *, drafted: int, accepted: int) -> None:
        """Count the tokens of a verified draft."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.drafts += 1
        counted = min(accepted, DRAFT_POSITIONS)
        self.accepted_by_position += [0] * (counted - len(self.accepted_by_position))
        for position in range(counted):
            self.accepted_by_position[position] += 1

    def step_failed(self, error: Exception) -> None:
        """Count a pass without results."""
        self.failed_steps += 1
        self.out_of_memory += "OutOfMemory" in type(error).__name__ or isinstance(
            error, MemoryError
        )  # torch's OOM, or the host's

    def as_message(
        self,
        *,
        preemptions: int,
        bad_digests: int,
        expired_jobs: int,
        lost_frames: int,
        malformed: int,
        dead_letters: int,
        forged: int,
        pass_s: float,
        host: HostTierTotals | None = None,
        disk: HostTierTotals | None = None,
        evicted: EvictedBlocks | None = None,
        ages: tuple[Ages, Ages, Ages] | None = None,
        pulls: PullTotals | None = None,
    ) -> WorkerTotals:
        """The message, with counters kept elsewhere in the worker."""
        lifetime, idle, reuse = ages or (Ages(), Ages(), Ages())
        return WorkerTotals(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            stateless_tokens=self.stateless_tokens,
            generated_tokens=self.generated_tokens,
            pushed_blocks=self.pushed_blocks,
            pushed_bytes=self.pushed_bytes,
            push_s=self.push_s,
            preemptions=preemptions,
            failed_steps=self.failed_steps,
            out_of_memory=self.out_of_memory,
            refused_handoffs=self.refused_handoffs,
            bad_digests=bad_digests,
            expired_jobs=expired_jobs,
            lost_frames=lost_frames,
            malformed=malformed,
            dead_letters=dead_letters,
            forged=forged,
            pass_s=pass_s,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            drafts=self.drafts,
            accepted_by_position=list(self.accepted_by_position),
            host=host or HostTierTotals(),
            disk=disk or HostTierTotals(),
            evicted=evicted or EvictedBlocks(),
            lifetime=lifetime,
            idle=idle,
            reuse=reuse,
            pulls=pulls or PullTotals(),
            kept_bytes=self.kept_bytes,
        )


class Background:
    """Tasks of a worker that nobody awaits."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return list(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine as a background task."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("worker.task_failed", exc_info=task.exception())


async def every(period_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Repeat `action` until cancelled, logging whatever it raises."""
    while True:
        try:
            await action()
        except UnavailableError as error:
            log.debug("worker.unavailable", extra={"action": action.__name__, "error": error.message})
        except Exception:
            log.exception("worker.loop_failed", extra={"action": action.__name__})
        await asyncio.sleep(period_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model's bounds and grammars, as this worker serves it."""

    vocab_size: int
    max_model_len: int  # the longest sequence that fits into the pool
    max_sequences: int
    grammars: Grammars

    async def built(self, sequence: Sequence) -> None:
        """Return once the sequence's grammar is built or has failed, which its first pass reports; at once without one."""
        building = self.grammars.prepare(sequence)
        if building is not None:
            await asyncio.wait([asyncio.wrap_future(building)])


class Admission(Enum):
    """The outcome of an attempt to admit a prompt."""

    ADMITTED = auto()
    LOADING = auto()  # its prefix is on the way here; it waits for no blocks
    SHARING = auto()  # another prompt computes its prefix; likewise
    NO_ROOM = auto()
    BUILDING = auto()  # its grammar; not tried


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The places of prompts' blocks beside the pool: host memory, and peers."""

    tier: HostTier | None = None
    puller: Puller | None = None

    def brings(self, sequence: Sequence, *, has_room: Callable[[], bool] = lambda: True) -> bool:
        """True while a prompt's prefix comes from host memory, or then from a peer; that may begin now."""
        is_below = self.tier is not None and self.tier.is_loading(sequence, has_room=has_room)
        return is_below or self.pulls(sequence, has_room=has_room)

    def pulls(self, sequence: Sequence, *, has_room: Callable[[], bool]) -> bool:
        """True while a prompt's prefix comes from a peer, which may begin now."""
        puller = self.puller
        return puller is not None and sequence in puller.prompts and puller.is_loading(sequence, has_room=has_room)

    def is_loading(self, sequence: Sequence) -> bool:
        """True while a prompt's prefix comes from host memory or a peer."""
        return self.is_pulled(sequence) or (self.tier is not None and self.tier.loads(sequence))

    def is_pulled(self, sequence: Sequence) -> bool:
        """True while a prompt's prefix comes from a peer."""
        return self.puller is not None and sequence in self.puller.prompts and self.puller.loads(sequence)

    def left(self, sequence: Sequence) -> None:
        """Forget a prompt that was admitted, or is wanted no more."""
        if self.tier is not None:
            self.tier.left(sequence)
        if self.puller is not None and sequence in self.puller.prompts:
            self.puller.left(sequence)

    def store_ahead(self) -> None:
        """Store what eviction takes next in host memory, if there is a tier."""
        if self.tier is not None:
            self.tier.store_ahead()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The KV cache: its memory, who holds its blocks, whose turn it is to take some, and where else prompts' blocks are."""

    layout: KVLayout
    kv: torch.Tensor
    pool: BlockPool
    turns: Turns
    tier: HostTier | None = None
    puller: Puller | None = None

    @property
    def elsewhere(self) -> Elsewhere:
        return Elsewhere(self.tier, self.puller)

    def admit_prompt(
        self, sequence: Sequence, *, spare: int, ahead: int, computing: ListOf[Sequence] = ()
    ) -> Admission:
        """Admit a prompt in its turn, once the pool has what host memory, those `computing` or a peer have. See `admit`."""
        pool, turns, num_tokens, elsewhere = self.pool, self.turns, len(sequence.token_ids), self.elsewhere

        def has_room() -> bool:
            kept = spare + turns.kept_from(sequence)
            return pool.num_free - kept >= needs(pool, num_tokens=num_tokens, ahead=ahead, spare=kept)

        if self.tier is not None and self.tier.is_loading(sequence, has_room=has_room):
            return Admission.LOADING
        if computing and awaits_twin(pool, sequence, computing):
            return Admission.SHARING
        if elsewhere.pulls(sequence, has_room=has_room):
            return Admission.LOADING
        if not admit_in_turn(pool, turns, sequence, num_tokens=num_tokens, spare=spare, ahead=ahead):
            return Admission.NO_ROOM
        elsewhere.left(sequence)
        return Admission.ADMITTED

    def offered(self, sequence: Sequence, job: Job) -> None:
        """Note that a peer has more of a prompt, if its job says so."""
        if self.puller is not None and job.holder:
            self.puller.offered(sequence, job)

    def leaves(self, sequence: Sequence) -> None:
        """Forget a prompt that waits for blocks no longer, neither for free ones nor for its own from elsewhere."""
        self.turns.leaves(sequence)
        self.elsewhere.left(sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The pipeline's passes, as roles influence them."""

    wake: Callable[[], None]  # tells the pipeline that a role may have work
    budget: PromptBudget
    trials: Trials
    stages: int = 1  # passes that are computed at a time
    in_flight: Callable[[], int] = lambda: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """The parts of a worker that its roles share."""

    identity: Identity
    model: ServedModel
    cache: KVCache
    passes: Passes
    jobs: JobIntake
    outbox: FrameOutbox
    messenger: Messenger
    transfers: Transfers
    roles: Roles
    background: Background
    totals: Totals
    tracer: Tracer
