"""What a worker says of itself, and how often it says everything again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from common.errors import UnavailableError
from common.messages import Trying, WorkerState
from tests.fakes.bus import MemoryBus
from tests.fakes.role import NotingRole
from tests.fakes.worker import Bench, new_fake_engine, running_bench
from tests.unit.engine.generate import new_sequence
from worker.device.naming import Naming
from worker.device.step_policy import StepTargets
from worker.device.trials import Trials
from worker.heartbeat import Heartbeat, Whole
from worker.identity import Identity
from worker.settings import ModelIdentity, WorkerSettings


class MemoryRegistry:
    """The registry and the global index of one worker. While `is_down` every call fails after it was noted."""

    def __init__(self) -> None:
        self.is_down = False
        self.is_new = False  # the next registration finds nothing of this worker
        self.announced: list[tuple[list[bytes], list[bytes]]] = []

    async def register(self, state: WorkerState, *, ttl_ms: int = 3_000) -> bool:
        return self.is_new

    async def unregister(self, worker: str, incarnation: int) -> None: ...

    async def announce(self, worker: str, incarnation: int, added: list[bytes], removed: list[bytes]) -> None:
        self.announced.append((added, removed))
        if self.is_down:
            raise UnavailableError("the registry is down")


class Told:
    def __init__(self, bench: Bench) -> None:
        self.bench, self.registry = bench, MemoryRegistry()
        self.heartbeat = Heartbeat(
            bench.context,
            pipeline=bench.pipeline,
            store=self.registry,  # type: ignore[arg-type]
            settings=WorkerSettings(served=ModelIdentity("m", "t"), step_targets=StepTargets(7.0, 14.0)),
            fingerprint="f",
            whole=Whole.of(bench.context.cache.layout, 1000),
        )

    def publish(self, digest: bytes) -> list[int]:
        """A block that others may match."""
        blocks = self.bench.pool.allocate(1)
        self.bench.pool.publish(blocks[0], digest)
        return blocks


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    async with running_bench(new_fake_engine(16)) as bench:
        yield Told(bench)


async def test_a_heartbeat_says_what_the_parts_know(told: Told) -> None:
    told.bench.roles.attach(NotingRole("decode"), active=True)
    told.publish(b"1" * 16)
    await told.heartbeat.beat()
    [(subject, state)] = told.bench.bus.published
    assert isinstance(state, WorkerState)
    assert (subject, state.worker, state.incarnation) == ("baton.heartbeat.w", "w", 1)
    assert (state.status, state.roles, state.model, state.model_fingerprint) == ("ready", ["decode"], "m", "f")
    assert (state.free_blocks, state.max_model_len, state.busy) == (15, 60, False)


async def test_the_step_target_follows_the_fleet_s_roles(told: Told) -> None:
    await told.heartbeat.beat()
    assert told.bench.context.passes.budget.target_ms == 14.0
    told.bench.peers.saw(told.bench.state("p"))  # a worker that only prefills
    await told.heartbeat.beat()
    assert told.bench.context.passes.budget.target_ms == 7.0


async def test_the_index_is_told_everything_once_and_then_what_changed(told: Told) -> None:
    first, second = b"1" * 16, b"2" * 16
    told.publish(first)
    await told.heartbeat.announce()
    await told.heartbeat.announce()  # nothing new
    told.publish(second)
    await told.heartbeat.announce()
    assert told.registry.announced == [([first], []), ([second], [])]


async def test_after_a_lost_call_or_a_new_registration_everything_is_told_again(told: Told) -> None:
    digest = b"1" * 16
    told.publish(digest)
    told.registry.is_down = True
    with pytest.raises(UnavailableError):
        await told.heartbeat.announce()
    told.registry.is_down = False
    await told.heartbeat.announce()
    await told.heartbeat.register()
    await told.heartbeat.announce()
    told.registry.is_new = True  # Redis was flushed
    await told.heartbeat.register()
    await told.heartbeat.announce()
    assert told.registry.announced == [([digest], [])] * 3


async def test_gateways_with_suspects_hear_whose_turn_it_is_and_a_lost_bus_holds_nobody_up() -> None:
    bus, trials = MemoryBus(), Trials()
    suspect, other = new_sequence("a", [1]), new_sequence("b", [1])
    suspect.append(7)
    for sequence, gateway in ((suspect, "g1"), (other, "g2")):
        sequence.suspect_until = 5
        trials.watch(sequence, gateway, "00-11-22-01")
    await Naming(bus=bus, identity=Identity("w", 1), trials=trials).name(suspect)
    assert sorted(subject for subject, _ in bus.published) == ["baton.gateway.g1.w", "baton.gateway.g2.w"]
    for _, message in bus.published:
        assert isinstance(message, Trying)
        assert (message.request_id, message.traceparent, message.worker) == ("a", "00-11-22-01", "w")
        assert message.position == 1

    class LostBus(MemoryBus):
        async def publish(self, subject: str, message: msgspec.Struct) -> None:
            raise UnavailableError("not connected")

    await Naming(bus=LostBus(), identity=Identity("w", 1), trials=trials).name(suspect)
