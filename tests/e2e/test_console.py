"""The console over HTTP: a whole Baton with the fake device, and what its page is made of and gets to see."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import sys
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import httpx
import pytest
import pytest_asyncio

from common.servers import free_port, stop
from gateway.console.assets import FOLDER
from tests.console.browser import UNREADABLE, open_page, run_browser
from tests.e2e.cluster import ROOT, Cluster
from tests.models import build_tiny_model

ADMIN_KEY = "an-admin-key-of-a-test"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
NOBODY = {"authorization": ""}
LARGEST_PAGE = 80_000  # bytes, all files
LARGEST_ZIPPED = 26_000
STATE_FIELDS = {
    "gateway",
    "version",
    "model",
    "max_model_len",
    "has_admin",
    "not_ready",
    "time_unix",
    "levels",
}
STATE_FIELDS |= {"in_flight", "waiting", "workers", "gateways", "links", "handovers", "latencies", "placed", "refused"}
STATE_FIELDS |= {"events", "tenants"}


ROLES = {"decode-0": ["decode"], "prefill-0": ["prefill"], "worker-0": ["decode", "prefill"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("console")
    model = build_tiny_model(folder / "tiny", "llama")
    options = {"prefill": 1, "decode": 1, "both": 1, "fake": True, "kv_memory_mb": 8, "fake_step_ms": 2}
    keys = ("--admin-key", ADMIN_KEY)
    async with Cluster(folder / "run", model=model, gateway_options=keys, **options) as running:  # type: ignore[arg-type]
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """With the admin key. No API key is asked for."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=20, headers=ADMIN) as client:
        yield client


async def until_state(http: httpx.AsyncClient, holds: Any) -> dict[str, Any]:
    """The first state for which `holds(state)`; what it waits for is told by heartbeats."""
    async with asyncio.timeout(20):
        while True:
            state: dict[str, Any] = (await http.get("/console/state")).json()
            if holds(state):
                return state
            await asyncio.sleep(0.1)


async def test_the_page_may_load_and_run_its_own_files_only(http: httpx.AsyncClient) -> None:
    names = ["/", *(f"/console/static/{path.name}" for path in sorted(FOLDER.iterdir()))]
    assert len(names) > 6
    for name in names:
        answer = await http.get(name)
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "set-cookie" not in answer.headers


async def test_files_come_zipped_and_once(http: httpx.AsyncClient) -> None:
    first = await http.get("/", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in first.headers
    assert first.text == (FOLDER / "index.html").read_text()
    assert (await http.get("/")).headers["content-encoding"] == "gzip"
    again = await http.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await http.head("/")).status_code == 200


async def test_types_and_unknown_files(http: httpx.AsyncClient) -> None:
    types = {"main.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
    for name, kind in types.items():
        assert (await http.get(f"/console/static/{name}")).headers["content-type"].startswith(kind)
    for name in ("nothing.js", "..%2froutes.py", "%2e%2e/routes.py", "__init__.py"):
        assert (await http.get(f"/console/static/{name}")).status_code == 404, name


def test_the_page_is_small_and_takes_nothing_from_elsewhere() -> None:
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert sum(map(len, files.values())) <= LARGEST_PAGE
    assert sum(len(gzip.compress(content)) for content in files.values()) <= LARGEST_ZIPPED
    for name, content in files.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
        assert "document.cookie" not in text, name
    page = files["index.html"].decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", page)


async def test_the_state_of_a_fleet_that_served(http: httpx.AsyncClient) -> None:
    async with one_pair(http):
        answer = await complete(http, first=3, tokens=6)
    # The first prompt's tokens are generated beside the hand-over, the totals follow with the heartbeats.
    state = await until_state(
        http,
        lambda state: (
            state["links"]
            and state["links"][0]["bytes_per_s"]
            and state["gateways"]
            and state["gateways"][0]["ttft_count"]
            and sum(worker["generated_tokens"] for worker in state["workers"]) >= 5
        ),
    )
    assert set(state) == STATE_FIELDS
    assert (state["gateway"], state["model"], state["not_ready"]) == ("gateway", "tiny", "")
    workers = {worker["id"]: worker for worker in state["workers"]}
    assert roles(state) == ROLES
    for worker in workers.values():
        assert worker["kv_used"] + worker["kv_held"] + worker["kv_free"] == worker["kv_blocks"]
        assert json.loads(json.dumps(worker["incarnation"])) == worker["incarnation"] != ""
    (link,) = state["links"]
    (move,) = state["handovers"]
    assert (link["from"], link["to"], link["handovers"]) == ("prefill-0", "decode-0", 1)
    assert link["bytes"] == move["bytes"] == move["blocks"] * workers["decode-0"]["block_bytes"] > 0
    assert move["request_id"].startswith(answer["id"])
    assert state["gateways"][0]["id"] == "gateway"
    assert state["latencies"]["ended"] == 1
    assert state["latencies"]["completion_tokens"] == 6
    assert sum(state["placed"].values()) == 1
    (tenant,) = state["tenants"]
    assert (tenant["tenant"], tenant["requests"], tenant["completion_tokens"]) == ("default", 1, 6)


@contextlib.asynccontextmanager
async def one_pair(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """So that it is known who hands over to whom."""
    assert (await http.post("/admin/workers/worker-0/drain")).status_code == 200
    yield
    assert (await http.post("/admin/workers/worker-0/drain", json={"draining": False})).status_code == 200


async def test_what_tells_of_everybody_needs_the_key(http: httpx.AsyncClient) -> None:
    for path in ("/console/state", "/console/events", "/debug/requests"):
        answer = await http.get(path, headers=NOBODY)
        assert answer.status_code == 401
        assert "admin key" in answer.json()["error"]["message"]
    for order in ("roles", "drain"):
        assert (await http.post(f"/admin/workers/decode-0/{order}", headers=NOBODY)).status_code == 401
    for path in ("/", "/console/static/main.js", "/v1/models"):
        assert (await http.get(path, headers=NOBODY)).status_code == 200
    state = await http.get("/console/state")
    assert state.json()["has_admin"] is True
    assert ADMIN_KEY not in state.text


async def test_roles_switch(http: httpx.AsyncClient) -> None:
    answer = await http.post("/admin/workers/worker-0/roles", json={"roles": ["prefill"]})
    assert (answer.status_code, answer.json()) == (200, {"worker": "worker-0", "roles": ["prefill"]})
    await until_state(http, lambda state: roles(state)["worker-0"] == ["prefill"])
    answer = await http.post("/admin/workers/worker-0/roles", json={"roles": ["prefill", "decode"]})
    assert answer.status_code == 200
    await until_state(http, lambda state: roles(state) == ROLES)


async def test_a_drained_worker_gets_nothing_until_it_is_resumed(http: httpx.AsyncClient) -> None:
    assert (await http.post("/admin/workers/worker-0/drain")).status_code == 200
    state = await until_state(http, lambda state: status(state)["worker-0"] == "draining")
    before = generated(state)
    refused = await http.post("/admin/workers/worker-0/roles", json={"roles": ["decode"]})
    assert refused.status_code == 409
    assert "draining" in refused.json()["error"]["message"]
    for first in range(3, 7):
        await complete(http, first=first, tokens=8)
    state = await until_state(http, lambda state: sum(generated(state).values()) >= sum(before.values()) + 4 * 8)
    assert generated(state)["worker-0"] == before["worker-0"]
    assert (await http.post("/admin/workers/worker-0/drain", json={"draining": False})).status_code == 200
    for other in ("prefill-0", "decode-0"):  # now it alone can serve
        assert (await http.post(f"/admin/workers/{other}/drain", json={"draining": True})).status_code == 200
    await complete(http, first=9, tokens=8)
    await until_state(http, lambda state: generated(state)["worker-0"] > before["worker-0"])
    for other in ("prefill-0", "decode-0"):
        assert (await http.post(f"/admin/workers/{other}/drain", json={"draining": False})).status_code == 200
    await until_state(http, lambda state: set(status(state).values()) == {"ready"})


@pytest.mark.parametrize(
    ("path", "body", "code", "told"),
    [
        ("worker-9/drain", None, 404, "no worker 'worker-9' is heard"),
        ("worker-0/roles", {"roles": []}, 400, "roles"),
        ("worker-0/roles", {}, 400, "roles: this field is required"),
        ("worker-0/roles", {"roles": ["cook"]}, 409, "there is no role 'cook' here"),
        ("worker-0/roles", {"roles": ["decode"], "why": "x"}, 400, "unknown field 'why'"),
        ("worker-0/drain", {"draining": "yes"}, 400, "draining"),
        ("worker-0/drain", {"x": "x" * 5000}, 413, "larger than 4096 bytes"),
    ],
)
async def test_wrong_orders_are_told(http: httpx.AsyncClient, path: str, body: Any, code: int, told: str) -> None:
    answer = await http.post(f"/admin/workers/{path}", json=body)
    assert answer.status_code == code
    assert told in answer.json()["error"]["message"]


def roles(state: dict[str, Any]) -> dict[str, list[str]]:
    return {worker["id"]: worker["roles"] for worker in state["workers"]}


def status(state: dict[str, Any]) -> dict[str, str]:
    return {worker["id"]: worker["status"] for worker in state["workers"]}


def generated(state: dict[str, Any]) -> dict[str, int]:
    return {worker["id"]: worker["generated_tokens"] for worker in state["workers"]}


async def complete(http: httpx.AsyncClient, *, first: int, tokens: int) -> dict[str, Any]:
    """A prompt of 40 tokens that begins with `first`, answered with so many."""
    body = {"model": "tiny", "prompt": list(range(first, first + 40)), "max_tokens": tokens, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def until_event(lines: AsyncIterator[str], name: str, holds: Any) -> dict[str, Any]:
    """The first `name` of a stream for which `holds(value)`."""
    said = ""
    async with asyncio.timeout(20):
        async for line in lines:
            kind, _, rest = line.partition(": ")
            if kind == "event":
                said = rest
            if kind == "data" and said == name and holds(value := json.loads(rest)):
                return value  # type: ignore[no-any-return]
    raise AssertionError(f"the stream ended without such {name}")


async def test_the_stream_tells_of_requests_of_all_gateways_and_ends_with_its_own(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    async with second_gateway(cluster) as (process, url), httpx.AsyncClient(base_url=url, headers=ADMIN) as other:
        await until_state(http, lambda state: len(state["gateways"]) == 2)
        async with http.stream("GET", "/console/events") as here, other.stream("GET", "/console/events") as there:
            assert here.headers["content-type"].startswith("text/event-stream")
            events, elsewhere = here.aiter_lines(), there.aiter_lines()
            async with one_pair(http):
                theirs = (await complete(other, first=21, tokens=5))["id"]  # each one's request is told by both
            ours = (await complete(http, first=22, tokens=5))["id"]
            for stream in (events, elsewhere):
                lists = await until_event(
                    stream, "requests", lambda lists: {f"{theirs}-0", f"{ours}-0"} <= {e["request_id"] for e in lists["latest"]}
                )  # fmt: skip
                owners = {entry["request_id"]: entry["gateway"] for entry in lists["latest"]}
                assert (owners[f"{theirs}-0"], owners[f"{ours}-0"]) == ("second", "gateway")
            fleet = await until_event(
                events, "fleet", lambda fleet: any(move["request_id"].startswith(theirs) for move in fleet["handovers"])
            )
            assert {move["gateway"] for move in fleet["handovers"]} >= {"second"}
            assert {gateway["id"] for gateway in fleet["gateways"]} == {"gateway", "second"}
            detail = (await http.get(f"/debug/requests/{theirs}")).json()["requests"]
            assert [(one["request_id"], one["completion_tokens"]) for one in detail] == [(f"{theirs}-0", 5)]
            assert (await http.get("/debug/requests/cmpl-nobody")).status_code == 404
            process.terminate()
            async with asyncio.timeout(20):  # it does not wait for those who watch
                async for _ in elsewhere:
                    pass
                assert await process.wait() == 0


@contextlib.asynccontextmanager
async def second_gateway(cluster: Cluster) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Beside the cluster's own, with the admin's user of NATS and Redis."""
    port = free_port()
    options = [
        "--nats-url",
        cluster.nats.url,
        "--redis-url",
        cluster.redis.url,
        "--port",
        str(port),
        "--gateway-id",
        "second",
    ]
    options += ["--model", str(cluster.folder.parent / "tiny"), "--served-model-name", "tiny", "--admin-key", ADMIN_KEY]
    command = [sys.executable, "-m", "services.gateway", *options, "--local-prefill-tokens", "0"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
        yield process, url
    finally:
        await stop(process, timeout_s=10)


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    async with run_browser() as running:
        yield running


async def ask(page: Any, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


async def test_an_answer_shows_where_its_time_went(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await ask(page, "the sea and the mountains are far from here")
        await page.get_by_text("measured by the gateway").wait_for()
        answer = page.locator(".turn.model")
        rows = await answer.locator(".waterfall li .what").all_inner_texts()
        assert rows[0] == "read, tokenise"
        assert {"queue", "prefill", "first frame", "decode"} <= set(rows)
        ticks = await answer.locator(".ticks path").get_attribute("d")
        assert ticks is not None
        assert ticks.count("M") > 1
        assert "prompt cached" in await answer.locator(".figures").inner_text()
        assert await answer.locator(".text").inner_text() != ""
        await answer.get_by_role("button", name="Zoom to first token").click()
        assert "decode" not in (await answer.locator(".waterfall li .what").all_inner_texts())[:3]
        await page.locator("#lists").get_by_text("Latest").click()
        await page.locator("#request-list button").first.click()
        await page.locator("#detail .waterfall").first.wait_for()
        assert "placement" in await page.locator("#detail .facts").inner_text()


async def test_the_page_is_live_by_one_stream(cluster: Cluster, http: httpx.AsyncClient, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await page.locator("[data-node='worker-0']").wait_for()
        await page.locator("#lists").get_by_text("Latest").click()
        async with one_pair(http):
            answer = await complete(http, first=33, tokens=4)
        await page.locator(f"#handovers [data-request='{answer['id']}-0']").wait_for()
        await page.locator(f"#request-list [data-request='{answer['id']}-0']").wait_for()
        await page.locator("#tenant-list").get_by_text("default").wait_for()
        asked = [url.removeprefix(cluster.url) for url in watched.urls if "static" not in url]
        assert asked == ["/", "/console/events"]


async def test_words_of_the_model_are_never_markup(cluster: Cluster, browser: Any) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> & <b>bold</b>"
    chunk = {"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {"content": evil}, "finish_reason": None}]}
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        stream = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        await page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream")
        )
        await ask(page, "<i>what</i>")
        await page.locator(".turn.model .times").wait_for()
        assert await page.locator(".turn.model .text").inner_text() == evil
        assert await page.locator(".turn.user .text").inner_text() == "<i>what</i>"
        assert await page.locator("#chat :is(img, script, b, i)").count() == 0
        refused = "() => { try { document.body.innerHTML = '<p>'; return 'set' } catch (error) { return error.name } }"
        assert await page.evaluate(refused) == "TypeError"
        assert any("TrustedHTML" in text for text in watched.wrong)
        watched.wrong.clear()
        assert "owned" not in await page.title()


async def test_everything_by_keyboard_and_only_with_the_key(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url) as watched:
        page = watched.page
        await page.get_by_text("admin key is needed").wait_for()
        assert await page.locator("#columns .card").count() == 0
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to content"
        await page.get_by_role("button", name="Enter a key").focus()
        await page.keyboard.press("Enter")
        await page.get_by_label("Admin key").focus()
        await page.keyboard.type(ADMIN_KEY)
        await page.keyboard.press("Enter")
        card = page.locator("[data-node='worker-0']")
        await card.wait_for()
        assert await page.evaluate("[localStorage.length, Object.keys(sessionStorage)]") == [0, ["baton.admin-key"]]
        # Roles: one key on the focused button; the column that it moves to is the answer.
        await card.get_by_role("button", name="Decode").focus()
        await page.keyboard.press("Space")
        await page.locator(".column[data-key='Decode'] [data-node='worker-0']").wait_for()
        await card.get_by_role("button", name="Both").press("Enter")
        await page.locator(".column[data-key='Prefill and decode'] [data-node='worker-0']").wait_for()
        # Draining is asked about.
        await card.get_by_role("button", name="Drain").press("Enter")
        await page.locator("#confirm").get_by_role("button", name="Cancel").press("Enter")
        assert await card.locator(".tag").inner_text() == "ready"
        await card.get_by_role("button", name="Drain").press("Enter")
        await page.locator("#confirm").get_by_role("button", name="Drain").press("Enter")
        await card.get_by_text("drained").wait_for()
        await card.get_by_role("button", name="Resume").press("Enter")
        await card.get_by_text("ready").wait_for()


async def test_what_goes_wrong_is_said_and_passes(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await page.locator("[data-node='worker-0']").wait_for()
        await page.route("**/console/events", lambda route: route.abort())
        await page.get_by_role("button", name="Keys").click()
        await page.get_by_role("button", name="Use").click()  # another key, another stream
        await page.get_by_text("The gateway does not answer. What you see is of").wait_for()
        await page.unroute("**/console/events")
        await page.locator("#banner").wait_for(state="hidden")
        await page.get_by_text("Options").click()
        await page.get_by_label("Longest answer, tokens").fill("0")
        await ask(page, "one")
        await page.locator(".toast").get_by_text("Longest answer, tokens").wait_for()
        assert await page.get_by_label("Message", exact=True).input_value() == "one"
        await page.get_by_label("Longest answer, tokens").fill("4")
        refusal = {"error": {"message": "too much waits: come back in 2 s"}}
        await page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=refusal))
        await ask(page, "two")
        await page.locator(".note.error").get_by_text("too much waits: come back in 2 s").wait_for()
        await page.unroute("**/v1/chat/completions")
        async with page.expect_request("**/v1/chat/completions") as request:
            await ask(page, "three")
        told = (await request.value).post_data_json["messages"]
        assert told == [{"role": "user", "content": "three"}]  # what failed is not part of the conversation
        await page.get_by_text("measured by the gateway").wait_for()


async def test_every_stop_of_the_keyboard_is_named_and_seen(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await page.locator("[data-node='worker-0']").wait_for()
        look = """() => {
          const at = document.activeElement, shown = at.type === "radio" ? at.nextSibling : at;
          const name = at.ariaLabel || at.labels?.[0]?.textContent || at.textContent;
          return [at.tagName, name.trim(), at === document.body, getComputedStyle(shown).outlineStyle];
        }"""
        stops = []
        for _ in range(120):
            await page.keyboard.press("Tab")
            tag, name, over, outline = await page.evaluate(look)
            if over:
                break
            assert (name != "", outline) == (True, "solid"), (tag, name, outline)
            stops.append(name)
        assert {"Skip to content", "Fleet", "Keys", "Send", "Drain", "Conversation"} <= set(stops)


async def test_it_fits_and_can_be_read(cluster: Cluster, browser: Any) -> None:
    """At the width of a phone, a tablet and a screen, light and dark."""
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY, motion="reduce") as watched:
        page = watched.page
        await page.locator("[data-node='worker-0']").wait_for()
        for width, scheme in product((390, 800, 1440), ("light", "dark")):
            await page.set_viewport_size({"width": width, "height": 900})
            await page.emulate_media(color_scheme=scheme)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            assert await page.evaluate(UNREADABLE) == [], (width, scheme)
            assert (await brightness(page) < 200) == (scheme == "dark")
        await page.get_by_role("button", name="Theme: system").click()  # now light, whatever the system has
        assert await brightness(page) > 600


async def brightness(page: Any) -> int:
    """Of the page's ground, 0 to 765."""
    colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)))
