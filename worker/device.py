"""The device loop: one forward pass after another, filled by the roles that live in this process.

The roles decide (`plan`, `apply`) on the event loop; the pass itself runs in one worker thread, so heartbeats and control
messages go on while the device is busy. A worker with both roles mixes decode tokens and prefill chunks in one pass: the
roles plan in the order given, each with what the ones before it left of the token budget.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as ListOf
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from engine.engine import Chunk, Sampled

log = logging.getLogger("baton.device")

RATE_SMOOTHING = 0.2  # weight of the newest step in the exponential averages


class SteppingEngine(Protocol):
    """What the loop needs of an engine; `Engine` and `FakeEngine` both have it."""

    def step(self, chunks: list[Chunk]) -> list[Sampled | None]: ...


class Planner(Protocol):
    """A role's share in the device loop."""

    def plan(self, token_budget: int) -> list[Chunk]:
        """Choose this role's part of the next pass, of `token_budget` tokens at most. Block tables must cover it."""
        ...

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        """Take the pass's results of this role's chunks. Must not raise for one sequence's sake."""
        ...

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        """The pass raised: none of its results exist."""
        ...


class DeviceLoop:
    """Runs steps while any role has work, else waits to be woken. `steps` counts finished passes."""

    def __init__(self, *, engine: SteppingEngine, token_budget: int) -> None:
        self._engine = engine
        self._token_budget = token_budget
        self._planners: list[Planner] = []
        self._wake = asyncio.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self.steps = 0
        self.busy = False
        self.prefill_tokens_per_s = 0.0
        self.decode_step_ms = 0.0

    def attach(self, planner: Planner) -> None:
        """Give `planner` a share of every pass from the next one on."""
        self._planners.append(planner)

    def wake(self) -> None:
        """Some role may have work now."""
        self._wake.set()

    async def run(self) -> None:
        """Step until cancelled. Cancellation waits for the pass in flight."""
        try:
            while True:
                self._wake.clear()
                shares = self._plan()
                if not any(shares):
                    self.busy = False
                    await self._wake.wait()
                    continue
                self.busy = True
                await self._step(shares)
        finally:
            self.busy = False
            self._executor.shutdown(wait=True)

    def _plan(self) -> list[list[Chunk]]:
        budget, shares = self._token_budget, []
        for planner in self._planners:
            share = planner.plan(budget)
            budget -= sum(chunk.num_tokens for chunk in share)
            shares.append(share)
        return shares

    async def _step(self, shares: list[list[Chunk]]) -> None:
        chunks = [chunk for share in shares for chunk in share]
        started = time.monotonic()
        pass_ = asyncio.get_running_loop().run_in_executor(self._executor, self._engine.step, chunks)
        try:
            results = await asyncio.shield(pass_)
        except asyncio.CancelledError:
            await asyncio.wait([pass_])
            raise
        except Exception as error:
            log.exception("device.step_failed", extra={"chunks": len(chunks)})
            for planner, share in zip(self._planners, shares, strict=True):
                planner.failed(share, error)
            self.steps += 1
            return
        self._measure(chunks, time.monotonic() - started)
        self.steps += 1
        offset = 0
        for planner, share in zip(self._planners, shares, strict=True):
            planner.apply(list(zip(share, results[offset : offset + len(share)], strict=True)))
            offset += len(share)

    def _measure(self, chunks: list[Chunk], seconds: float) -> None:
        tokens = sum(chunk.num_tokens for chunk in chunks)
        if tokens == len(chunks):
            self.decode_step_ms = _smooth(self.decode_step_ms, seconds * 1000)
        elif tokens >= 8 * len(chunks):
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, tokens / max(seconds, 1e-6))


def _smooth(average: float, newest: float) -> float:
    return newest if average == 0 else average + RATE_SMOOTHING * (newest - average)
