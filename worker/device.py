"""The device loop: one forward pass after another, filled by the roles that live in this process.

The roles decide (`plan`, `apply`) on the event loop; passes are launched in one thread and waited for in another, so
heartbeats and control messages go on while the device is busy. The device never waits for a decision: while it computes
pass n, pass n + 1 is planned and launched, and the results of n are applied while it computes n + 1.

    event loop   plan n+1 ─ apply n-1 ──────── apply n ─ plan n+2 ──────
    device       ─────── pass n ──────────────▶─────── pass n+1 ───────▶

A worker with both roles mixes decode tokens and prefill chunks in one pass: the roles plan in the order given, each with
what the ones before it left of the token budget.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as ListOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from engine.engine import Chunk, Pass, Sampled
from engine.passes import Finished
from engine.sequence import Sequence
from worker.prompt_cost import PromptCost, pairs_of
from worker.trials import Trials

log = logging.getLogger("baton.device")

MAX_OUTSTANDING = 2  # the pass that the device computes, and the one that it finds when that is over
RATE_SMOOTHING = 0.2  # weight of the newest pass in the exponential averages
LEAST_BEHIND = 512  # positions that tell what attention takes for each
PROMPT_SMOOTHING = 0.02  # the same over the passes of some prompts: the last ones of each, behind the most, take longer
UNMEASURED_PROMPT_TOKENS = 256  # beside decoding, until a pass has shown how many fit
# What steps with prompts may take, times one of a few sequences without contexts: 4.0 ms for an 8B model on an H200, where 112
# tokens of a prompt cost the least each (results/handover.md). More where no worker computes prompts apart from decoding.
STEP_TARGET, ALONE_TARGET = 1.77, 3.5
BARE_STEP_MS = 4.0  # where none was measured
PASS_STEP = (
    128  # tokens of a pass that decodes and computes prompts: whole tiles of a GPU's products, the sizes of its graphs
)
NEARLY = 1.15  # of the step target: whole tiles a little above it are nearer than those far below
FEWEST_SLOTS = 16  # places for tokens that decode in such a pass; more come in powers of two
FEWEST_PROMPT_TOKENS = 64  # beside decoding, also when the step target is missed: prompts must get on
LEAST_TURNS = 0.5  # of the passes that decode: so many take prompts, also when the mean of them misses the step target
MOST_CREDIT_MS, MOST_DEBT_MS = 3.0, 5.0  # of steps shorter and longer than the target, that later ones make up for
PATIENT_TOKENS = 8192  # waiting prompt tokens from which on the step target gives way: a queue would only grow
IDLE_S = 0.005  # with nothing to do for so long, a device has idled
# about the longest pass of prompts alone while a hand-over is on its way, which would wait for its end
ARRIVAL_S = 0.05
MAX_FAILED_PASSES = 3  # in a row: then it is the device, not the requests
BACKLOG_STEPS = 4  # in about so many passes what waits beyond them is computed


class SteppingEngine(Protocol):
    """What the loop needs of an engine; `Engine` and `FakeEngine` both have it."""

    def launch(self, chunks: list[Chunk]) -> Pass: ...


class Planner(Protocol):
    """A role's share in the device loop. For each planned chunk, in order, comes one `apply` or one `failed`."""

    def plan(self, token_budget: int) -> list[Chunk]:
        """Choose this role's part of the next pass, of `token_budget` tokens at most; one pass may be in flight.

        Block tables must cover the part, and keep doing so until its result came.
        """
        ...

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        """Take a pass's results of this role's chunks. Must not raise for one sequence's sake."""
        ...

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        """There are no results of these chunks, nor will be of later chunks of the same sequences."""
        ...


class DeviceLoop:
    """Runs passes while any role has work, else waits to be woken. `steps` counts passes that are over."""

    def __init__(
        self,
        *,
        engine: SteppingEngine,
        token_budget: int,
        step_target_ms: float = 0.0,
        step_timeout_s: float = 120.0,
        pass_ms: Mapping[tuple[int, int], float] | None = None,
        announce: Callable[[Sequence], Awaitable[None]] | None = None,
    ) -> None:
        """`step_target_ms`: how long passes that decode may take in the mean while prompts are computed; 0 = no matter.

        `step_timeout_s`: a pass that takes longer will never end. `pass_ms`: what passes take, by places for tokens that decode
        (0: none do) and prompts' tokens.
        """
        self.trials = Trials()
        self._announce = announce
        self._step_timeout_s = step_timeout_s
        self._failed_passes = 0  # in a row
        self._lost = ""  # why nothing can be computed any more
        self._engine = engine
        self._token_budget = token_budget
        self.step_target_ms = step_target_ms
        self._planners: list[Planner] = []
        self._backlogs: list[Callable[[], int]] = []
        self._wake = asyncio.Event()
        self._outstanding: deque[_Launch] = deque()
        self._failure = _Failure()  # of the pass that was delivered last
        self._refused: set[Sequence] = set()  # those of the last launch if it raised; the device thread's own
        self._over_at = 0.0  # when the last pass was over
        self._device_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._waiting_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device-wait")
        self.steps = 0
        self.busy = False
        alone = {tokens: ms / 1000 for (slots, tokens), ms in (pass_ms or {}).items() if not slots}
        self.prompt_cost = PromptCost(alone)  # of a pass of prompts alone
        self._beside_tokens_per_s = 0.0  # prompt tokens by what they add to a decode step
        self.decode_step_ms = 0.0
        self._num_decoding = 1  # in the newest pass that decoded
        self._shares = _shares(pass_ms or {})
        self._credit_ms = 0.0  # by how much the last steps were shorter than the target
        self._took_prompts = False  # the newest pass that decodes
        self._attention_ms = 0.0  # of prompts in such passes, beside what `pass_ms` says: the mean of whole prompts
        self._behind_ms = 0.0  # the same for each position before a prompt's part
        self._num_mixed = 0
        if pass_ms:
            told = {f"{slots}+{tokens}": round(ms, 2) for (slots, tokens), ms in sorted(pass_ms.items())}
            log.info("device.measured", extra={"pass_ms": told})

    @property
    def broken(self) -> str:
        """Why this device will compute nothing more; "" while it may."""
        if self._lost:
            return self._lost
        if self._failed_passes >= MAX_FAILED_PASSES:
            return f"{self._failed_passes} passes in a row failed"
        oldest = self._outstanding[0] if self._outstanding else None
        if oldest is None or oldest.over.done():
            return ""
        waited_s = time.monotonic() - max(oldest.submitted_at, self._over_at)
        return f"a pass takes {waited_s:.0f} s" if waited_s > self._step_timeout_s else ""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured rate of passes of prompts alone, beside their fixed cost; 0 = not measured yet."""
        return self.prompt_cost.average_tokens_per_s

    @property
    def prefill_fixed_ms(self) -> float:
        """What a pass of prompts takes beside its tokens, measured."""
        return self.prompt_cost.average_fixed_ms

    @property
    def local_tokens_per_s(self) -> float:
        """Prompt tokens a second beside a decode batch, within the step target; 0 = not measured yet."""
        if not self.step_target_ms:
            return self.prefill_tokens_per_s
        tokens, ms = self._share(self._num_decoding, self._attention_ms)
        turns = self._share_of_turns(ms)
        return 1000 * turns * tokens / (turns * ms + (1 - turns) * self.decode_step_ms) if ms else 0.0

    def prompt_budget(self, backlog: int = 0, *, decoding: int = 1, behind: int | None = None) -> int:
        """Prompt tokens that a pass may compute beside `decoding` sequences without making them wait too long.

        0: the last steps took too long, and the one before this has prompts. 0 `decoding`: none does, but some
        may come meanwhile. `backlog`: prompt tokens that wait here. Many of them get more: arrivals decide how much there is to
        compute. `behind`: positions before the prompt's next token, if they are known.
        """
        if not self.step_target_ms:
            return self._token_budget
        attention_ms = self._attention_ms if behind is None else behind * self._behind_ms
        tokens = self._share(decoding, attention_ms)[0] if decoding else self._arrival_share()
        if decoding and self._took_prompts and self._credit_ms < 0:
            tokens = 0
        return min(self._token_budget, max(tokens, (backlog - PATIENT_TOKENS) // BACKLOG_STEPS))

    def _arrival_share(self) -> int:
        tokens = int(ARRIVAL_S * self.prefill_tokens_per_s)
        return tokens - tokens % PASS_STEP or self._token_budget

    def _share(self, decoding: int, attention_ms: float) -> tuple[int, float]:
        """Prompt tokens for a pass beside `decoding` sequences, and its ms; 0 = not measured yet."""
        slots, rate = _slots(decoding), self._beside_tokens_per_s
        if slots in self._shares:
            return self._best_share(self._shares[slots], attention_ms)
        tokens = UNMEASURED_PROMPT_TOKENS
        if rate:
            tokens = int(NEARLY * (self.step_target_ms - self.decode_step_ms) / 1000 * rate)
        tokens = max(FEWEST_PROMPT_TOKENS, tokens + slots - (tokens + slots) % PASS_STEP - slots)
        tokens = min(self._token_budget, tokens)
        return tokens, self.decode_step_ms + 1000 * tokens / rate if rate else 0.0

    def _best_share(self, shares: Mapping[int, float], attention_ms: float) -> tuple[int, float]:
        """The tokens that take the least time each within the step target, of captured passes; ms of that pass."""
        beside_ms = self.decode_step_ms or shares[0]
        predicted = {tokens: beside_ms + ms - shares[0] + attention_ms for tokens, ms in shares.items() if tokens}
        fitting = [tokens for tokens, ms in predicted.items() if ms <= self.step_target_ms] or [min(predicted)]
        best = max(fitting, key=lambda tokens: tokens / predicted[tokens])
        return best, predicted[best]

    def _share_of_turns(self, mixed_ms: float) -> float:
        """In how many of the passes that decode prompts take part: so many of `mixed_ms` that the mean meets the target."""
        if mixed_ms <= self.step_target_ms:
            return 1.0
        room_ms, added_ms = self.step_target_ms - self.decode_step_ms, mixed_ms - self.decode_step_ms
        return max(LEAST_TURNS, min(1.0, room_ms / max(added_ms, 0.001)))

    def attach(self, planner: Planner, *, backlog: Callable[[], int] = lambda: 0) -> None:
        """Give `planner` a share of every pass from the next one on. `backlog()`: prompt tokens that wait with it."""
        self._planners.append(planner)
        self._backlogs.append(backlog)

    def wake(self) -> None:
        """Some role may have work now."""
        self._wake.set()

    async def run(self) -> None:
        """Compute until cancelled. Cancellation waits for the passes in flight; their results are nobody's any more."""
        try:
            while True:
                self._wake.clear()
                while self._outstanding and self._outstanding[0].over.done():
                    self._deliver(self._outstanding.popleft())
                while len(self._outstanding) < MAX_OUTSTANDING and any(shares := self._plan()):
                    suspect = self.trials.on_trial(shares)
                    if suspect is not None and self._announce is not None:
                        await self._announce(suspect)
                    self._outstanding.append(self._submit(shares))
                self.busy = bool(self._outstanding)
                await self._wake.wait()
        finally:
            self.busy = False
            await self._leave()

    async def _leave(self) -> None:
        try:
            if self._outstanding:
                await asyncio.wait([asyncio.wrap_future(launch.over) for launch in self._outstanding])
        finally:
            self._device_thread.shutdown(wait=True)
            self._waiting_thread.shutdown(wait=True)

    def _plan(self) -> list[list[Chunk]]:
        budget, prompt_tokens, shares = self._token_budget, 0, []
        is_decoding = False
        for planner, backlog in zip(self._planners, self._backlogs, strict=True):
            if is_decoding:
                most = self.prompt_budget(backlog(), decoding=self._num_decoding)
                budget = max(0, min(budget, most - prompt_tokens))
            share = planner.plan(budget)
            self.trials.planned(share)
            decoding, prompts = _parts(share)
            budget -= decoding + prompts
            prompt_tokens += prompts
            is_decoding = is_decoding or decoding > 0
            self._num_decoding = decoding or self._num_decoding
            shares.append(share)
        if is_decoding:
            self._took_prompts = prompt_tokens > 0
        return shares

    def _submit(self, shares: list[list[Chunk]]) -> _Launch:
        launch, loop = _Launch(shares), asyncio.get_running_loop()
        launch.over.add_done_callback(lambda _: loop.call_soon_threadsafe(self.wake))
        self._device_thread.submit(self._launch, launch)
        return launch

    # -- in the other threads --------------------------------------------------------------------------------------

    def _launch(self, launch: _Launch) -> None:
        """Launch without the sequences that the launch before lost: their tokens and KV are not there."""
        launch.began_at = time.monotonic()
        chunks = [chunk for chunk in launch.chunks if chunk.sequence not in self._refused]
        try:
            pass_ = self._engine.launch(chunks) if chunks else Finished([])
        except BaseException as error:
            self._refused = {chunk.sequence for chunk in launch.chunks}
            launch.fail(error)
            return
        self._refused = set()
        if isinstance(pass_, Finished):
            launch.finish(chunks, pass_)
        else:
            self._waiting_thread.submit(launch.finish, chunks, pass_)

    # -- on the event loop again -------------------------------------------------------------------------------------

    def _deliver(self, launch: _Launch) -> None:
        self.steps += 1
        self.trials.landed(launch.chunks)
        before, self._failure = self._failure, _Failure()
        try:
            results = launch.over.result()
        except Exception as error:
            log.exception("device.step_failed", extra={"chunks": len(launch.chunks)})
            self._failed_passes += 1
            if is_lost(error):
                self._lost = f"{type(error).__name__}: {error}".splitlines()[0]
            self._failure = _Failure({chunk.sequence for chunk in launch.chunks}, error)
            for planner, share in zip(self._planners, launch.shares, strict=False):
                planner.failed(share, error)
            return
        if results:  # none when all of its sequences were lost with the pass before
            self._failed_passes = 0
        self._measure(launch)
        for planner, share in zip(self._planners, launch.shares, strict=False):
            lost = [chunk for chunk in share if chunk.sequence in before.sequences]
            if lost:
                planner.failed(lost, before.error)
            planner.apply([(chunk, results[chunk]) for chunk in share if chunk.sequence not in before.sequences])

    def _measure(self, launch: _Launch) -> None:
        """Update the rates; a pass that was launched early began when the one before it was over."""
        seconds = launch.over_at - max(launch.began_at, self._over_at)
        after_idling = launch.began_at - self._over_at > IDLE_S
        self._over_at = launch.over_at
        decoding, prompts = _parts(launch.chunks)
        if decoding:
            credit_ms = self._credit_ms + self.step_target_ms - 1000 * seconds
            self._credit_ms = min(MOST_CREDIT_MS, max(-MOST_DEBT_MS, credit_ms))
        if not prompts:
            self.decode_step_ms = _smooth(self.decode_step_ms, seconds * 1000)
        elif not decoding:
            self.prompt_cost.add(prompts, _pairs(launch.chunks), seconds, after_idling=after_idling)
        elif prompts >= FEWEST_PROMPT_TOKENS and self.decode_step_ms:
            slots = _slots(decoding)
            self._measure_attention(slots, prompts, _pairs(launch.chunks) / prompts, seconds * 1000)
            # the end of a prompt costs as much as a full share
            room = -(-(prompts + slots) // PASS_STEP) * PASS_STEP - slots
            added_s = max(seconds - self.decode_step_ms / 1000, 0.1 * seconds)
            self._beside_tokens_per_s = _smooth(self._beside_tokens_per_s, room / added_s)

    def _measure_attention(self, slots: int, prompts: int, behind: float, pass_ms: float) -> None:
        shares = self._shares.get(slots, {})
        if (room := min((tokens for tokens in shares if tokens >= prompts), default=0)) > 0:
            added_ms = max(0.0, pass_ms - self.decode_step_ms - (shares[room] - shares[0]))
            self._num_mixed += 1
            self._attention_ms += max(PROMPT_SMOOTHING, 1 / self._num_mixed) * (added_ms - self._attention_ms)
            if behind >= LEAST_BEHIND:
                self._behind_ms = _smooth(self._behind_ms, added_ms / behind)


def _shares(pass_ms: Mapping[tuple[int, int], float]) -> dict[int, dict[int, float]]:
    """By places for tokens that decode: prompts' tokens -> ms, where both are known with and without prompts."""
    found: dict[int, dict[int, float]] = {}
    for (slots, tokens), ms in sorted(pass_ms.items()):
        found.setdefault(slots, {})[tokens] = ms
    return {slots: shares for slots, shares in found.items() if 0 in shares and len(shares) > 1}


def _slots(decoding: int) -> int:
    return max(FEWEST_SLOTS, 1 << (decoding - 1).bit_length())


def step_targets(pass_ms: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """`STEP_TARGET` and `ALONE_TARGET` in ms, by what passes took at the start (see `DeviceLoop`)."""
    bare = [ms for (slots, tokens), ms in pass_ms.items() if 0 < slots <= FEWEST_SLOTS and not tokens]
    bare_ms = max(bare, default=BARE_STEP_MS)
    return STEP_TARGET * bare_ms, ALONE_TARGET * bare_ms


def is_lost(error: Exception) -> bool:
    """Whether every later pass would fail as well: after most CUDA errors the process's context is gone."""
    return "CUDA error" in str(error)


def _decodes(chunk: Chunk) -> bool:
    return chunk.num_tokens == 1 and chunk.sample


def _parts(chunks: ListOf[Chunk]) -> tuple[int, int]:
    """How many chunks decode (one token each), and the tokens of the others."""
    decoding = sum(map(_decodes, chunks))
    return decoding, sum(chunk.num_tokens for chunk in chunks) - decoding


def _pairs(chunks: ListOf[Chunk]) -> float:
    """Pairs of a prompt's token and one before it."""
    return sum(pairs_of(chunk.start, chunk.end) for chunk in chunks if not _decodes(chunk))


@dataclass(slots=True, eq=False)
class _Launch:
    """A pass from its plan to its results, which `over` holds."""

    shares: list[list[Chunk]]  # by planner
    over: Future[dict[Chunk, Sampled | None]] = field(default_factory=Future)
    submitted_at: float = field(default_factory=time.monotonic)
    began_at: float = 0.0
    over_at: float = 0.0
    chunks: list[Chunk] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = [chunk for share in self.shares for chunk in share]

    def finish(self, chunks: list[Chunk], pass_: Pass) -> None:
        """Wait for the results of `chunks` and publish them."""
        try:
            results = pass_.wait()
        except BaseException as error:
            self.fail(error)
            return
        self.over_at = time.monotonic()
        self.over.set_result(dict(zip(chunks, results, strict=True)))

    def fail(self, error: BaseException) -> None:
        self.over_at = time.monotonic()
        self.over.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why the sequences of a pass got nothing; no sequences if they got their results."""

    sequences: set[Sequence] = field(default_factory=set)
    error: Exception = field(default_factory=Exception)


def _smooth(average: float, newest: float) -> float:
    return newest if average == 0 else average + RATE_SMOOTHING * (newest - average)
