"""Models that hosts load when a gateway wants them: wishes, waiting, and what clients are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.errors import UnavailableError
from common.messages import Ack, HostedModel, HostState, Unload
from common.words import HostStatus
from gateway.answers.ask import FOREVER_S, lasting_s
from gateway.observe.fleet_metrics import HostedMetrics
from gateway.placement.hosts import GONE_AFTER_S, Hosts

KEEP_S = 60.0


class Orders:
    """A bus that notes orders to hosts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def request(self, subject: str, order: Any, decoder: Any, *, timeout_s: float) -> Ack:
        self.asked.append((subject, order))
        return Ack(known=True)


class Scene:
    """A gateway's hosts, by a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ready: set[str] = set()
        self.bus = Orders()
        self.running = list[str]()
        self.hosts = Hosts(
            self.ready.__contains__,
            self.bus,  # type: ignore[arg-type]
            gateway_id="g",
            keep_s=KEEP_S,
            called={"chat": "its-name"},
            running=lambda: self.running,
            clock=lambda: self.now,
        )

    def says(self, host: str = "h", reason: str = "", **models: HostStatus) -> None:
        told = {name.replace("_", "-"): HostedModel(status=status, reason=reason) for name, status in models.items()}
        self.hosts.saw(HostState(host=host, incarnation=1, models=told))


def test_workers_at_all_hosts_stand_beside_those_that_the_planner_wants() -> None:
    scene = Scene()

    def says(host: str, *decode: str, **more: Any) -> None:
        told = HostedModel(status=HostStatus.READY, workers={name: ["decode"] for name in decode}, **more)
        scene.hosts.saw(HostState(host=host, incarnation=1, models={"its-name": told}))

    says("h", "d0", "d1")
    assert scene.hosts.workers("chat") == {"decode": (2, None)}
    says("g", "d2", wanted={"decode": 4, "prefill": 1})
    assert scene.hosts.workers("chat") == {"decode": (3, 4), "prefill": (0, 1)}
    lines = generate_latest(_only(HostedMetrics(["chat"], scene.hosts))).decode().splitlines()
    assert 'baton_hosted_workers{count="running",model_name="chat",role="decode"} 3.0' in lines
    assert 'baton_hosted_workers{count="wanted",model_name="chat",role="decode"} 4.0' in lines
    scene.now += 3.0  # one of them is gone
    says("h", "d0", "d1")
    assert scene.hosts.workers("chat") == {"decode": (2, None)}
    assert scene.hosts.workers("other") == {}


def _only(metrics: HostedMetrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry


async def test_a_request_waits_until_its_model_is_ready_and_its_wish_lasts_as_long_as_it_says() -> None:
    scene = Scene()
    scene.says(a=HostStatus.UNLOADED)
    waiting = asyncio.create_task(scene.hosts.load("a"))
    await scene.hosts.news.wait()
    want = scene.hosts.wanted()["a"]
    assert (want.active, want.keep_s) == (True, KEEP_S)
    scene.says(a=HostStatus.LOADING)
    assert scene.hosts.said("a").startswith("a: loading")
    assert not waiting.done()
    scene.ready.add("a")
    scene.hosts.changed()  # a worker's heartbeat
    await waiting
    assert not scene.hosts.wanted()["a"].active
    scene.running = ["a"]
    assert scene.hosts.wanted()["a"].active
    assert scene.hosts.is_active("a")
    scene.running = []
    scene.now += KEEP_S + 1
    scene.says(a=HostStatus.READY)
    assert scene.hosts.wanted() == {}
    await scene.hosts.load("a", keep_s=5.0)
    assert scene.hosts.wanted()["a"].keep_s == 5.0


async def test_a_model_is_kept_while_a_request_uses_it_that_no_room_counts() -> None:
    scene = Scene()
    scene.says(a=HostStatus.READY)
    scene.ready.add("a")
    with scene.hosts.using("a"), scene.hosts.using("a"):
        scene.now += 10 * KEEP_S
        scene.says(a=HostStatus.READY)
        assert scene.hosts.wanted()["a"].active
        assert scene.hosts.is_active("a")
    want = scene.hosts.wanted()["a"]
    assert (want.active, want.keep_s) == (False, KEEP_S)
    assert not scene.hosts.is_active("a")


async def test_all_who_wait_look_again_when_a_worker_or_a_host_says_something_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.placement.hosts.LOOK_EACH_S", 1e6)
    scene = Scene()
    scene.says(a=HostStatus.LOADING, b=HostStatus.LOADING)
    waiting = [asyncio.create_task(scene.hosts.load(model)) for model in ("a", "a", "b")]
    await scene.hosts.news.wait()
    scene.ready.add("a")
    scene.hosts.changed()
    await asyncio.gather(*waiting[:2])
    assert not waiting[2].done()
    scene.says(a=HostStatus.READY, b=HostStatus.FAILED)
    with pytest.raises(UnavailableError, match="'b' could not be loaded"):
        await waiting[2]


async def test_a_model_that_fails_or_whose_host_is_gone_is_told_with_its_reason() -> None:
    scene = Scene()
    scene.says(a=HostStatus.FAILED, reason="no memory")
    with pytest.raises(UnavailableError, match="'a' could not be loaded: no memory"):
        await scene.hosts.load("a")
    scene.says(a=HostStatus.LOADING)
    assert not scene.hosts.wanted()["a"].active  # it waits no more
    waiting = asyncio.create_task(scene.hosts.load("a"))
    await scene.hosts.news.wait()
    scene.now += GONE_AFTER_S + 1
    with pytest.raises(UnavailableError, match="no host offers model 'a' any more"):
        await waiting


async def test_the_host_where_a_model_is_nearest_to_ready_counts_and_workers_names_are_told() -> None:
    scene = Scene()
    scene.says("h0", its_name=HostStatus.FAILED)
    scene.says("h1", its_name=HostStatus.LOADING)
    found = scene.hosts.find("chat")
    assert found is not None
    assert found.status is HostStatus.LOADING
    assert scene.hosts.find("other") is None
    await scene.hosts.load("other")  # as ever: nobody loads it
    scene.hosts.used("chat")
    assert list(scene.hosts.wanted()) == ["its-name"]
    assert await scene.hosts.unload("chat")
    assert scene.bus.asked == [
        ("baton.host.h0.g", Unload(model="its-name")),
        ("baton.host.h1.g", Unload(model="its-name")),
    ]
    assert scene.hosts.wanted() == {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("90s", 90), (300, 300), ("300", 300), (0, 0), ("0", 0), ("0s", 0), ("500ms", 0.5)],
)
def test_how_long_a_model_stays_is_read_as_ollama_writes_it(text: str | float, seconds: float) -> None:
    assert lasting_s(text) == seconds


def test_below_0_is_for_ever_and_other_words_are_refused() -> None:
    assert {lasting_s(text) for text in (-1, "-1", "-1m", "-5h")} == {FOREVER_S}
    for text in ("", "soon", "5 m", "m", "nan"):
        with pytest.raises(ValueError, match="is not like 300, 5m, 1h30m or -1"):
            lasting_s(text)
