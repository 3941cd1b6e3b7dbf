"""`baton top`: what follows from the feed, what keys do, and the picture."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from cli.top.feed import events
from cli.top.keys import HELP, Chosen, keys_of
from cli.top.state import Rate, State
from cli.top.tables import TABS, request_rows, sparks, tenant_rows, worker_rows
from cli.top.view import fit, frame, painted, picture, selected
from common.messages import HostTierTotals, WorkerTotals
from gateway.console.state import tiers_json, worker_json
from tests.fakes.workers import a_worker

KV = {"kv_blocks": 16, "kv_used": 10, "kv_held": 1, "kv_free": 5}
REQUEST = {"request_id": "cmpl-1-0", "status": "stop", "prompt_tokens": 7, "completion_tokens": 3, "ttft_ms": 12.5}
REQUEST |= {"total_ms": 40.0, "received_unix": 1e9, "prefill_worker": "p0", "decode_worker": "d0", "tenant": "anna"}
REQUEST |= {"phases_ms": {"queue": 2.0, "prefill": 9.0, "transfer": None}}


def a_state(*names: str, **more: Any) -> State:
    state = State()
    workers: list[dict[str, Any]] = [
        worker_json(a_worker(name, "prefill")) | KV | {"running": at, "generated_tokens": 100} | more
        for at, name in enumerate(names)
    ]
    state.take("fleet", {"workers": workers, "gateways": [{"id": "g"}], "models": [{"name": "m"}]})
    latencies = {"ended": 4, "errors": 1, "ttft_p50_ms": 12.0, "prompt_tokens": 10, "cached_tokens": 5}
    state.take(
        "figures", {"in_flight": 2, "waiting": {"normal": {"requests": 3}}, "latencies": latencies, "tenants": []}
    )
    state.take("requests", {"waiting": [], "running": [], "latest": [REQUEST], "slowest": [REQUEST]})
    return state


def texts(state: State, chosen: Chosen, columns: int = 200, rows: int = 30) -> list[str]:
    return [text for text, _ in frame(state, chosen, columns, rows)]


def press(chosen: Chosen, typed: str) -> Chosen:
    for key in keys_of(typed):
        chosen.key(key)
    return chosen


# -- the feed ------------------------------------------------------------------------------------------------------


async def test_events_are_read_and_comments_are_not() -> None:
    async def lines() -> AsyncIterator[str]:
        for line in ("retry: 1000", "", ": still here", "", "event: fleet", "id: 1", 'data: {"a":', "data: 1}", "", ""):
            yield line

    assert [found async for found in events(lines())] == [("fleet", {"a": 1})]


def test_rates_are_growth_by_time_also_after_a_worker_began_again() -> None:
    rate = Rate()
    for at, total in ((0.0, 100.0), (1.0, 140.0), (3.0, 160.0), (4.0, 6.0)):
        rate.count(total, at)
    assert list(rate.samples) == [40.0, 10.0, 6.0]
    assert rate.now == 8.0
    assert Rate().now is None


def test_a_state_samples_each_worker_and_forgets_those_that_left() -> None:
    state = a_state("a", "b")
    state.sample(1.0)
    state.take("fleet", a_state("a", "b", generated_tokens=150, pass_s=0.25).section("fleet"))
    state.sample(2.0)
    assert {name: rate.now for name, rate in state.rates.items()} == {"a": 50.0, "b": 50.0}
    assert [row["busy"] for row in worker_rows(state)] == [0.25, 0.25]
    assert state.fleet_rate.now == 100.0
    held = state.copy()
    state.take("fleet", a_state("b").section("fleet"))
    state.sample(3.0)
    assert state.rates.keys() == {"b"}
    assert [row["worker"] for row in worker_rows(held)] == ["a", "b"]


def test_a_pool_workers_tokens_are_its_own_and_not_the_fleets_output() -> None:
    state, pools = State(), a_worker("p", "pool")
    for at, tokens in ((1.0, 10), (2.0, 40)):
        totals = msgspec.structs.replace(pools.totals, prompt_tokens=tokens)
        state.take("fleet", {"workers": [worker_json(msgspec.structs.replace(pools, totals=totals))]})
        state.sample(at)
    [row] = worker_rows(state)
    assert (row["roles"], row["tokens_per_s"], row["kv_share"]) == ("pool", 30.0, None)
    assert state.fleet_rate.now is None


# -- rows ----------------------------------------------------------------------------------------------------------


def test_workers_that_were_lost_stay_for_a_while_and_two_of_a_name_are_shown() -> None:
    state = a_state("a", is_contested=True)
    gone = a_state("a", "b").section("fleet")["workers"]
    state.take("log", {"lost": [one | {"lost_unix": 1e9} for one in gone], "log": []})
    rows = worker_rows(state)
    assert [row["worker"] for row in rows] == ["a", "b"]
    assert rows[0]["status"] == "2 have it"
    assert rows[1]["status"].startswith("lost ")
    assert rows[0]["kv_share"] == 11 / 16


def test_tiers_are_shown_where_a_worker_has_them() -> None:
    host = HostTierTotals(capacity_bytes=100, used_bytes=25, hit_tokens=96)
    disk = HostTierTotals(capacity_bytes=1000, used_bytes=10, hit_tokens=32, bad_digests=1, failed_copies=1)
    tiers = tiers_json(WorkerTotals(host=host, disk=disk))
    assert tiers["disk"] == {"bytes": 1000, "used_bytes": 10, "hit_tokens": 32, "failed": 2}
    (row,) = worker_rows(a_state("a", tiers=tiers))
    assert (row["host"], row["host_hits"], row["disk"], row["disk_hits"]) == (0.25, 64, 0.01, 32)
    for tiers in (tiers_json(WorkerTotals()), None):  # a gateway of an older build tells none
        (row,) = worker_rows(a_state("a", tiers=tiers))
        assert row["host"] is row["disk_hits"] is None


def test_the_ranks_of_a_worker_also_of_a_gateway_that_does_not_tell_them() -> None:
    state = a_state("a", "b", ranks=2)
    state.section("fleet")["workers"][1].pop("ranks")
    assert [row["ranks"] for row in worker_rows(state)] == [2, 1]
    assert "RANKS" in "".join(texts(state, Chosen(), columns=300))


def test_the_drafts_of_a_worker() -> None:
    drafting = {"drafts": 10, "drafted_tokens": 40, "accepted_tokens": 25}
    rows = worker_rows(a_state("a", **drafting)) + worker_rows(a_state("a"))
    assert [(row["accepted"], row["draft_step"]) for row in rows] == [(0.625, 3.5), (None, None)]


def test_a_request_is_listed_once_with_what_took_longest() -> None:
    rows = request_rows(a_state())
    assert [(row["request_id"], row["workers"], row["longest"]) for row in rows] == [("cmpl-1-0", "p0 → d0", "prefill")]


def test_a_tenant_s_fullest_budget() -> None:
    state = State()
    budgets = {"tokens": {"used": 30, "limit": 120}, "requests": {"used": 9, "limit": 10}, "concurrent": {"used": 1}}
    state.take("figures", {"tenants": [{"tenant": "anna", "prefill_s": 1.0, "decode_s": 2.0, "budgets": budgets}]})
    row = tenant_rows(state)[0]
    assert (row["device_s"], row["fullest"], row["budgets"]) == (3.0, 0.9, "tokens 30/120  requests 9/10")


def test_rows_are_filtered_by_words_and_columns_and_sorted_with_the_unknown_last() -> None:
    chosen = Chosen()
    rows = worker_rows(a_state("anna", "bert", "carl"))
    rows[1]["tokens_per_s"], rows[2]["tokens_per_s"] = 5.0, 7.0
    chosen.now.sort = "tokens_per_s"
    assert [row["worker"] for row in selected(chosen, rows)] == ["bert", "carl", "anna"]
    chosen.now.descends = True
    assert [row["worker"] for row in selected(chosen, rows)] == ["carl", "bert", "anna"]
    for words, found in (("AR", ["carl"]), ("status:ready worker:ann", ["anna"]), ("run:anna", [])):
        chosen.now.words = words
        assert [row["worker"] for row in selected(chosen, rows)] == found


def test_sparks() -> None:
    assert sparks([0, 4, 8, 1], 6) == "   ▄█▁"
    assert sparks([], 3) == "   "
    assert sparks([0.0] * 5, 3) == "   "


# -- keys ----------------------------------------------------------------------------------------------------------


def test_keys_come_singly_however_the_terminal_sends_them() -> None:
    assert keys_of("j\x1b[Aq\x1b") == ["j", "up", "q", "\x1b"]


def test_tabs_order_and_hold() -> None:
    chosen = press(Chosen(), "3")
    assert chosen.shown.name == "tenants"
    assert press(chosen, "\t\t").shown.name == "workers"
    assert press(chosen, "\x1b[Z").shown.name == "events"
    press(chosen, "1>r")
    assert (chosen.now.sort, chosen.now.descends) == ("roles", True)
    assert press(chosen, "<<").now.sort == "model"
    assert press(chosen, "p").paused
    assert not press(chosen, " ").paused
    assert press(chosen, "q").left
    assert press(Chosen(), "\x03").left


def test_a_filter_is_typed_until_enter_and_its_letters_are_no_commands() -> None:
    chosen = press(Chosen(), "/qx\x7f2\n")
    assert (chosen.now.words, chosen.types, chosen.left, chosen.tab) == ("q2", False, False, 0)
    assert press(chosen, "\x1b").now.words == ""
    assert press(chosen, "/abc\x1b").now.words == ""


# -- the picture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [20, 80, 132, 250])
@pytest.mark.parametrize("tab", range(len(TABS)))
def test_the_picture_fits_the_terminal_and_says_what_it_leaves_out(columns: int, tab: int) -> None:
    state = a_state(*(f"a-worker-with-a-long-name-{index}" for index in range(40)))
    lines = texts(state, Chosen(tab=tab), columns, 24)
    assert max(map(len, lines)) <= columns
    assert len(lines) == 24
    fitting = fit(TABS[tab].columns, columns, TABS[tab].rows(state))
    hidden = len(TABS[tab].columns) - len(fitting)
    if columns >= 80:
        assert (f"{hidden} columns more" in lines[-1]) == (hidden > 0)


def test_scrolling_ends_at_the_last_row() -> None:
    state, chosen = a_state(*(f"w{index:02}" for index in range(40))), Chosen()
    lines = texts(state, chosen, 200, 27)
    assert lines[6].startswith("w00")
    assert "1 to 20 of 40" in lines[-1]
    press(chosen, "\x1b[F")
    lines = texts(state, chosen, 200, 27)
    assert lines[6].startswith("w20")
    assert "21 to 40 of 40" in lines[-1]


def test_titles_stand_above_their_columns_and_the_sorted_one_is_marked() -> None:
    chosen = press(Chosen(), "2")
    lines = texts(a_state(), chosen)
    title, row = lines[5], lines[6]
    assert "AT▼" in title
    assert title.index("STATUS") == row.index("stop")
    assert title.index("TTFT ms") + len("TTFT ms") == row.index("12.5") + len("12.5")


def test_the_header_tells_figures_or_what_is_wrong() -> None:
    state = a_state("a")
    assert "in flight 2   waiting 3   last minute: 4 ended   1 failed" in texts(state, Chosen())[1]
    assert "cached 50%" in texts(state, Chosen())[1]
    state.trouble = "no answer: gone"
    assert frame(state, Chosen(), 80, 24)[1] == ("no answer: gone", "bad")


def test_help_shows_every_key() -> None:
    lines = "\n".join(texts(a_state(), press(Chosen(), "?"), 120))
    assert all(keys in lines and what[:40] in lines for keys, what in HELP)


def test_nothing_there_is_said() -> None:
    lines = picture(a_state(), 500)
    assert lines[-1] == "no worker is heard"
    assert "1 gateways: g" in lines[0]
    assert "nothing has 'zz'" in texts(a_state("a"), press(Chosen(), "/zz\n"))


def test_a_row_s_style_says_how_it_is() -> None:
    state = a_state("a", "b")
    state.section("fleet")["workers"][0]["status"] = "draining"
    found = [(text[:1], style) for text, style in frame(state, Chosen(), 100, 20)][6:8]
    assert found == [("a", "warn"), ("b", "")]
    assert painted([("x", "warn"), ("y", "")]) == ["\x1b[33mx\x1b[0m", "y"]
