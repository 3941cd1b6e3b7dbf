"""The device loop with an engine whose passes the test completes by hand: what is launched when, and who gets what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from collections.abc import Sequence as ListOf
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from engine.engine import Chunk, Pass, Sampled
from engine.passes import Finished
from engine.sequence import Sequence
from tests.unit.engine.generate import new_sequence
from worker.device import DeviceLoop, _Launch

TIMEOUT_S = 5.0  # nothing here takes time: this only ends a test that hangs


@dataclass(eq=False)
class HandPass:
    """A pass that is over when the test says so."""

    chunks: list[Chunk]
    over: threading.Event = field(default_factory=threading.Event)
    waited_for: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def complete(self, error: Exception | None = None) -> None:
        self.error = error
        self.over.set()

    def wait(self) -> list[Sampled | None]:
        self.waited_for.set()
        assert self.over.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return [Sampled(chunk.end, None) if chunk.sample else None for chunk in self.chunks]


class HandEngine:
    """Launches return at once, or raise the errors in `refusals` one after the other."""

    def __init__(self) -> None:
        self.passes: list[HandPass] = []
        self.refusals: list[Exception | None] = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def launch(self, chunks: list[Chunk]) -> Pass:
        refusal = self.refusals.pop(0) if self.refusals else None
        pass_ = HandPass(chunks)
        self.passes.append(pass_)
        self._loop.call_soon_threadsafe(self._changed.set)
        if refusal is not None:
            raise refusal
        return pass_

    async def launched(self, count: int) -> None:
        while len(self.passes) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), TIMEOUT_S)


class OneTokenEach:
    """Gives each of its sequences one token a pass, as long as it has passes to give."""

    def __init__(self, *names: str, passes: int = 100) -> None:
        self.sequences = [new_sequence(name, [1]) for name in names]
        self.passes = passes
        self.events: list[tuple[str, str, int]] = []  # what happened, to whom, with the chunk that begins where
        self._heard = asyncio.Event()

    def plan(self, token_budget: int) -> list[Chunk]:
        if not self.passes or not self.sequences:
            return []
        self.passes -= 1
        return [sequence.schedule(1) for sequence in self.sequences[:token_budget]]

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        for chunk, sampled in results:
            assert sampled is not None
            assert sampled.token_id == chunk.end
            self._note("applied", chunk)

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        for chunk in chunks:
            self._note(str(error), chunk)
            with suppress(ValueError):
                self.sequences.remove(chunk.sequence)

    async def heard(self, count: int) -> None:
        while len(self.events) < count:
            self._heard.clear()
            await asyncio.wait_for(self._heard.wait(), TIMEOUT_S)

    def _note(self, what: str, chunk: Chunk) -> None:
        self.events.append((what, chunk.sequence.request_id, chunk.start))
        self._heard.set()


@asynccontextmanager
async def running(device: DeviceLoop, engine: HandEngine) -> AsyncIterator[asyncio.Task[None]]:
    """The loop, cancelled at the end; passes that the test left open are completed."""
    task = asyncio.create_task(device.run())
    try:
        yield task
    finally:
        task.cancel()
        for pass_ in engine.passes:
            pass_.complete()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, TIMEOUT_S)


def new_loop(*planners: OneTokenEach, token_budget: int = 8) -> tuple[DeviceLoop, HandEngine]:
    engine = HandEngine()
    device = DeviceLoop(engine=engine, token_budget=token_budget)
    for planner in planners:
        device.attach(planner)
    return device, engine


async def settled() -> None:
    """Let the loop do everything that it can do without another thread."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_next_pass_is_launched_before_the_first_is_over_and_no_third_one() -> None:
    planner = OneTokenEach("a")
    device, engine = new_loop(planner)
    async with running(device, engine):
        await engine.launched(2)
        await settled()
        assert [pass_.over.is_set() for pass_ in engine.passes] == [False, False]
        assert planner.passes == 98
        assert planner.events == []
        assert device.busy

        engine.passes[0].complete()
        await engine.launched(3)
        assert planner.events == [("applied", "a", 0)]
        assert [pass_.chunks[0].start for pass_ in engine.passes] == [0, 1, 2]


async def test_results_are_applied_in_the_order_of_launch() -> None:
    planner = OneTokenEach("a", passes=2)
    device, engine = new_loop(planner)
    async with running(device, engine):
        await engine.launched(2)
        engine.passes[1].complete()
        await settled()
        assert planner.events == []
        assert not engine.passes[1].waited_for.is_set()

        engine.passes[0].complete()
        await planner.heard(2)
        assert planner.events == [("applied", "a", 0), ("applied", "a", 1)]
        assert device.steps == 2


async def test_a_pass_that_is_over_at_once_waits_for_its_turn() -> None:
    planner, engine = OneTokenEach("a", passes=2), HandEngine()

    class SecondAtOnce:
        def launch(self, chunks: list[Chunk]) -> Pass:
            pass_ = engine.launch(chunks)
            return pass_ if len(engine.passes) == 1 else Finished([Sampled(chunk.end, None) for chunk in chunks])

    device = DeviceLoop(engine=SecondAtOnce(), token_budget=8)
    device.attach(planner)
    async with running(device, engine):
        await engine.launched(2)
        await asyncio.to_thread(device._outstanding[1].over.result, TIMEOUT_S)
        await settled()
        assert planner.events == []
        engine.passes[0].complete()
        await planner.heard(2)
    assert planner.events == [("applied", "a", 0), ("applied", "a", 1)]


async def test_results_of_an_engine_that_computes_in_launch_are_not_held_back() -> None:
    planner, engine = OneTokenEach("a", passes=2), HandEngine()
    allowed = [threading.Event(), threading.Event()]

    class Computing:
        def launch(self, chunks: list[Chunk]) -> Pass:
            number = len(engine.passes)
            engine.launch(chunks)
            assert allowed[number].wait(TIMEOUT_S)
            return Finished([Sampled(chunk.end, None) for chunk in chunks])

    device = DeviceLoop(engine=Computing(), token_budget=8)
    device.attach(planner)
    async with running(device, engine):
        try:
            await engine.launched(1)
            assert planner.passes == 0  # the second pass waits in the device thread for the first to be over
            allowed[0].set()
            await engine.launched(2)
            await planner.heard(1)  # while the second one computes
            assert planner.events == [("applied", "a", 0)]
        finally:
            allowed[0].set()
            allowed[1].set()
        await planner.heard(2)


async def test_work_that_arrives_while_a_pass_is_in_flight_joins_at_once() -> None:
    first, late = OneTokenEach("a", passes=1), OneTokenEach("b", passes=0)
    device, engine = new_loop(first, late)
    async with running(device, engine):
        await engine.launched(1)
        late.passes = 1
        device.wake()
        await engine.launched(2)
        assert not engine.passes[0].over.is_set()
        assert [chunk.sequence.request_id for chunk in engine.passes[1].chunks] == ["b"]


async def test_a_loop_without_work_waits_to_be_woken() -> None:
    planner = OneTokenEach("a", passes=1)
    device, engine = new_loop(planner)
    async with running(device, engine):
        await engine.launched(1)
        engine.passes[0].complete()
        await planner.heard(1)
        await settled()
        assert not device.busy
        planner.passes = 1
        await settled()
        assert len(engine.passes) == 1
        device.wake()
        await engine.launched(2)


async def test_a_pass_that_fails_takes_its_sequences_out_of_the_next_one_and_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A device that fails while it computes: the next pass is launched already, with the failed one's tokens."""
    broken, fine = OneTokenEach("a", passes=2), OneTokenEach("b", passes=0)
    device, engine = new_loop(broken, fine, token_budget=2)
    async with running(device, engine):
        await engine.launched(2)
        engine.passes[0].complete(RuntimeError("out of memory"))
        engine.passes[1].complete()
        await broken.heard(2)
        fine.passes = 1
        device.wake()
        await engine.launched(3)
        engine.passes[2].complete()
        await fine.heard(1)
    assert broken.events == [("out of memory", "a", 0), ("out of memory", "a", 1)]
    assert fine.events == [("applied", "b", 0)]
    assert device.steps == 3
    assert "device.step_failed" in caplog.text


async def test_a_failure_leaves_the_other_sequences_of_the_next_pass_alone() -> None:
    first, second = OneTokenEach("a", passes=2), OneTokenEach("b", passes=0)
    device, engine = new_loop(first, second)
    async with running(device, engine):
        await engine.launched(2)
        second.passes = 1
        engine.passes[0].complete()
        await engine.launched(3)  # holds b alone; the second one, which fails now, a alone
        engine.passes[1].complete(RuntimeError("lost"))
        engine.passes[2].complete()
        await second.heard(1)
    assert first.events == [("applied", "a", 0), ("lost", "a", 1)]
    assert second.events == [("applied", "b", 0)]


async def test_sequences_of_a_refused_launch_are_not_launched_again() -> None:
    """Their tokens are not there: an engine would refuse the whole next pass for them."""
    first, second = OneTokenEach("a", passes=2), OneTokenEach("b", passes=1)
    device, engine = new_loop(first)
    second.sequences[0].schedule(1)  # b's first token is pending elsewhere, so that only the second pass begins at 1
    device.attach(_OnSecondPlan(second))
    engine.refusals = [RuntimeError("refused")]
    async with running(device, engine):
        await engine.launched(2)
        assert [chunk.sequence.request_id for chunk in engine.passes[1].chunks] == ["b"]
        engine.passes[1].complete()
        await second.heard(1)
    assert first.events == [("refused", "a", 0), ("refused", "a", 1)]
    assert second.events == [("applied", "b", 1)]


class _OnSecondPlan:
    """Has nothing to plan the first time."""

    def __init__(self, planner: OneTokenEach) -> None:
        self._planner, self._plans = planner, 0
        self.apply, self.failed = planner.apply, planner.failed

    def plan(self, token_budget: int) -> list[Chunk]:
        self._plans += 1
        return self._planner.plan(token_budget) if self._plans == 2 else []


async def test_cancellation_waits_for_the_passes_in_flight() -> None:
    planner = OneTokenEach("a")
    device, engine = new_loop(planner)
    async with running(device, engine) as task:
        await engine.launched(2)
        task.cancel()
        await settled()
        assert not task.done()
        engine.passes[0].complete()
        await asyncio.to_thread(engine.passes[1].waited_for.wait, TIMEOUT_S)
        await settled()
        assert not task.done()
        engine.passes[1].complete()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, TIMEOUT_S)
    assert len(engine.passes) == 2
    assert not device.busy


@pytest.mark.parametrize(("tokens", "rate"), [(1, "decode_step_ms"), (8, "prefill_tokens_per_s")])
async def test_an_overlapped_pass_took_the_time_since_the_one_before_it(
    tokens: int, rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 100.1, 102.0, 103.0])  # launched, launched, over, over
    monkeypatch.setattr("worker.device.time", SimpleNamespace(monotonic=lambda: next(clock)))
    planner = _Prompts(tokens)
    engine = HandEngine()
    device = DeviceLoop(engine=engine, token_budget=8)
    device.attach(planner)
    async with running(device, engine):
        await engine.launched(2)
        engine.passes[0].complete()
        engine.passes[1].complete()
        while device.steps < 2:
            await asyncio.sleep(0)
    # the first pass found the device idle and weighs a fifth in a rate
    expected = {"decode_step_ms": 2000 + 0.2 * (1000 - 2000), "prefill_tokens_per_s": 8 * 1.19 / (0.19 * 2 + 1)}
    assert getattr(device, rate) == pytest.approx(expected[rate])


class _Prompts:
    """Two passes of one chunk of `tokens` each."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._sequences: list[Sequence] = [new_sequence(name, [1] * tokens) for name in ("a", "b")]

    def plan(self, token_budget: int) -> list[Chunk]:
        return [self._sequences.pop().schedule(self._tokens)] if self._sequences else []

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        """Nothing to do."""

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        raise error


class _Share:
    """A role that plans the given chunks once, and remembers its budget."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks
        self.budgets: list[int] = []

    def plan(self, token_budget: int) -> list[Chunk]:
        self.budgets.append(token_budget)
        chunks, self._chunks = self._chunks, []
        return chunks

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None: ...

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None: ...


@pytest.mark.parametrize(("target", "decoding", "budget"), [(0.0, 1, 4095), (10.0, 1, 240), (10.0, 0, 4096)])
async def test_prompts_beside_decoding_are_bounded_by_the_step_target(
    target: float, decoding: int, budget: int
) -> None:
    """Until a pass has shown how many tokens fit, a few; without a target, or without anybody who waits, all."""
    engine = HandEngine()
    device = DeviceLoop(engine=engine, token_budget=4096, step_target_ms=target)
    chunks = [Chunk(new_sequence(f"s{index}", [1, 2]), 1, 1, True) for index in range(decoding)]
    decode, prefill = _Share(chunks), _Share([])
    device.attach(decode)
    device.attach(prefill)
    async with running(device, engine):
        await settled()
        assert prefill.budgets[0] == budget
        for pass_ in engine.passes:
            pass_.complete()


async def test_what_fits_into_a_step_is_learnt_from_mixed_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.004, 0.004, 0.014])  # a decode step of 4 ms, then one with 240 prompt tokens of 6 ms more
    monkeypatch.setattr("worker.device.time", SimpleNamespace(monotonic=lambda: next(now)))
    device = DeviceLoop(engine=HandEngine(), token_budget=4096, step_target_ms=8.0)
    decode, prompt = Chunk(new_sequence("d", [1, 2]), 1, 1, True), Chunk(new_sequence("p", [1] * 240), 0, 240, True)
    for chunks in ([decode], [decode, prompt]):
        launch = _Launch([chunks])
        launch.began_at = next(now)
        launch.finish(chunks, Finished([None] * len(chunks)))
        device._measure(launch)
    assert device.prompt_budget() == 112  # of 4 ms * 240 / 6 ms = 160 tokens: a pass of 128 with 16 places to decode
    assert device.prompt_budget(decoding=17) == 96
    assert device.prompt_budget(decoding=100) == 128
    assert device.prompt_budget(backlog=8192) == device.prompt_budget()
    assert device.prompt_budget(backlog=12_192) == 1000  # what waits must not grow
    assert device.prompt_budget(backlog=100_000) == 4096
    assert device.local_tokens_per_s == pytest.approx(112 / (0.004 + 112 * 0.006 / 240))


@pytest.mark.parametrize(("target", "budget"), [(8.0, 2048), (0.0, 4096)])
async def test_a_pass_that_others_may_come_to_wait_for_takes_50_ms_at_most(target: float, budget: int) -> None:
    device = DeviceLoop(engine=HandEngine(), token_budget=4096, step_target_ms=target)
    assert device.prompt_budget(decoding=0) == 4096  # not measured yet
    device.prompt_cost.add(4100, 0.0, 0.1)
    assert device.prompt_budget(decoding=0) == budget  # of 2,050 in 50 ms


async def test_a_cuda_error_or_three_failed_passes_break_the_device_and_one_that_was_full_does_not() -> None:
    for errors, is_broken in (
        (["CUDA error: an illegal memory access was encountered"], True),
        (["CUDA out of memory"], False),
        (["odd"] * 3, True),
    ):
        count = 2 * len(errors) - 1  # behind each that fails comes one that was planned for the same sequence
        planner = OneTokenEach("a", "b", "c", passes=count)
        device, engine = new_loop(planner, token_budget=1)
        engine.refusals = [RuntimeError(error) for error in errors]
        async with running(device, engine):
            await planner.heard(count)
            assert bool(device.broken) == is_broken


async def test_a_pass_that_takes_too_long_breaks_the_device() -> None:
    planner, engine = OneTokenEach("a", passes=1), HandEngine()
    device = DeviceLoop(engine=engine, token_budget=8, step_timeout_s=0.0)
    device.attach(planner)
    async with running(device, engine):
        assert device.broken == ""
        await engine.launched(1)
        assert "a pass takes" in device.broken


async def test_passes_of_measured_graphs_are_filled_where_a_token_costs_least() -> None:
    measured = {(16, 0): 4.0, (16, 112): 5.0, (16, 176): 6.0, (16, 240): 8.0, (32, 96): 5.0}
    device = DeviceLoop(engine=HandEngine(), token_budget=4096, step_target_ms=8.0, pass_ms=measured)
    assert device.prompt_budget(decoding=3) == 240  # 30 tokens a ms, against 29 and 22
    assert device.local_tokens_per_s == pytest.approx(30_000)
    device.decode_step_ms = 4.5  # with contexts: everything takes longer
    assert device.prompt_budget(decoding=3) == 176
    assert device.local_tokens_per_s == pytest.approx(1000 * 176 / 6.5)
    device.decode_step_ms = 7.5
    assert device.prompt_budget(decoding=3) == 112  # no pass is short enough
    assert device.prompt_budget(decoding=20) == 224  # no graph is known with and without prompts


@pytest.mark.parametrize(
    ("step_ms", "mixed_ms", "taking", "tokens_per_s"),
    [
        (7.0, 8.0, 100, 112 / 0.008),  # the target
        (7.4, 8.4, 60, 0.6 * 112 / 0.008),  # six with prompts and four without take 8 ms in the mean
        (7.0, 9.0, 50, 0.5 * 112 / 0.008),  # longer than thought at first
        # every tenth would be right, and too few for those who wait
        (7.9, 8.9, 50, 0.5 * 112 / (0.5 * 0.0089 + 0.5 * 0.0079)),
        (9.0, 10.0, 50, 0.5 * 112 / (0.5 * 0.010 + 0.5 * 0.009)),
    ],
)
async def test_prompts_pause_where_the_fewest_tokens_make_steps_too_long(
    step_ms: float, mixed_ms: float, taking: int, tokens_per_s: float
) -> None:
    """Of 400 passes, the newest of which is planned before the one before it is over."""
    device = DeviceLoop(
        engine=HandEngine(), token_budget=4096, step_target_ms=8.0, pass_ms={(16, 0): 4.0, (16, 112): 5.0}
    )
    device.decode_step_ms = step_ms
    planner = _OneAndPrompts(device)
    device.attach(planner)
    at_s, taken, launches = 0.0, 0, [_over(device._plan()[0], 0.0, 0.0)]
    for _ in range(400):
        launches.append(_over(device._plan()[0], at_s, 0.0))
        launch = launches.pop(0)
        is_mixed = len(launch.chunks) > 1
        taken += is_mixed
        at_s += (mixed_ms if is_mixed else step_ms) / 1000
        launch.over_at = at_s
        device._measure(launch)
    assert taken / 4 == pytest.approx(taking, abs=1)
    assert device.local_tokens_per_s == pytest.approx(tokens_per_s, rel=0.01)
    planner.backlog = 20_000
    assert all(len(device._plan()[0]) > 1 for _ in range(10))  # a queue that grows serves nobody


class _OneAndPrompts:
    """A token for one who decodes in each pass, and as many prompts' tokens as the device allows beside it."""

    def __init__(self, device: DeviceLoop) -> None:
        self._device, self._prompts = device, new_sequence("p", [1] * 100_000)
        self._at = self.backlog = 0

    def plan(self, token_budget: int) -> list[Chunk]:
        self._at += 1
        chunks = [Chunk(new_sequence("d", [1, 2]), self._at, 1, True)]
        tokens = self._device.prompt_budget(self.backlog, decoding=1)
        return chunks + ([Chunk(self._prompts, 0, tokens, False)] if tokens else [])

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None: ...

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None: ...


async def test_attention_is_told_by_the_positions_before_a_part_and_by_whole_prompts() -> None:
    """8,000 positions add 2 ms to a pass, here; a prompt of them 1 ms a pass in the mean."""
    measured = {(16, 0): 4.0, (16, 112): 5.0, (16, 176): 6.0}
    device = DeviceLoop(engine=HandEngine(), token_budget=4096, step_target_ms=7.5, pass_ms=measured)
    decode, prompt = Chunk(new_sequence("d", [1, 2]), 1, 1, True), new_sequence("p", [1])
    at_s = 0.004
    device._measure(_over([decode], 0.0, at_s))
    for start in range(0, 8000, 160):
        took_s = (6.0 + (start + 80) / 8000 * 2) / 1000
        device._measure(_over([decode, Chunk(prompt, start, 160, False)], at_s, at_s + took_s))
        at_s += took_s
    assert device.prompt_budget(decoding=1, behind=0) == 176
    assert device.prompt_budget(decoding=1, behind=5000) == 176  # 7.25 ms
    assert device.prompt_budget(decoding=1, behind=7000) == 112  # 7.75 would be too much
    assert device.prompt_budget(decoding=1) == 176  # whatever comes next
    assert device.local_tokens_per_s == pytest.approx(176 / 0.007, rel=0.01)


def _over(chunks: list[Chunk], began_at: float, over_at: float) -> _Launch:
    launch = _Launch([chunks], submitted_at=began_at)
    launch.began_at, launch.over_at = began_at, over_at
    return launch
