"""What the console computes, and the contrast of its colours."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from itertools import product
from typing import Any

import httpx
import msgspec
import pytest

from common.errors import UnavailableError
from common.messages import Imported, Region, Settle
from common.peers import Peers
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings, create_app
from gateway.console.assets import FOLDER
from gateway.console.control import FleetControl
from gateway.console.feed import MAX_WATCHERS, Feed
from gateway.console.messages import ConsoleAsk
from gateway.console.parts import activity, merged, own_part
from gateway.console.state import counted, handoffs, percentile, started_unix, worker_json
from gateway.request.attempt import AttemptLine
from gateway.request.timeline import Timeline, Timelines
from services.runtime.names import new_incarnation
from tests.fakes.generations import ScriptedGenerations
from tests.fakes.workers import a_worker

NOW = 1000.0
UNIX = 1_800_000_000.0
CSS = "".join(path.read_text() for path in [FOLDER / "style.css", *sorted((FOLDER / "pages").glob("*.css"))])
COLOURS = {
    name: (light, dark) for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", CSS)
}
TEXTS = ("text", "muted", "accent", "good", "warn", "bad")
MARKS = ("edge", "read", "wait", "queue", "prefill", "frame", "transfer", "decode", "accent")
PAIRS = [*product(TEXTS, ("ground", "panel")), *product(("text", "muted"), ("sunken",))]
PAIRS += [("on-accent", "accent"), ("on-bad", "bad"), ("on-alarm", "alarm"), ("ground", "text")]


def line(name: str, *, received: float, first: float | None, ended: float | None, tokens: int = 0) -> Timeline:
    made = Timeline(request_id=name, received_at=received, submitted_at=received, prompt_tokens=40)
    made.first_token_at, made.ended_at, made.completion_tokens = first, ended, tokens
    made.status = "stop" if ended is not None else "running"
    return made


def handed_over(name: str, *, at: float, blocks: int, push_ms: float | None) -> Timeline:
    made = line(name, received=at - 1, first=at, ended=None)
    attempt = AttemptLine(number=1, began_at=at - 1, because="", prefill="p", decode=["d"], reason="load")
    attempt.claimed_by = "p"
    message = {"request_id": name, "attempt": 1, "incarnation": 1}
    attempt.imported = Imported(
        **message,
        worker="d",
        transferred_blocks=blocks,
        transferred_bytes=blocks * 1000,
        reused_blocks=0,
        transfer_ms=9.0,
    )
    attempt.imported_at = at
    if push_ms is not None:
        attempt.settled = Settle(**message, worker="p", decode_worker="d", push_ms=push_ms)
    made.attempts.append(attempt)
    return made


def test_handovers_are_of_the_last_minute_and_newest_first() -> None:
    lines = [handed_over("old", at=NOW - 61, blocks=1, push_ms=1.0), line("none", received=NOW, first=None, ended=None)]
    lines += [handed_over("a", at=NOW - 5, blocks=2, push_ms=2.0), handed_over("b", at=NOW - 1, blocks=3, push_ms=None)]
    found = handoffs(lines, NOW, UNIX)
    assert [(one["id"], UNIX - one["at_unix"], one["bytes"], one["push_ms"]) for one in found] == [
        ("b/1", 1.0, 3000, None),
        ("a/1", 5.0, 2000, 2.0),
    ]


def test_bandwidth_counts_only_pushes_whose_time_is_known_over_all_gateways() -> None:
    here = [handed_over("a", at=NOW, blocks=2, push_ms=2.0), handed_over("b", at=NOW, blocks=4, push_ms=1.0)]
    there = [handed_over("c", at=NOW, blocks=50, push_ms=None)]
    parts = {"g0": activity(here, NOW, UNIX), "g1": activity(there, NOW, UNIX)}
    (link,) = merged(parts)["links"]
    assert (link["handovers"], link["bytes"], link["bytes_per_s"]) == (3, 56_000, 2_000_000)
    assert link["transfer_ms"] == 9.0
    assert merged({"g1": parts["g1"]})["links"][0]["bytes_per_s"] is None
    moved = merged(parts)["handovers"]
    assert [(one["id"], one["gateway"]) for one in moved] == [("a/1", "g0"), ("b/1", "g0"), ("c/1", "g1")]


def test_latencies_are_of_what_ended_within_the_minute_at_any_gateway() -> None:
    old = [line("old", received=NOW - 99, first=NOW - 98, ended=NOW - 61, tokens=5)]
    old += [line("runs", received=NOW - 2, first=NOW - 1, ended=None, tokens=3)]
    old += [line("a", received=NOW - 3.0, first=NOW - 2.9, ended=NOW - 1.9, tokens=11)]
    other = [line("b", received=NOW - 3.0, first=NOW - 2.7, ended=NOW - 2.7, tokens=1)]
    found = merged({"g0": activity(old, NOW, UNIX), "g1": activity(other, NOW, UNIX)})["latencies"]
    assert (found["ended"], found["completion_tokens"], found["errors"]) == (2, 12, 0)
    assert found["ttft_p50_ms"] == pytest.approx(100, abs=0.01)
    assert found["ttft_p95_ms"] == pytest.approx(300, abs=0.01)
    assert found["tpot_p50_ms"] == pytest.approx(100, abs=0.01)
    assert merged({"g0": activity([], NOW, UNIX)})["latencies"]["ttft_p50_ms"] is None


def test_counts_lists_and_tenants_of_all_gateways_come_together() -> None:
    def part(first: int, cost: float, used: int) -> dict[str, Any]:
        generations = ScriptedGenerations(lambda spec: [])
        for number in range(first, first + 15):
            one = line(f"r{number}-0", received=NOW + number, first=NOW + number + number / 10, ended=None)
            one.received_unix = UNIX + number
            generations.timelines.start(one)
            generations.timelines.end(one)
        budget = {"requests": {"used": used, "limit": 60}}
        tenants = [
            {"tenant": "acme", "requests": 2, "prefill_s": cost, "decode_s": 0.5, "budgets": budget},
            {"tenant": f"only-{first}", "requests": 1, "prefill_s": 9.0, "decode_s": 0.0, "budgets": {}},
        ]
        return own_part(generations, tenants, now=NOW, unix=UNIX)

    found = merged({"g0": part(0, 1.0, 3), "g1": part(15, 2.0, 4), "older": {"in_flight": 1}})
    assert found["placed"] == {"load": 6}
    assert found["events"] == {"retries": 4}
    assert found["waiting"]["normal"] == {"requests": 4, "tokens": 600}
    assert found["in_flight"] == 1
    assert [one["request_id"] for one in found["requests"]["latest"]] == [f"r{number}-0" for number in range(29, 9, -1)]
    slowest = found["requests"]["slowest"]
    assert [one["request_id"] for one in slowest[:2]] == ["r29-0", "r28-0"]
    assert {one["gateway"] for one in slowest} == {"g0", "g1"}
    assert found["tenants"][-1] == {
        "tenant": "acme", "requests": 4, "prefill_s": 3.0, "decode_s": 1.0, "budgets": {"requests": {"used": 4, "limit": 60}},
    }  # fmt: skip
    assert len(found["tenants"]) == 3
    assert len(merged({})) == len(found)  # nobody: the same fields


class Pictures:
    """What a feed shows, and how often it was built."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {"fleet": 1, "figures": 1}
        self.built = 0
        self.leaving = asyncio.Event()
        self.feed = Feed(self.build, leaving=self.leaving)

    async def build(self) -> dict[str, Any]:
        self.built += 1
        if self.sections.get("breaks"):
            raise ValueError("broken")
        return dict(self.sections)


async def news(stream: AsyncGenerator[bytes, None]) -> dict[str, int]:
    """The next events of a stream, by their names."""
    async with asyncio.timeout(60):
        async for block in stream:
            if found := re.findall(rb"event: (\w+)\nid: [\d.]+\ndata: (\d+)\n\n", block):
                return {name.decode(): int(value) for name, value in found}
    return {}


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Pictures:
    monkeypatch.setattr("gateway.console.feed.TICK_S", 0.01)
    return Pictures()


async def test_a_watcher_gets_everything_and_then_what_changes(pictures: Pictures) -> None:
    stream = await pictures.feed.watch()
    assert await news(stream) == {"fleet": 1, "figures": 1}
    pictures.sections["fleet"] = 2
    assert await news(stream) == {"fleet": 2}
    other = await pictures.feed.watch()
    assert await news(other) == {"fleet": 2, "figures": 1}
    pictures.sections["breaks"] = 1  # a picture that can't be made is left out
    built = pictures.built
    while pictures.built < built + 2:
        await asyncio.sleep(0.01)
    pictures.sections = {"fleet": 3, "figures": 1}
    assert (await news(stream), await news(other)) == ({"fleet": 3}, {"fleet": 3})
    await stream.aclose()
    await other.aclose()


async def test_a_slow_reader_gets_the_newest_picture_and_holds_up_nobody(pictures: Pictures) -> None:
    slow, quick = await pictures.feed.watch(), await pictures.feed.watch()
    assert await news(slow) == await news(quick) == {"fleet": 1, "figures": 1}
    for number in range(2, 6):
        pictures.sections["fleet"] = number
        assert await news(quick) == {"fleet": number}
    assert await news(slow) == {"fleet": 5}
    await slow.aclose()
    await quick.aclose()


async def test_nothing_is_built_while_nobody_watches(pictures: Pictures) -> None:
    stream = await pictures.feed.watch()
    await news(stream)
    await stream.aclose()
    assert pictures.feed.watchers == 0
    assert pictures.feed._building is not None
    await asyncio.wait_for(pictures.feed._building, 60)
    built = pictures.built
    pictures.sections["fleet"] = 7
    again = await pictures.feed.watch()
    assert await news(again) == {"fleet": 7, "figures": 1}  # not the picture of then
    assert pictures.built > built
    await again.aclose()


async def test_streams_end_when_the_gateway_leaves_and_are_bounded_in_number(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [await pictures.feed.watch() for _ in range(MAX_WATCHERS)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(UnavailableError, match="64 pages"):
        await pictures.feed.watch()
    await news(streams[0])
    pictures.leaving.set()
    assert await news(streams[0]) == {}  # the end
    await streams[1].aclose()
    monkeypatch.setattr("gateway.console.feed.MAX_WATCH_S", 0.0)
    pictures.leaving.clear()
    assert await news(await pictures.feed.watch()) == {}
    for stream in streams:
        await stream.aclose()


class SlowControl(FleetControl):
    """The other gateways answer when they are let."""

    def __init__(self) -> None:
        super().__init__(None, Peers())  # type: ignore[arg-type] - it is not started
        self.asked, self.answers = 0, asyncio.Event()

    async def ask(self, message: ConsoleAsk) -> dict[str, Any]:
        self.asked += 1
        await self.answers.wait()
        return {}


async def test_a_crowd_that_asks_for_the_state_costs_as_much_as_one(tokenizer: ChatTokenizer) -> None:
    control, script = SlowControl(), ScriptedGenerations(lambda _: [])
    app = create_app(
        generations=script, catalogue=script.catalogue(tokenizer, name="m"), settings=HttpSettings(), control=control
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        crowd = [asyncio.create_task(http.get("/console/state")) for _ in range(20)]
        while not control.asked:
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)  # all of them get as far as they can
        control.answers.set()
        assert {answer.status_code for answer in await asyncio.gather(*crowd)} == {200}
        assert control.asked == 1


async def test_a_crowd_of_watchers_that_comes_at_once_is_bounded_too(pictures: Pictures) -> None:
    streams = [await pictures.feed.watch() for _ in range(MAX_WATCHERS + 3)]
    assert [await anext(stream, b"") for stream in streams] == [b"retry: 1000\n\n"] * MAX_WATCHERS + [b""] * 3
    assert pictures.feed.watchers == MAX_WATCHERS
    for stream in streams:
        await stream.aclose()
    assert pictures.feed.watchers == 0


def test_percentile_is_a_value_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.01, 0.2, 0.21, 0.5, 0.95, 1.0)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]


def test_an_incarnation_says_when_its_process_began() -> None:
    assert abs((started_unix(new_incarnation()) or 0) - time.time()) < 60
    assert started_unix(7) is None  # made otherwise


def test_counters_by_kind() -> None:
    assert counted({"placed:load": 2, "placed:local: earlier": 1, "retries": 3}, "placed") == {
        "load": 2,
        "local: earlier": 1,
    }


def test_timelines_since_are_the_running_and_the_newly_ended() -> None:
    timelines = Timelines()
    old, new, runs = (line(name, received=NOW, first=None, ended=None) for name in ("old", "new", "runs"))
    for one in (old, new, runs):
        timelines.start(one)
    for one in (old, new):
        timelines.end(one)
    assert old.ended_at is not None
    assert new.ended_at is not None
    old.ended_at = new.ended_at - 10
    assert timelines.since(new.ended_at - 5) == [runs, new]


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio of two colours, 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_computed_as_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart(theme: int) -> None:
    ratios = {f"{a} on {b}": contrast(COLOURS[a][theme], COLOURS[b][theme]) for a, b in PAIRS}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    marks = {name: contrast(COLOURS[name][theme], COLOURS["panel"][theme]) for name in MARKS}
    assert {name: ratio for name, ratio in marks.items() if ratio < 3} == {}


def test_every_colour_is_a_named_pair() -> None:
    rules = CSS.replace(CSS[CSS.index(":root {") : CSS.index("}")], "")
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;,) ])", rules) == []
    assert set(re.findall(r"var\(--([\w-]+)\)", CSS)) - {"radius", "under"} == set(COLOURS)


def test_kv_is_named_as_its_option_names_it() -> None:
    worker = a_worker("d", "decode")
    layout = msgspec.structs.replace(worker.region.layout, dtype="uint8")
    region = msgspec.structs.replace(worker.region, layout=layout)
    assert worker_json(msgspec.structs.replace(worker, region=region))["kv_dtype"] == "int8"


def test_a_worker_of_several_ranks_is_shown_with_the_blocks_of_all() -> None:
    worker = a_worker("d", "decode")
    wide = msgspec.structs.replace(worker, region=Region.joined([worker.region] * 4).public)
    one, four = worker_json(worker), worker_json(wide)
    assert (one["ranks"], four["ranks"], four["block_bytes"]) == (1, 4, 4 * one["block_bytes"])
