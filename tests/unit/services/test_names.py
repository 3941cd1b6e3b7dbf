"""A process's name on the bus: unlike others' by default, refused while another has it, given up to an older holder."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from common import subjects
from common.messages import ANYBODY_THERE, Ack, GatewayState, to_worker_decoder, worker_reply_decoder
from common.messages import gateway_state_decoder as decoder
from common.settings import ConfigError
from common.subjects import check_id
from common.words import WorkerStatus
from services.runtime import names
from services.runtime.names import Name, Rivals, held, made_up, new_incarnation
from services.runtime.permissions import Member
from services.up.members import members_of
from services.up.settings import UpSettings
from services.up.stack import tag_of
from tests.fakes.bus import MemoryBus
from tests.fakes.workers import a_worker

BEATS = subjects.gateway_heartbeat("a")


def name_on(bus: MemoryBus) -> Name:
    async def ask() -> object:
        return await bus.request(subjects.worker("a"), ANYBODY_THERE, worker_reply_decoder, timeout_s=1.0)

    return Name(id="a", incarnation=5, flag="--worker-id", beats=BEATS, beat_decoder=decoder, ask=ask)


async def answer(message: object) -> Ack:
    return Ack(known=False)


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits are short."""
    for wait, seconds in {"LEASE_S": 0.2, "RIVAL_S": 0.02, "ASK_AGAIN_S": 0.01}.items():
        monkeypatch.setattr(names, wait, seconds)


@pytest.mark.parametrize(
    ("host", "part"),
    [("gpu7", "-gpu7-"), ("gpu7.rack.example", "-gpu7-"), ("g_ü p", "-g_-p-"), ("", "-"), ("x" * 300 + "7", "xxx7-")],
)
def test_made_up_names_have_the_host_and_are_valid_and_unlike(
    monkeypatch: pytest.MonkeyPatch, host: str, part: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    made = [check_id(made_up("prefill-63")) for _ in range(50)]
    assert len(set(made)) == 50
    assert all(name.startswith("prefill-63-") and part in name for name in made)


def test_lives_are_numbered_in_the_order_in_which_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    for second in (1_800_000_000.0, 1_800_000_000.25, 1_800_000_000.99, 1_800_000_001.0, 4_000_000_000.5):
        monkeypatch.setattr("time.time_ns", lambda second=second: int(second * 1e9))
        numbers.append(new_incarnation())
    assert numbers == sorted(numbers)
    assert numbers[-1] < 2**63


def test_one_up_has_the_same_names_at_each_start_and_another_has_others(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    tag = tag_of(one)
    assert tag == tag_of(one) != tag_of(other)
    (other / "tag").write_text("../../x\n")
    assert re.fullmatch("[0-9a-f]{6}", tag_of(other))
    settings = UpSettings.model_validate({"prefill": 1, "decode": 2, "planner": True})
    members = members_of(settings, tag)
    assert list(members) == ["prefill-0", "decode-0", "decode-1", "planner", "gateway"]
    assert all(member.id == made_up(name, tag) for name, member in members.items())
    assert members_of(UpSettings.model_validate({"gateway_id": "mine", "prefill": 0}), tag)["gateway"] == Member(
        "gateway", "mine"
    )
    several = members_of(UpSettings.model_validate({"gateway_id": "mine", "gateways": 2, "prefill": 0}), tag)
    assert {name: member.id for name, member in several.items() if member.role == "gateway"} == {
        "gateway-0": "mine-0",
        "gateway-1": "mine-1",
    }


async def test_a_free_name_is_taken_at_once_and_one_that_answers_is_refused_by_name(bus: MemoryBus) -> None:
    async with held(bus, name_on(bus)):
        pass
    await bus.serve(subjects.worker("a"), to_worker_decoder, answer)
    with pytest.raises(ConfigError, match=r"the name 'a' is taken: .*--worker-id"):
        async with held(bus, name_on(bus)):
            pytest.fail("it was taken")


async def test_a_name_taken_while_the_model_was_loaded_is_refused_before_others_see_both(bus: MemoryBus) -> None:
    async with held(bus, name_on(bus)) as still_free:
        await still_free()
        await bus.serve(subjects.worker("a"), to_worker_decoder, answer)
        with pytest.raises(ConfigError, match="the name 'a' is taken"):
            await still_free()


@pytest.mark.usefixtures("soon")
async def test_a_holder_that_neither_answers_nor_beats_is_no_obstacle_and_one_that_beats_is(bus: MemoryBus) -> None:
    await bus.serve(subjects.worker("a"), to_worker_decoder, answer)
    bus.deaf.add(subjects.worker("a"))
    async with held(bus, name_on(bus)):
        pass

    async def beat() -> None:
        while True:
            await bus.publish(BEATS, GatewayState(gateway="a", incarnation=9))
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat())
    with pytest.raises(ConfigError, match="the name 'a' is taken"):
        async with held(bus, name_on(bus)):
            pytest.fail("it was taken")
    beating.cancel()


@pytest.mark.usefixtures("soon")
async def test_of_two_that_have_a_name_the_younger_ends(bus: MemoryBus) -> None:
    """They began at the same instant, or a divided bus became whole."""
    with pytest.raises(ConfigError, match="the name 'a' is taken"):
        await beside(bus, rival=4, beats=10_000)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


@pytest.mark.usefixtures("soon")
async def test_of_two_that_have_a_name_the_older_stays_and_says_so(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    await beside(bus, rival=6, beats=20)
    assert [record.msg for record in caplog.records] == ["name.contested"]


async def beside(bus: MemoryBus, *, rival: int, beats: int) -> None:
    """Have a name, of incarnation 5, while another process beats under it."""
    async with asyncio.timeout(60), held(bus, name_on(bus)):
        for _ in range(beats):
            await bus.publish(BEATS, GatewayState(gateway="a", incarnation=5))  # our own is no rival
            await bus.publish(BEATS, GatewayState(gateway="a", incarnation=rival))
            await asyncio.sleep(0.01)


async def test_a_cancellation_from_elsewhere_stays_one(bus: MemoryBus) -> None:
    entered = asyncio.Event()

    async def hold() -> None:
        async with held(bus, name_on(bus)):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("instants", "lives"),
    [([0.0], False), ([0.0, 0.5], False), ([0.0, 0.5, 1.0], True), ([0.0, 0.1, 0.2], False), ([0.0, 4.0, 8.0], False)],
)
def test_only_who_beats_steadily_is_a_rival(bus: MemoryBus, instants: list[float], lives: bool) -> None:
    """The last words of a process that ended may arrive late."""
    now = 0.0
    rivals = Rivals(name_on(bus), lambda: now)
    for now in instants:  # noqa: B007 - `rivals` reads it
        rivals.saw(GatewayState(gateway="a", incarnation=4))
    assert bool(rivals.living) is lives


def test_a_worker_that_says_that_it_is_gone_is_no_rival(bus: MemoryBus) -> None:
    rivals = Rivals(name_on(bus))
    rivals.saw(a_worker("a", "decode", incarnation=4))
    assert rivals.any
    rivals.saw(a_worker("a", "decode", incarnation=4, status=WorkerStatus.STOPPED))
    assert not rivals.any
