"""Workers change their roles under load, told by hand or by the planner: every answer complete and right, nothing held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from common import subjects
from common.bus import NatsBus
from common.messages import RolesReply, SetRoles, worker_reply_decoder
from common.peers import Peers
from tests.e2e.asking import FAKE, all_idle, client_of, complete, expected, until, watching
from tests.e2e.cluster import Cluster

SWITCH_S = 60.0
LONG = 600  # tokens of an answer that goes on, however long an order takes: six seconds


class Stream:
    """Clients that ask for one answer after another until told to stop; each answer is checked."""

    def __init__(
        self, client: httpx.AsyncClient, model: Path, clients: int, *, prompt: int = 0, answer: int = 0
    ) -> None:
        """`prompt`, `answer`: tokens of each; 0: mixed ones."""
        self._prompt = prompt
        self._answer = answer
        self._client = client
        self._model = model
        self._clients = clients
        self._stopping = asyncio.Event()
        self._answered = asyncio.Condition()
        self.answers = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(self._clients):
                group.create_task(self._ask_on(index))

    async def _ask_on(self, index: int) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            tokens = range(self._prompt or 20 + 37 * index)
            prompt = [(31 * index + 7 * number + position) % 500 for position in tokens]
            max_tokens = self._answer or 8 + 11 * (index % 4)
            answer = await complete(self._client, prompt, max_tokens=max_tokens)
            assert answer["tokens"] == expected(self._model, prompt, max_tokens)
            async with self._answered:
                self.answers += 1
                self._answered.notify_all()

    async def more(self, count: int) -> None:
        """Wait for so many more answers."""
        wanted = self.answers + count
        async with asyncio.timeout(60), self._answered:
            await self._answered.wait_for(lambda: self.answers >= wanted)

    def stop(self) -> None:
        self._stopping.set()


@pytest.fixture(scope="module")
async def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two prefill and two decode workers; each test leaves them so, with nothing to do."""
    options = FAKE | {"fake_step_ms": 10, "fake_token_us": 1000, "max_prefills": 2}
    async with (
        Cluster(tmp_path_factory.mktemp("roles"), model=model, prefill=2, decode=2, **options) as cluster,
        client_of(cluster) as client,
        watching(cluster) as (bus, peers),
    ):
        await until(peers, lambda states: len(states) == 4)
        yield Fleet(client, bus, peers)


async def test_roles_change_back_and_forth_under_load_and_nothing_is_lost(fleet: Fleet, model: Path) -> None:
    stream = Stream(fleet.client, model, clients=8)
    async with asyncio.TaskGroup() as group:
        group.create_task(stream.run())
        await stream.more(8)
        for one, other in (("p", "pd"), ("pd", "d"), ("d", "d"), ("p", "p"), ("d", "p")):
            await fleet.set_roles("decode-1", one)
            await stream.more(6)
            await fleet.set_roles("prefill-1", other)
            await stream.more(6)
        stream.stop()
    await until(fleet.peers, all_idle)
    assert fleet.roles("prefill-1") == ["prefill"]
    assert await errors(fleet.client) == 0


async def errors(client: httpx.AsyncClient) -> float:
    """How many requests the gateway answered with an error."""
    lines = (await client.get("/metrics")).text.splitlines()
    counts = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("baton_request_errors_total{")]
    assert counts, "nothing is counted"
    return sum(counts)


@pytest.mark.long
async def test_running_answers_end_where_they_began_after_their_worker_lost_its_role(fleet: Fleet, model: Path) -> None:
    prompts = [[index + 3] * 20 for index in range(6)]
    retries = await fleet.retries()
    asking = [asyncio.create_task(complete(fleet.client, prompt, max_tokens=LONG)) for prompt in prompts]
    await until(fleet.peers, lambda states: sum(s.running for s in states if "decode" in s.roles) == 6)
    loser = max(("decode-0", "decode-1"), key=lambda name: fleet.peers.states[name].running)
    running = fleet.peers.states[loser].running
    await fleet.set_roles(loser, "p")
    assert fleet.peers.states[loser].running == running > 0
    late = await complete(fleet.client, [99] * 40)
    answers = [await task for task in asking]
    await fleet.set_roles(loser, "d")
    await until(fleet.peers, all_idle)
    assert late["tokens"] == expected(model, [99] * 40)
    assert [answer["tokens"] for answer in answers] == [expected(model, prompt, LONG) for prompt in prompts]
    assert await fleet.retries() == retries


async def test_what_waits_for_a_role_that_is_lost_is_placed_again_and_that_is_no_attempt(
    fleet: Fleet, model: Path
) -> None:
    prompts = [[index + 2] * 300 for index in range(20)]  # seconds of work, also where orders take long
    asking = [asyncio.create_task(complete(fleet.client, prompt, max_tokens=4)) for prompt in prompts]
    await until(fleet.peers, lambda states: sum(s.running for s in states if "prefill" in s.roles) == 4)
    retries = await fleet.retries()
    for _ in range(4):  # more often than a request may be tried
        for worker in ("prefill-0", "prefill-1"):
            await fleet.set_roles(worker, "d")
            await fleet.set_roles(worker, "p")
    assert await fleet.retries() > retries
    answers = [await task for task in asking]
    await until(fleet.peers, all_idle)
    assert [answer["tokens"] for answer in answers] == [expected(model, prompt, 4) for prompt in prompts]


async def test_roles_that_can_t_be_are_refused_with_the_reason(fleet: Fleet) -> None:
    for wanted, why in (["encode"], "'encode'"), ([], "no role is given"):
        reply = await fleet.ask("decode-0", wanted)
        assert (reply.accepted, reply.roles) == (False, ["decode"])
        assert why in reply.reason


@pytest.mark.long
async def test_the_planner_moves_workers_to_where_the_load_is_and_back(model: Path, tmp_path: Path) -> None:
    quick = ("--plan-period-s", "0.2", "--plan-hold-s", "0.6", "--plan-pause-s", "1")
    options = FAKE | {"fake_token_us": 2000, "max_sequences": 12}
    async with (
        Cluster(
            tmp_path,
            model=model,
            prefill=1,
            decode=3,
            gateway_options=("--slo-window-s", "3"),
            planner_options=quick,
            **options,
        ) as cluster,
        client_of(cluster) as client,
        watching(cluster) as (_, peers),
    ):
        moves: list[list[str]] = []
        peers.on_changed(lambda state: moves.append(state.roles))
        await cluster.start("planner")
        for stream, roles in (
            (Stream(client, model, clients=6, prompt=200, answer=2), ["prefill"]),
            (Stream(client, model, clients=30, prompt=8, answer=100), ["decode"]),
        ):
            async with asyncio.TaskGroup() as group:
                group.create_task(stream.run())
                await until(peers, lambda _, wanted=roles: wanted in moves, timeout_s=60)
                await stream.more(8)
                stream.stop()
        await until(peers, lambda states: len(states) == 4 and all_idle(states))
        assert await errors(client) == 0
    log = (tmp_path / "planner.log").read_text()
    assert "planner.move reason=prefill is pressed" in log
    assert "planner.move reason=decode is pressed" in log
    assert "refused" not in log
    assert "violation" not in log + (tmp_path / "gateway.log").read_text()


class Fleet:
    """The cluster's gateway, and a bystander on its bus who tells workers what to do."""

    def __init__(self, client: httpx.AsyncClient, bus: NatsBus, peers: Peers) -> None:
        self.client = client
        self.peers = peers
        self._bus = bus

    async def ask(self, worker: str, roles: list[str]) -> RolesReply:
        message = SetRoles(roles=roles, reason="the test wants it")
        reply = await self._bus.request(
            subjects.plan(worker, "tests"), message, worker_reply_decoder, timeout_s=SWITCH_S
        )
        assert isinstance(reply, RolesReply)
        return reply

    async def set_roles(self, worker: str, letters: str) -> None:
        """Give `worker` the roles that begin with these letters, and wait until its heartbeat says so."""
        wanted = [role for role in ("decode", "prefill") if role[0] in letters]
        reply = await self.ask(worker, wanted)
        assert reply.accepted, reply.reason
        assert reply.roles == wanted
        await until(self.peers, lambda _: self.roles(worker) == wanted)

    def roles(self, worker: str) -> list[str]:
        return self.peers.states[worker].roles

    async def retries(self) -> float:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("baton_gateway_events_total") and "retries" in line
        )
