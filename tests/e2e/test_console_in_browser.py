"""The console's page in a real browser, over a whole Baton with the fake device."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.console.browser import UNREADABLE, open_page, run_browser
from tests.console.fleet import (
    ADMIN,
    ADMIN_KEY,
    complete,
    console_cluster,
    one_pair,
)
from tests.e2e.cluster import Cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    async with run_browser() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Starts only where there is a browser."""
    async with console_cluster(tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """With the admin key. No API key is asked for."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=20, headers=ADMIN) as client:
        yield client


def at(cluster: Cluster, page: str) -> str:
    return f"{cluster.url}/console/{page}"


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
        assert await answer.locator("> .text").inner_text() != ""
        await answer.get_by_role("button", name="Zoom to first token").click()
        assert "decode" not in (await answer.locator(".waterfall li .what").all_inner_texts())[:3]
        await page.get_by_role("link", name="Requests").click()
        await page.locator("#lists").get_by_text("Latest").click()
        await page.locator("#request-list button").first.click()
        await page.locator("#detail .waterfall").first.wait_for()
        assert "placement" in await page.locator("#detail .facts").inner_text()


async def test_the_pages_are_live_by_one_stream(cluster: Cluster, http: httpx.AsyncClient, browser: Any) -> None:
    async with open_page(browser, at(cluster, "fleet"), admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await page.locator("[data-node='worker-0']").wait_for()
        async with one_pair(http):
            answer = await complete(http, first=33, tokens=4)
        await page.locator(f"#handovers [data-request='{answer['id']}-0']").wait_for()
        await page.get_by_role("link", name="Requests").click()
        await page.locator("#lists").get_by_text("Latest").click()
        await page.locator(f"#request-list [data-request='{answer['id']}-0']").wait_for()
        await page.get_by_role("link", name="Tenants").click()
        await page.locator("#tenant-list").get_by_text("default").wait_for()
        asked = [url.removeprefix(cluster.url) for url in watched.urls if "static" not in url]
        assert asked == ["/console/fleet", "/console/events"]


async def test_pages_have_addresses_that_survive_back_forward_and_reload(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        current = page.locator("#pages [aria-current]")
        await page.wait_for_url("**/console/chat")
        await page.get_by_role("link", name="Fleet").click()
        await page.locator("[data-node='worker-0']").wait_for()
        assert page.url == at(cluster, "fleet")
        await page.get_by_role("link", name="Overview").click()
        await page.locator(".tile").first.wait_for()
        await page.go_back()
        await page.locator("[data-node='worker-0']").wait_for()
        assert await current.inner_text() == "Fleet"
        await page.go_forward()
        await page.locator(".tile").first.wait_for()
        await page.reload()
        await page.locator(".tile").first.wait_for()
        assert (page.url, await page.title()) == (at(cluster, "overview"), "Overview · Baton")


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
        await page.locator(".turn.model .times .waterfall").wait_for()
        assert await page.locator(".turn.model > .text").inner_text() == evil
        assert await page.locator(".turn.user .text").inner_text() == "<i>what</i>"
        assert await page.locator("#chat :is(img, script, b, i)").count() == 0
        refused = "() => { try { document.body.innerHTML = '<p>'; return 'set' } catch (error) { return error.name } }"
        assert await page.evaluate(refused) == "TypeError"
        assert any("TrustedHTML" in text for text in watched.wrong)
        watched.wrong.clear()
        assert "owned" not in await page.title()


async def test_everything_by_keyboard_and_only_with_the_key(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, at(cluster, "fleet")) as watched:
        page = watched.page
        await page.get_by_text("admin key is needed").wait_for()
        assert await page.locator("#columns .card").count() == 0
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to content"
        await page.get_by_role("button", name="Enter a key").focus()
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "admin-key"
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
        await page.get_by_text("live", exact=True).wait_for()
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


PAGES = {
    "chat": "#composer",
    "overview": ".tile",
    "requests": "#request-list",
    "fleet": "[data-node='worker-0']",
    "tenants": "#tenant-list",
}


@pytest.mark.long
async def test_every_stop_of_the_keyboard_is_named_and_seen(cluster: Cluster, browser: Any) -> None:
    look = """() => {
      const at = document.activeElement, shown = at.type === "radio" ? at.nextSibling : at;
      const name = at.ariaLabel || at.labels?.[0]?.textContent || at.textContent;
      return [at.tagName, name.trim(), at === document.body, getComputedStyle(shown).outlineStyle];
    }"""
    stops = []
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        for name, sign in PAGES.items():
            await page.goto(at(cluster, name))
            await page.locator(sign).first.wait_for()
            for _ in range(120):
                await page.keyboard.press("Tab")
                tag, text, over, outline = await page.evaluate(look)
                if over:
                    break
                assert (text != "", outline) == (True, "solid"), (name, tag, text, outline)
                stops.append(text)
    assert {"Skip to content", "Fleet", "Keys", "Send", "Drain"} <= set(stops)


@pytest.mark.long
async def test_it_fits_and_can_be_read(cluster: Cluster, browser: Any) -> None:
    """At the width of a phone, a tablet and a screen, light and dark."""
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY, motion="reduce") as watched:
        page = watched.page
        for name, sign in PAGES.items():
            await page.set_viewport_size({"width": 1440, "height": 900})
            await page.goto(at(cluster, name))
            await page.locator(sign).first.wait_for()
            for width, scheme in product((390, 800, 1440), ("light", "dark")):
                await page.set_viewport_size({"width": width, "height": 900})
                await page.emulate_media(color_scheme=scheme)
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, width)
                assert await page.evaluate(UNREADABLE) == [], (name, width, scheme)
                assert (await brightness(page) < 200) == (scheme == "dark")
        await page.locator("#theme").get_by_text("Light").click()  # whatever the system has
        assert await brightness(page) > 600


async def brightness(page: Any) -> int:
    """Of the page's ground, 0 to 765."""
    colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)))
