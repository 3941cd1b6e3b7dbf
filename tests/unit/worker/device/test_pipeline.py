"""The pipeline with an engine whose passes the test completes by hand: what is launched when, and who gets what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as ListOf
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.engine import Chunk, Pass, Sampled
from engine.passes import Finished
from engine.sequence import Sequence
from tests.fakes.device import TIMEOUT_S, HandEngine, OneTokenEach, running, settled
from tests.unit.engine.generate import new_sequence
from worker.device.costs import LEAST_WAIT_MS, LEAST_WAITS
from worker.device.launcher import SteppingEngine, Threads
from worker.device.pipeline import DeviceHealth, Pipeline
from worker.device.prompt_budget import PromptBudget


def new_pipeline(*planners: OneTokenEach, token_budget: int = 8, stages: int = 1) -> tuple[Pipeline, HandEngine]:
    engine = HandEngine()
    return pipeline_over(engine, *planners, token_budget=token_budget, stages=stages), engine


def pipeline_over(engine: SteppingEngine, *planners: OneTokenEach, token_budget: int = 8, stages: int = 1) -> Pipeline:
    pipeline = Pipeline(engine=engine, budget=PromptBudget(token_budget=token_budget), stages=stages)
    for planner in planners:
        pipeline.attach(planner)
    return pipeline


async def test_the_next_pass_is_launched_before_the_first_is_over_and_no_third_one() -> None:
    planner = OneTokenEach("a")
    pipeline, engine = new_pipeline(planner)
    async with running(pipeline, engine):
        await engine.launched(2)
        await settled()
        assert [pass_.over.is_set() for pass_ in engine.passes] == [False, False]
        assert planner.passes == 98
        assert planner.events == []
        assert pipeline.busy

        engine.passes[0].complete()
        await engine.launched(3)
        assert planner.events == [("applied", "a", 0)]
        assert [pass_.chunks[0].start for pass_ in engine.passes] == [0, 1, 2]


async def test_as_many_passes_are_in_flight_as_there_are_stages() -> None:
    planner = OneTokenEach("a")
    pipeline, engine = new_pipeline(planner, stages=4)
    async with running(pipeline, engine):
        await engine.launched(4)
        await settled()
        assert (len(engine.passes), pipeline.num_in_flight) == (4, 4)
        engine.passes[0].complete()
        await engine.launched(5)
        assert planner.events == [("applied", "a", 0)]


async def test_results_are_applied_in_the_order_of_launch() -> None:
    planner = OneTokenEach("a", passes=2)
    pipeline, engine = new_pipeline(planner)
    async with running(pipeline, engine):
        await engine.launched(2)
        engine.passes[1].complete()
        await settled()
        assert planner.events == []
        assert not engine.passes[1].waited_for.is_set()

        engine.passes[0].complete()
        await planner.heard(2)
        assert planner.events == [("applied", "a", 0), ("applied", "a", 1)]
        assert pipeline.steps == 2


async def test_a_pass_that_is_over_at_once_waits_for_its_turn() -> None:
    planner, engine = OneTokenEach("a", passes=2), HandEngine()

    class SecondAtOnce:
        def launch(self, chunks: list[Chunk]) -> Pass:
            pass_ = engine.launch(chunks)
            return pass_ if len(engine.passes) == 1 else Finished([Sampled(chunk.end, None) for chunk in chunks])

    launching = ThreadPoolExecutor(max_workers=1)
    threads = Threads(launching, ThreadPoolExecutor(max_workers=1))
    pipeline = Pipeline(engine=SecondAtOnce(), budget=PromptBudget(token_budget=8), threads=threads)
    pipeline.attach(planner)
    async with running(pipeline, engine):
        await engine.launched(2)
        await asyncio.wrap_future(launching.submit(int))  # behind the second launch, whose results are there
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

    pipeline = pipeline_over(Computing(), planner)
    async with running(pipeline, engine):
        try:
            await engine.launched(1)
            assert planner.passes == 0  # the second pass waits in its thread for the first
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
    pipeline, engine = new_pipeline(first, late)
    async with running(pipeline, engine):
        await engine.launched(1)
        late.passes = 1
        pipeline.wake()
        await engine.launched(2)
        assert not engine.passes[0].over.is_set()
        assert [chunk.sequence.request_id for chunk in engine.passes[1].chunks] == ["b"]


async def test_a_loop_without_work_waits_to_be_woken() -> None:
    planner = OneTokenEach("a", passes=1)
    pipeline, engine = new_pipeline(planner)
    async with running(pipeline, engine):
        await engine.launched(1)
        engine.passes[0].complete()
        await planner.heard(1)
        await settled()
        assert not pipeline.busy
        planner.passes = 1
        await settled()
        assert len(engine.passes) == 1
        pipeline.wake()
        await engine.launched(2)


async def test_a_pass_that_fails_takes_its_sequences_out_of_the_next_one_and_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A device that fails while it computes: the next pass is launched already, with the failed one's tokens."""
    broken, fine = OneTokenEach("a", passes=2), OneTokenEach("b", passes=0)
    pipeline, engine = new_pipeline(broken, fine, token_budget=2)
    async with running(pipeline, engine):
        await engine.launched(2)
        engine.passes[0].complete(RuntimeError("out of memory"))
        engine.passes[1].complete()
        await broken.heard(2)
        fine.passes = 1
        pipeline.wake()
        await engine.launched(3)
        engine.passes[2].complete()
        await fine.heard(1)
    assert broken.events == [("out of memory", "a", 0), ("out of memory", "a", 1)]
    assert fine.events == [("applied", "b", 0)]
    assert pipeline.steps == 3
    assert "device.step_failed" in caplog.text


async def test_a_failure_takes_its_sequences_out_of_all_passes_in_flight() -> None:
    """Another one is in the pass behind, and none of those."""
    broken, fine = OneTokenEach("a", passes=3), OneTokenEach("b", passes=0)
    pipeline, engine = new_pipeline(broken, fine, stages=4)
    async with running(pipeline, engine):
        await engine.launched(3)
        fine.passes = 1
        pipeline.wake()
        await engine.launched(4)
        engine.passes[0].complete(RuntimeError("lost"))
        for pass_ in engine.passes[1:]:
            pass_.complete()
        await fine.heard(1)
    assert broken.events == [("lost", "a", 0), ("lost", "a", 1), ("lost", "a", 2)]
    assert fine.events == [("applied", "b", 0)]


async def test_a_refused_launch_takes_its_sequences_out_of_all_behind_it() -> None:
    """With another sequence between them, whose launch is none of their business."""
    first, second = OneTokenEach("a", passes=3), OneTokenEach("b", passes=3)
    pipeline, engine = new_pipeline(first, second, stages=3)
    engine.refusals = [RuntimeError("refused")]
    second.sequences[0].schedule(1)  # so that its chunks begin at 1
    pipeline._planners = [(_OnSecondPlan(second), int), (first, int)]
    async with running(pipeline, engine):
        await engine.launched(2)
        engine.passes[1].complete()
        await first.heard(3)
    assert first.events == [("refused", "a", 0), ("refused", "a", 1), ("refused", "a", 2)]
    assert [[chunk.sequence.request_id for chunk in pass_.chunks] for pass_ in engine.passes] == [["a"], ["b"]]


async def test_a_failure_leaves_the_other_sequences_of_the_next_pass_alone() -> None:
    first, second = OneTokenEach("a", passes=2), OneTokenEach("b", passes=0)
    pipeline, engine = new_pipeline(first, second)
    async with running(pipeline, engine):
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
    pipeline, engine = new_pipeline(first)
    second.sequences[0].schedule(1)  # b's first token is pending elsewhere, so that only the second pass begins at 1
    pipeline.attach(_OnSecondPlan(second))
    engine.refusals = [RuntimeError("refused")]
    async with running(pipeline, engine):
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
    pipeline, engine = new_pipeline(planner)
    async with running(pipeline, engine) as task:
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
    assert not pipeline.busy


class ManualClock:
    """Stands still until the test moves it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("tokens", [1, 8], ids=["decode steps", "prompts alone"])
async def test_an_overlapped_pass_took_the_time_since_the_one_before_it(tokens: int) -> None:
    clock, engine, planner = ManualClock(100.0), HandEngine(), _Prompts(tokens)
    budget = PromptBudget(token_budget=8)
    pipeline = Pipeline(engine=engine, budget=budget, clock=clock)
    pipeline.attach(planner)
    async with running(pipeline, engine):
        await engine.launched(2)
        for number, over_at in enumerate((102.0, 103.0)):
            clock.now = over_at
            engine.passes[number].complete()
            await planner.heard(number + 1)
    assert pipeline.pass_s == 3.0
    if tokens == 1:
        assert budget.step_cost.bare_ms == pytest.approx(2000 + 0.2 * (1000 - 2000))
    else:  # the first pass found the device idle and weighs a fifth in the rate
        assert budget.prompt_cost.average_tokens_per_s == pytest.approx(8 * 1.19 / (0.19 * 2 + 1))


async def test_a_pass_planned_after_the_results_of_the_one_before_shows_what_waiting_costs() -> None:
    clock, engine, planner = ManualClock(100.0), HandEngine(), _InTurn(1, "abcdef")
    budget = PromptBudget(token_budget=8)
    pipeline = Pipeline(engine=engine, budget=budget, clock=clock)
    pipeline.attach(planner)
    async with running(pipeline, engine):
        for number in range(1 + LEAST_WAITS):
            await engine.launched(number + 1)
            clock.now += 1.0
            engine.passes[number].complete()
            await planner.heard(number + 1)
    assert budget.step_cost.rows.ms(1) == pytest.approx(1000)
    assert budget.step_cost.waits.ms(1) == LEAST_WAIT_MS  # by this clock nothing is planned or launched


class _Prompts:
    """A pass of one chunk of `tokens` for each name."""

    def __init__(self, tokens: int, names: str = "ab") -> None:
        self._tokens = tokens
        self._sequences: list[Sequence] = [new_sequence(name, [1] * tokens) for name in names]
        self._planned = self._applied = 0
        self._heard = asyncio.Event()

    def plan(self, token_budget: int) -> list[Chunk]:
        if not self._sequences:
            return []
        self._planned += 1
        return [self._sequences.pop().schedule(self._tokens)]

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        self._applied += 1
        self._heard.set()

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        raise error

    async def heard(self, count: int) -> None:
        while self._applied < count:
            self._heard.clear()
            await asyncio.wait_for(self._heard.wait(), TIMEOUT_S)


class _InTurn(_Prompts):
    """Each pass needs the results of the one before."""

    def plan(self, token_budget: int) -> list[Chunk]:
        return super().plan(token_budget) if self._planned == self._applied else []


@pytest.mark.parametrize(("target", "decoding", "budget"), [(0.0, 1, 4095), (10.0, 1, 240), (10.0, 0, 4096)])
async def test_a_role_planned_after_one_that_decodes_gets_the_prompt_budget(
    target: float, decoding: int, budget: int
) -> None:
    """Without a target, or with nobody who decodes, it gets what is left of the pass."""
    engine = HandEngine()
    pipeline = Pipeline(engine=engine, budget=PromptBudget(token_budget=4096, target_ms=target))
    chunks = [Chunk(new_sequence(f"s{index}", [1, 2]), 1, 1, True) for index in range(decoding)]
    decode, prefill = _Share(chunks), _Share([])
    pipeline.attach(decode)
    pipeline.attach(prefill)
    async with running(pipeline, engine):
        await settled()
        assert prefill.budgets[0] == budget


async def test_prompts_between_the_passes_of_streams_get_the_prompt_budget_too() -> None:
    """Where stages compute another part of the streams each, a pass without any delays them, too."""
    engine = HandEngine()
    pipeline = Pipeline(engine=engine, budget=PromptBudget(token_budget=4096, target_ms=10.0), stages=2)
    decode, prefill = _Share([Chunk(new_sequence("s", [1, 2]), 1, 1, True)]), _Share([])
    pipeline.attach(decode)
    pipeline.attach(prefill)
    async with running(pipeline, engine):
        await engine.launched(1)
        await settled()
        assert (decode.budgets, prefill.budgets) == ([4096, 4096], [240, 240])


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


async def test_a_cuda_error_or_three_failed_passes_break_the_device_and_one_that_was_full_does_not() -> None:
    for errors, is_broken in (
        (["CUDA error: an illegal memory access was encountered"], True),
        (["CUDA out of memory"], False),
        (["odd"] * 3, True),
    ):
        count = 2 * len(errors) - 1  # behind each that fails comes one that was planned for the same sequence
        planner = OneTokenEach("a", "b", "c", passes=count)
        pipeline, engine = new_pipeline(planner, token_budget=1)
        engine.refusals = [RuntimeError(error) for error in errors]
        async with running(pipeline, engine):
            await planner.heard(count)
            assert bool(pipeline.broken) == is_broken


async def test_a_pass_that_takes_too_long_breaks_the_device_from_when_it_could_begin() -> None:
    """The second pass in flight waits for the first; its time starts when that is over."""
    planner, engine, clock = OneTokenEach("a", passes=2), HandEngine(), ManualClock(100.0)
    pipeline = Pipeline(
        engine=engine, budget=PromptBudget(token_budget=8), health=DeviceHealth(step_timeout_s=10.0), clock=clock
    )
    pipeline.attach(planner)
    async with running(pipeline, engine):
        assert pipeline.broken == ""
        await engine.launched(2)
        clock.now = 110.0
        assert pipeline.broken == ""
        clock.now = 110.5
        assert pipeline.broken == "a pass takes 10 s"
        engine.passes[0].complete()
        await planner.heard(1)
        clock.now = 120.0
        assert pipeline.broken == ""
        clock.now = 121.0
        assert "a pass takes" in pipeline.broken
        engine.passes[1].complete()
        await planner.heard(2)
        assert pipeline.broken == ""


async def test_a_plan_that_fails_breaks_the_device() -> None:
    class Failing(OneTokenEach):
        def plan(self, token_budget: int) -> list[Chunk]:
            raise ZeroDivisionError("float division by zero")

    pipeline, _ = new_pipeline(Failing("a", passes=1), token_budget=1)
    with pytest.raises(ZeroDivisionError):
        await pipeline.run()
    assert pipeline.broken == "ZeroDivisionError: float division by zero"
