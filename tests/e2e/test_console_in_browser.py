"""The console's page in a real browser, over a whole Baton with the fake device."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.console.asking import answered, ask, asked, at
from tests.console.browser import UNREADABLE, open_page
from tests.console.fleet import (
    ADMIN,
    ADMIN_KEY,
    complete,
    console_cluster,
    one_pair,
)
from tests.e2e.cluster import Cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Starts only where there is a browser."""
    async with console_cluster(tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """With the admin key. No API key is asked for."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, headers=ADMIN) as client:
        yield client


async def test_a_line_under_an_answer_opens_into_where_its_time_went(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        answer = await asked(page, "the sea and the mountains are far from here")
        line = answer.locator(".timing summary")
        while "1 tok ·" in (await line.inner_text()).split("tok/s")[-1][:8]:  # a random model's answer may end at once
            answer = await asked(page, "the sea and the mountains are far from here")
            line = answer.locator(".timing summary")
        assert re.match(r"TTFT [\d.]+ m?s · [\d.]+ tok/s · \d+ tok · \d+ % of \d+ cached", await line.inner_text())
        assert await answer.locator(".waterfall").count() == 0
        await line.click()
        await answer.get_by_text("Measured by the gateway").wait_for()
        rows = await answer.locator(".waterfall li .what").all_inner_texts()
        assert {"queue", "prefill", "decode"} <= set(rows)
        ticks = await answer.locator(".ticks path").get_attribute("d")
        assert ticks is not None
        assert ticks.count("M") > 1
        assert await answer.locator(".md").inner_text() != ""
        await answer.get_by_role("link", name="All of this request").click()
        await page.wait_for_url("**/console/requests/chatcmpl-*")


@pytest.mark.long
async def test_a_request_is_found_followed_and_opened(cluster: Cluster, http: httpx.AsyncClient, browser: Any) -> None:
    async with open_page(browser, at(cluster, "fleet"), admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await page.locator("[data-node='worker-0']").wait_for()
        async with one_pair(http):
            ids = [(await complete(http, first=first, tokens=4))["id"] + "-0" for first in (33, 34)]
        await page.locator(".links").get_by_text("prefill-0 → decode-0").wait_for()
        refused = await http.post("/v1/completions", json={"model": "nobody", "prompt": "x"})
        await page.get_by_role("link", name="Requests").click()
        await page.locator(f"[data-key='{refused.headers['x-request-id']}']").get_by_text("model_not_found").wait_for()
        await page.get_by_role("searchbox").fill(ids[0])
        await page.wait_for_url(f"**/console/requests?q={ids[0]}")
        await page.locator(f"[data-key='{ids[1]}']").wait_for(state="detached")
        await page.get_by_role("button", name="Pause").click()
        await page.locator(f"[data-key='{ids[0]}'] a").click()
        await page.locator(".detail .waterfall").wait_for()
        assert page.url == at(cluster, f"requests/{ids[0]}")
        assert "decode-0" in await page.locator(".attempt").inner_text()
        await page.reload()
        await page.locator(".detail .waterfall").wait_for()
        await page.get_by_role("link", name="Previous").wait_for()  # from the newest on, as it came by its address
        await page.keyboard.press("k")
        await page.get_by_role("heading", name=ids[1]).wait_for()
        await page.go_back()
        await page.get_by_role("heading", name=ids[0]).wait_for()


async def test_history_is_charted_and_what_happens_is_listed(
    cluster: Cluster, http: httpx.AsyncClient, browser: Any
) -> None:
    async with open_page(browser, at(cluster, "overview"), admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await complete(http, first=41, tokens=6)
        ttft = page.get_by_role("group", name="TTFT")
        await ttft.locator("path.line[d*='M']").first.wait_for(state="attached")  # one reading is a dot without height
        await ttft.get_by_text("SLO 1.00 s").wait_for()
        await ttft.focus()
        await page.keyboard.press("ArrowLeft")
        await page.get_by_role("group", name="TPOT").locator(".when").get_by_text(":").wait_for()  # one cursor for all
        async with one_pair(http):
            await page.locator(".log").get_by_text("drains: no new work").first.wait_for()
            assert (await http.post("/admin/workers/decode-0/drain")).status_code == 200  # nobody decodes now
            await page.locator(".banner.bad").get_by_text("No request is served since").wait_for()
            await page.locator(".now.bad").get_by_text("Outage for").wait_for()
            resumed = await http.post("/admin/workers/decode-0/drain", json={"draining": False})
            assert resumed.status_code == 200
            await page.locator("#banner").wait_for(state="hidden")
        await page.locator(".log").get_by_text("requests are served again").first.wait_for()
        await page.locator("fieldset").get_by_text("6 hours").click()
        await page.wait_for_url("**/console/overview?span=6h")
        await page.get_by_role("link", name="Planner").click()
        await page.get_by_text("No planner is heard").wait_for()


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


async def test_a_wrong_address_says_so_and_the_icon_is_found_from_any(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, at(cluster, "nothing/here"), admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await page.get_by_role("heading", name="No such page").last.wait_for()
        await page.get_by_role("link", name="Go to the chat").click()
        await page.wait_for_url("**/console/chat")
        for address in (cluster.url, at(cluster, "fleet/worker-0")):
            await page.goto(address)
            await page.wait_for_selector("body.loaded")
            assert (
                await page.evaluate("document.getElementById('icon').href") == f"{cluster.url}/console/static/icon.svg"
            )


async def test_words_of_the_model_are_never_markup(cluster: Cluster, browser: Any) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> & <b>bold</b>"
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await page.route("**/v1/chat/completions", answered({"content": evil, "reasoning_content": evil}))
        answer = await asked(page, "<i>what</i>")
        assert await answer.locator(".md").inner_text() == evil
        assert await answer.locator(".thoughts").text_content() == evil
        assert await page.locator(".turn.user .text").inner_text() == "<i>what</i>"
        assert await page.locator("#main :is(img, script, b, i)").count() == 0
        refused = "() => { try { document.body.innerHTML = '<p>'; return 'set' } catch (error) { return error.name } }"
        watched.meant = "TrustedHTML"
        async with page.expect_console_message(lambda message: watched.meant in message.text):
            assert await page.evaluate(refused) == "TypeError"
        assert "owned" not in await page.title()


async def test_an_empty_chat_has_questions_and_what_was_asked_is_drawn_as_markdown(
    cluster: Cluster, browser: Any
) -> None:
    async with open_page(browser, cluster.url) as watched:
        page = watched.page
        await page.route("**/v1/chat/completions", answered({"content": "It rains."}))
        async with page.expect_request("**/v1/chat/completions") as request:
            await page.get_by_role("button", name="What is the weather in Paris?").click()
        told = (await request.value).post_data_json
        assert (told["messages"][0]["content"], told["tools"][0]["function"]["name"]) == (
            "What is the weather in Paris?",
            "get_weather",
        )
        await page.locator(".turn.model").get_by_role("button", name="Regenerate").wait_for()
        await page.get_by_role("button", name="New chat").click()
        await page.locator(".welcome").wait_for()
        assert "tools" not in await page.evaluate("Object.keys(JSON.parse(localStorage['baton.chat-options'] ?? '{}'))")
        await ask(page, "**all** of\n- it")
        await page.locator(".turn.user strong").get_by_text("all").wait_for()
        assert await page.locator(".turn.user li").inner_text() == "it"
        await page.get_by_role("button", name="Settings").click()
        await (
            page.get_by_role("group", name="Reasoning and tools")
            .get_by_role("button", name="Insert an example")
            .click()
        )
        await page.get_by_role("button", name="Apply").click()
        await page.get_by_role("button", name="Settings (1)").wait_for()


async def test_everything_by_keyboard_and_only_with_the_key(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, at(cluster, "fleet")) as watched:
        page = watched.page
        await page.locator("#locked").get_by_text("admin key is needed").wait_for()
        assert await page.locator("#view").is_hidden()
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
        # Orders are on the worker's own page, and asked about.
        await card.get_by_role("link", name="worker-0").press("Enter")
        worker, confirm = page.locator(".worker"), page.locator("#confirm")
        await worker.get_by_role("button", name="Decode").press("Space")
        await confirm.get_by_role("button", name="Switch").press("Enter")
        await worker.get_by_role("button", name="Decode", pressed=True).wait_for()
        await worker.get_by_role("button", name="Both").press("Enter")
        await confirm.get_by_role("button", name="Switch").press("Enter")
        await worker.get_by_role("button", name="Both", pressed=True).wait_for()
        await worker.get_by_role("button", name="Drain").press("Enter")
        await confirm.get_by_role("button", name="Cancel").press("Enter")
        assert await worker.locator(".tag").inner_text() == "ready"
        await worker.get_by_role("button", name="Drain").press("Enter")
        await confirm.get_by_role("button", name="Drain").press("Enter")
        await worker.get_by_text("drained").wait_for()
        await worker.get_by_role("button", name="Undo the drain").press("Enter")
        await worker.get_by_text("ready", exact=True).wait_for()


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
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Tools, a JSON list").fill("{}")
        await page.get_by_role("button", name="Apply").click()
        await page.evaluate("new Promise((done) => setTimeout(done))")  # news of the closed dialog came before that
        await ask(page, "one")
        await page.locator(".toast").get_by_text("Tools, a JSON list: must be a JSON list").wait_for()
        assert await page.get_by_label("Message", exact=True).input_value() == "one"
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Tools, a JSON list").fill("")
        await page.get_by_role("button", name="Apply").click()
        await page.evaluate("new Promise((done) => setTimeout(done))")  # news of the closed dialog came before that
        refusal = {"error": {"message": "too much waits: come back in 2 s"}}
        await page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=refusal))
        await ask(page, "two")
        await page.locator(".note.error").get_by_text("Too much waits: come back in 2 s").wait_for()
        await page.unroute("**/v1/chat/completions")
        async with page.expect_request("**/v1/chat/completions") as request:
            await ask(page, "three")
        told = (await request.value).post_data_json["messages"]
        assert told == [{"role": "user", "content": "three"}]  # what failed is not part of the conversation
        await page.get_by_role("button", name="Regenerate").wait_for()
        refusal = {"error": {"message": "a valid API key is needed: send `Authorization: Bearer KEY`"}}
        await page.route("**/v1/chat/completions", lambda route: route.fulfill(status=401, json=refusal))
        await ask(page, "four")
        await page.get_by_role("button", name="Enter a key").click()
        assert await page.evaluate("document.activeElement.id") == "api-key"
        await page.keyboard.type("some-key")
        await page.keyboard.press("Enter")
        await page.unroute("**/v1/chat/completions")
        await page.get_by_role("button", name="Try again").click()
        await page.locator(".turn.model").nth(1).get_by_role("button", name="Regenerate").wait_for()


PAGES = {
    "chat": ".composer",
    "overview": ".tile",
    "requests": ".requests tbody tr",
    "fleet": "[data-node='worker-0']",
    "fleet?view=map": "[data-node='worker-0']",
    "fleet/worker-0": "[data-node='worker-0']",
    "models": "[aria-label='tiny'] .facts",
    "planner": ".planners",
    "batches": ".page-batches td",
    "tenants": "[aria-label='Keys'] td b",
}


@pytest.mark.long
async def test_every_stop_of_the_keyboard_is_named_and_seen(
    cluster: Cluster, http: httpx.AsyncClient, browser: Any
) -> None:
    await complete(http, first=51, tokens=2)  # so that all pages have something to show
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
    assert {"Skip to content", "Fleet", "Keys", "Send", "Drain", "Pause", "Heat map"} <= set(stops)


@pytest.mark.long
async def test_it_fits_and_can_be_read(cluster: Cluster, http: httpx.AsyncClient, browser: Any) -> None:
    """At the width of a phone, a tablet and a screen, light and dark."""
    await complete(http, first=52, tokens=2)
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
