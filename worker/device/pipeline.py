"""The pipeline of passes: plan, launch, deliver, with two passes in flight, or as many as the model has stages.

The roles decide (`plan`, `apply`) on the event loop; threads launch and await passes, so heartbeats and control messages
go on meanwhile. The device never waits for a decision: pass n + 1 is planned and launched while it computes pass n.

    event loop   plan n+1 ─ apply n-1 ──────── apply n ─ plan n+2 ──────
    device       ─────── pass n ──────────────▶─────── pass n+1 ───────▶

With both roles, decode tokens and prefill chunks share a pass: the roles plan in order, each with the token budget that
the ones before it left.

In stages each computes another pass:

    stage 0   pass n ─ pass n+1 ─ pass n+2
    stage 1            pass n ─── pass n+1
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as ListOf
from typing import Protocol
from weakref import WeakKeyDictionary

from engine.engine import Chunk, Sampled
from engine.sequence import Sequence
from worker.device.costs import Waited
from worker.device.launcher import Clock, Launch, Launcher, SteppingEngine, Threads
from worker.device.prompt_budget import PassLoad, PromptBudget
from worker.device.trials import Trials

log = logging.getLogger("baton.device")

MAX_IN_FLIGHT = 2  # one computing, one queued
IDLE_AFTER_S = 0.005  # a device without work for this long counts as idle
MAX_FAILED_PASSES = 3  # consecutive: no single request can be at fault


class Planner(Protocol):
    """A role's share of the pipeline. Each planned chunk gets one `apply` or one `failed`, in order."""

    def plan(self, token_budget: int) -> list[Chunk]:
        """Choose this role's part of the next pass, at most `token_budget` tokens; others may be in flight.

        Block tables must cover the part until its result came.
        """
        ...

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        """Take the results of this role's chunks. Must not raise because of a single sequence."""
        ...

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        """Record that these chunks got no results, nor will later chunks of the same sequences."""
        ...


class Pipeline:
    """Runs passes while any role has work, otherwise sleeps. `steps` counts finished passes, `pass_s` their time."""

    def __init__(
        self,
        *,
        engine: SteppingEngine,
        budget: PromptBudget,
        trials: Trials | None = None,
        health: DeviceHealth | None = None,
        announce: Callable[[Sequence], Awaitable[None]] | None = None,
        threads: Threads | None = None,
        clock: Clock | None = None,
        stages: int = 1,
    ) -> None:
        """`announce(suspect)` is awaited before a pass with a suspect is launched. `stages`: of the engine's model."""
        self.budget = budget
        self.stages = stages
        self.steps = 0
        self.pass_s = 0.0
        self._trials = trials or Trials()
        self._health = health or DeviceHealth()
        self._announce = announce
        self._clock = clock or time.monotonic
        self._launcher = Launcher(engine, threads=threads, clock=self._clock)
        self._planners: list[tuple[Planner, Callable[[], int]]] = []
        self._wake = asyncio.Event()
        self._launches: deque[Launch] = deque()  # oldest first, until delivered
        # Sequences whose pass failed: later ones in flight were for nothing.
        self._lost = WeakKeyDictionary[Sequence, Exception]()
        self._over_at = 0.0  # when the last pass ended

    @property
    def busy(self) -> bool:
        return bool(self._launches)

    @property
    def in_flight(self) -> list[list[Chunk]]:
        """The chunks of the passes in flight, oldest first."""
        return [launch.chunks for launch in self._launches]

    @property
    def num_in_flight(self) -> int:
        return len(self._launches)

    @property
    def broken(self) -> str:
        """The reason that this device is broken; "" while it works."""
        oldest = self._launches[0] if self._launches else None
        if oldest is None or oldest.over.done():
            return self._health.problem()
        return self._health.problem(waited_s=self._clock() - max(oldest.submitted_at, self._over_at))

    def attach(self, planner: Planner, *, backlog: Callable[[], int] = lambda: 0) -> None:
        """Give `planner` a share of every later pass. `backlog()`: prompt tokens waiting with it."""
        self._planners.append((planner, backlog))

    def wake(self) -> None:
        """Wake the pipeline: a role may have work."""
        self._wake.set()

    async def run(self) -> None:
        """Run passes until cancelled. Cancellation waits for the passes in flight and drops their results."""
        try:
            while True:
                self._wake.clear()
                while self._launches and self._launches[0].over.done():
                    self._deliver(self._launches.popleft())
                while len(self._launches) < max(MAX_IN_FLIGHT, self.stages) and any(shares := self._plan()):
                    suspect = self._trials.on_trial(shares)
                    if suspect is not None and self._announce is not None:
                        await self._announce(suspect)
                    self._launches.append(self._launcher.submit(shares, when_over=self.wake))
                await self._wake.wait()
        except Exception as error:
            self._health.lose(error)
            raise
        finally:
            await self._launcher.close(self._launches)
            self._launches.clear()

    def _plan(self) -> list[list[Chunk]]:
        """Each planner's part of the next pass. Planners after one that decodes share the prompt budget."""
        backlogs = sum(backlog() for _, backlog in self._planners) if self.stages > 1 else 0
        token_budget, decoding, prompt_tokens, shares = self.budget.in_stages(self.stages, backlogs), 0, 0, []
        for planner, backlog in self._planners:
            if decoding:
                most = self.budget.tokens(backlog(), decoding=decoding)
                token_budget = max(0, min(token_budget, most - prompt_tokens))
            share = planner.plan(token_budget)
            self._trials.planned(share)
            load = PassLoad.of(share)
            token_budget -= load.decoding + load.prompt_tokens
            prompt_tokens += load.prompt_tokens
            decoding = load.decoding or decoding or self._num_decoding
            shares.append(share)
        if decoding:
            self.budget.planned(decoding=decoding, prompt_tokens=prompt_tokens)
        return shares

    @property
    def _num_decoding(self) -> int:
        """Rows in flight, which the next pass delays as well: it is before their next one in each stage."""
        if self.stages == 1:
            return 0
        return max((PassLoad.of(launch.chunks).decoding for launch in self._launches), default=0)

    def _deliver(self, launch: Launch) -> None:
        self.steps += 1
        self._trials.landed(launch.chunks)
        try:
            results = launch.over.result()
        except Exception as error:
            log.exception("device.step_failed", extra={"chunks": len(launch.chunks)})
            self._health.failed(error)
            self._lost.update((chunk.sequence, error) for chunk in launch.chunks)
            for (planner, _), share in zip(self._planners, launch.shares, strict=False):
                planner.failed(share, error)
            return
        if results:  # empty if the previous pass lost all its sequences
            self._health.passed()
        self._measure(launch)
        for (planner, _), share in zip(self._planners, launch.shares, strict=False):
            lost = [chunk for chunk in share if chunk.sequence in self._lost]
            if lost:
                planner.failed(lost, self._lost[lost[0].sequence])
            planner.apply([(chunk, results[chunk]) for chunk in share if chunk.sequence not in self._lost])

    def _measure(self, launch: Launch) -> None:
        """Report the pass's duration to the budget. A pass launched early began when the previous one ended."""
        seconds = launch.over_at - max(launch.began_at, self._over_at)
        after_idling = launch.began_at - self._over_at > IDLE_AFTER_S
        waited = None
        if launch.submitted_at >= self._over_at and not after_idling:
            ms, device_ms = (1000 * (launch.over_at - began) for began in (self._over_at, launch.launched_at))
            waited = Waited(ms, device_ms, len(launch.chunks))
        self._over_at = launch.over_at
        self.pass_s += seconds
        self.budget.measured(PassLoad.of(launch.chunks), seconds, after_idling=after_idling, waited=waited)


class DeviceHealth:
    """Tracks failures, and decides if the device is broken."""

    def __init__(self, *, step_timeout_s: float = 120.0) -> None:
        """`step_timeout_s`: longer passes count as hung."""
        self._step_timeout_s = step_timeout_s
        self._failures_in_a_row = 0
        self._lost = ""

    def passed(self) -> None:
        self._failures_in_a_row = 0

    def failed(self, error: Exception) -> None:
        self._failures_in_a_row += 1
        if is_lost(error):
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Record that no further pass will run."""
        self._lost = f"{type(error).__name__}: {error}".splitlines()[0]

    def problem(self, *, waited_s: float = 0.0) -> str:
        """Return why the device is broken; "" while it works. `waited_s`: duration of the current pass so far."""
        if self._lost:
            return self._lost
        if self._failures_in_a_row >= MAX_FAILED_PASSES:
            return f"{self._failures_in_a_row} passes in a row failed"
        return f"a pass takes {waited_s:.0f} s" if waited_s > self._step_timeout_s else ""


def is_lost(error: Exception) -> bool:
    """True if every later pass will fail, too: most CUDA errors destroy the process's context."""
    return "CUDA error" in str(error)
