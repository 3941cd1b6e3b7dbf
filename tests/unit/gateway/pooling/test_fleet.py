"""A fleet of workers that pool: who gets a piece, what waits, and what is asked again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.blocks import pack_tokens
from common.errors import DeadlineExceededError, InvalidRequestError, StepFailedError, UnavailableError
from common.messages import Cancel, KVLayout, Pool, Pooled, Region, WorkerState
from common.peers import Peers
from common.words import Role, WorkerStatus
from gateway.pooling.fleet import PIECE_INPUTS, WINDOW_PIECES, WINDOW_TOKENS, PoolingFleet, Turn, pieces
from gateway.tenants.tenants import Tenant

LAYOUT = KVLayout(num_blocks=1, num_layers=1, block_size=16, num_kv_heads=1, head_dim=1, dtype="float32")


def state(worker: str, incarnation: int = 1) -> WorkerState:
    return WorkerState(
        worker=worker,
        incarnation=incarnation,
        roles=[Role.POOL],
        status=WorkerStatus.READY,
        model="m",
        model_fingerprint="f",
        tokenizer_fingerprint="t",
        vocab_size=100,
        max_model_len=64,
        region=Region(transport="none", incarnation=incarnation, layout=LAYOUT, address={}),
    )


Answer = Callable[[str, Pool], Any]


class AskedBus:
    """Answers requests by a function of worker and message, which may await."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked = answer, list[str]()
        self.named, self.cancelled = list[str](), list[tuple[str, str]]()  # pieces' names; worker and piece

    async def publish(self, subject: str, message: Any) -> None:
        assert isinstance(message, Cancel)
        self.cancelled.append((subject.split(".")[2], message.request_id))

    async def request(self, subject: str, message: Any, decoder: Any, *, timeout_s: float) -> Any:
        worker = subject.split(".")[2]
        self.asked.append(worker)
        self.named.append(message.request_id)
        found = self.answer(worker, message)
        return await found if asyncio.iscoroutine(found) else found


class World:
    def __init__(self, answer: Answer, *workers: str) -> None:
        self.peers, self.bus = Peers(), AskedBus(answer)
        for worker in workers:
            self.peers.saw(state(worker))
        self.fleet = PoolingFleet(
            self.bus,
            self.peers,
            lambda: self.peers.ready(Role.POOL),
            gateway_id="g",  # type: ignore[arg-type]
        )

    def ask(
        self, tokens: int = 8, *, tenant: str = "t", weight: float = 1.0, seconds: float = 60.0
    ) -> asyncio.Task[Pooled]:
        message = Pool(request_id="r", remaining_ms=0, inputs=[pack_tokens([1] * tokens)])
        turn = Turn(tenant=Tenant(name=tenant, weight=weight), until=time.monotonic() + seconds)
        return asyncio.ensure_future(self.fleet.ask(message, turn))


GOOD = Pooled(values=b"\0\0\0\0", width=1)


async def test_the_worker_that_is_asked_least_answers() -> None:
    gate = asyncio.Event()

    async def late(worker: str, message: Pool) -> Pooled:
        await gate.wait()
        return GOOD

    world = World(late, "a", "b")
    tasks = [world.ask(8), world.ask(4), world.ask(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gate.set()
    assert [await task for task in tasks] == [GOOD] * 3
    assert sorted(world.bus.asked) == ["a", "b", "b"]


async def test_another_worker_is_asked_when_one_is_lost_fails_or_is_gone() -> None:
    def refuses(worker: str, message: Pool) -> Any:
        if worker == "a":
            raise UnavailableError("nobody")
        return Pooled(code=StepFailedError.code, message="broken") if worker == "b" else GOOD

    world = World(refuses, "a", "b", "c")
    assert await world.ask() == GOOD
    assert world.bus.asked == ["a", "b", "c"]


async def test_a_lost_workers_pieces_are_asked_for_again_at_once() -> None:
    async def hangs(worker: str, message: Pool) -> Pooled:
        if worker == "a":
            await asyncio.Event().wait()
        return GOOD

    world = World(hangs, "a", "b")
    task = world.ask()
    while world.bus.asked != ["a"]:
        await asyncio.sleep(0)
    world.peers.saw(state("a", incarnation=2))  # a restart: the one before is gone
    async with asyncio.timeout(60):
        assert await task == GOOD
    assert world.bus.asked == ["a", "b"]


async def test_a_clients_mistake_is_not_asked_again() -> None:
    world = World(lambda worker, message: Pooled(code=InvalidRequestError.code, message="token 7"), "a", "b")
    with pytest.raises(InvalidRequestError, match="token 7"):
        await world.ask()
    assert world.bus.asked == ["a"]


async def test_tenants_take_turns_by_weight_while_workers_are_full() -> None:
    order, gate = list[int](), asyncio.Semaphore(0)

    async def late(worker: str, message: Pool) -> Pooled:
        await gate.acquire()
        order.append(len(message.inputs[0]) // 4)
        return GOOD

    world = World(late, "a")
    first = world.ask(WINDOW_TOKENS)
    await asyncio.sleep(0)
    many = [world.ask(WINDOW_TOKENS - 1, tenant="many") for _ in range(2)]
    await asyncio.sleep(0)
    one = world.ask(WINDOW_TOKENS - 2, tenant="one", weight=2.0)
    await asyncio.sleep(0)
    for _ in (first, *many, one):
        gate.release()
    async with asyncio.timeout(60):
        await asyncio.gather(first, one, *many)
    assert order == [WINDOW_TOKENS, WINDOW_TOKENS - 2, WINDOW_TOKENS - 1, WINDOW_TOKENS - 1]


async def test_a_request_that_ends_as_its_turn_comes_leaves_no_charge() -> None:
    gate = asyncio.Event()

    async def late(worker: str, message: Pool) -> Pooled:
        await gate.wait()
        if not second.done() and (answering := asyncio.current_task()) is not None:
            # Runs once the first has its answer: the second was given the worker, and has not woken yet.
            answering.add_done_callback(lambda _: second.cancel())
        return GOOD

    world = World(late, "a")
    first, second = world.ask(WINDOW_TOKENS), world.ask(WINDOW_TOKENS)
    while not world.fleet.waiting_tokens:
        await asyncio.sleep(0)
    gate.set()
    await asyncio.wait([first, second])
    assert second.cancelled()
    assert world.bus.asked == ["a"]
    assert await world.ask(WINDOW_TOKENS, seconds=60.0) == GOOD


async def test_a_piece_that_nobody_waits_for_is_cancelled_where_it_is() -> None:
    async def hangs(worker: str, message: Pool) -> Pooled:
        return await asyncio.Event().wait() or GOOD

    world = World(hangs, "a", "b")
    tasks = [world.ask(), world.ask()]
    while len(world.bus.asked) < 2:
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    while not world.bus.cancelled:
        await asyncio.sleep(0)
    assert world.bus.cancelled == [(world.bus.asked[0], world.bus.named[0])]
    assert world.bus.named[0] != world.bus.named[1], "one request's name has several pieces"
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])


async def test_a_worker_has_no_more_pieces_than_it_hears_at_a_time() -> None:
    gate = asyncio.Event()

    async def late(worker: str, message: Pool) -> Pooled:
        await gate.wait()
        return GOOD

    world = World(late, "a")
    tasks = [world.ask(1) for _ in range(WINDOW_PIECES + 3)]
    while world.fleet.waiting_tokens < 3 or len(world.bus.asked) < WINDOW_PIECES:
        await asyncio.sleep(0)
    assert (len(world.bus.asked), world.fleet.waiting_tokens) == (WINDOW_PIECES, 3)
    gate.set()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*tasks) == [GOOD] * len(tasks)


async def test_a_lost_worker_that_comes_back_is_charged_like_others() -> None:
    gate = asyncio.Event()

    async def hangs(worker: str, message: Pool) -> Pooled:
        if not gate.is_set():
            await asyncio.Event().wait()
        return GOOD

    world = World(hangs, "a")
    lost = world.ask(WINDOW_TOKENS)
    while world.bus.asked != ["a"]:
        await asyncio.sleep(0)
    gate.set()
    world.peers.saw(state("a", incarnation=2))
    async with asyncio.timeout(60):
        assert await lost == GOOD
    world.peers.saw(state("b"))
    world.bus.asked.clear()
    gate.clear()
    tasks = [world.ask(8) for _ in range(4)]
    while len(world.bus.asked) < 4:
        await asyncio.sleep(0)
    assert sorted(world.bus.asked) == ["a", "a", "b", "b"]
    for task in tasks:
        task.cancel()


async def test_who_waits_again_is_not_given_the_worker_that_failed() -> None:
    gates = {worker: asyncio.Event() for worker in ("a", "b", "failure")}
    small = list[str]()

    async def answer(worker: str, message: Pool) -> Pooled:
        if len(message.inputs[0]) > 4 * 8:
            await gates[worker].wait()
            return GOOD
        small.append(worker)
        if worker == "b":
            return GOOD
        await gates["failure"].wait()
        return Pooled(code=StepFailedError.code, message="broken")

    world = World(answer, "a", "b")
    task, of_b, of_a = world.ask(8), world.ask(WINDOW_TOKENS), world.ask(WINDOW_TOKENS)
    while world.fleet.waiting_tokens != WINDOW_TOKENS:
        await asyncio.sleep(0)
    gates["failure"].set()
    while world.fleet.waiting_tokens != 8:  # both are full again
        await asyncio.sleep(0)
    gates["a"].set()
    assert await of_a == GOOD
    gates["b"].set()
    assert await asyncio.gather(task, of_b) == [GOOD, GOOD]
    assert small == ["a", "b"]


async def test_without_a_worker_the_wait_ends_with_the_reason() -> None:
    with pytest.raises(UnavailableError, match="no worker of this model is ready"):
        await World(lambda worker, message: GOOD).ask(seconds=0.01)


async def test_a_passed_deadline_is_said() -> None:
    with pytest.raises(DeadlineExceededError):
        await World(lambda worker, message: GOOD, "a").ask(seconds=-1.0)


@pytest.mark.parametrize(
    ("counts", "workers", "found"),
    [
        ([10], 4, [1]),
        ([1000] * 8, 1, [8]),
        ([1000] * 8, 2, [4, 4]),
        ([1000] * 8, 8, [2, 2, 2, 2]),
        ([20_000, 1], 1, [1, 1]),
        ([1] * (PIECE_INPUTS + 1), 1, [PIECE_INPUTS, 1]),
    ],
)
def test_pieces_cover_all_inputs(counts: list[int], workers: int, found: list[int]) -> None:
    made = pieces(counts, workers=workers, row_bytes=4, rows_a_token=False)
    assert [part.stop - part.start for part in made] == found
    assert [at for part in made for at in range(part.start, part.stop)] == list(range(len(counts)))


def test_pieces_are_bounded_by_the_answers_bytes() -> None:
    assert len(pieces([100] * 4, workers=1, row_bytes=4096, rows_a_token=True)) == 4
