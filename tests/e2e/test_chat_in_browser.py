"""The console's chat, batches and keys in a real browser, at length."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.console.asking import answered, ask, asked, at
from tests.console.browser import open_page
from tests.console.fleet import ADMIN_KEY, console_cluster
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.long


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Starts only where there is a browser."""
    async with console_cluster(tmp_path_factory.mktemp("chat")) as running:
        yield running


async def test_chats_are_kept_branched_searched_and_deleted(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await asked(page, "first question about ferries")
        address = page.url
        assert re.search(r"/console/chat/[0-9a-f]{20}$", address)
        await page.locator(".turn.model").get_by_role("button", name="Regenerate").click()
        await page.locator(".turn.model .branches").get_by_text("2/2").wait_for()
        await page.get_by_role("button", name="Earlier version").click()
        await page.locator(".turn.model .branches").get_by_text("1/2").wait_for()
        await page.locator(".turn.user").hover()
        await page.get_by_role("button", name="Edit", exact=True).click()
        await page.get_by_label("Edit", exact=True).fill("second question about ferries")
        await page.keyboard.press("Enter")
        await page.locator(".turn.user .branches").get_by_text("2/2").wait_for()
        assert await page.locator(".turn.user .text").all_inner_texts() == ["second question about ferries"]
        await page.locator(".turn.model").get_by_role("button", name="Regenerate").wait_for()
        await page.reload()  # it comes from the browser's store
        await page.locator(".turn.user").get_by_text("second question about ferries").wait_for()
        assert await page.locator(".turn.model .md").inner_text() != ""
        await page.get_by_role("button", name="New chat").click()
        await page.locator(".welcome").wait_for()
        await asked(page, "about bridges")
        titles = page.locator(".conversations a")
        assert await titles.all_inner_texts() == ["about bridges", "first question about ferries"]
        await page.get_by_label("Search chats").fill("FERRIES second")
        await page.get_by_text("about bridges", exact=True).nth(0).wait_for()
        assert await titles.all_inner_texts() == ["first question about ferries"]
        await page.locator("[data-rename]").click()
        await page.get_by_label("Title").fill("Boats")
        await page.keyboard.press("Enter")
        await page.get_by_role("link", name="Boats").click()
        await page.wait_for_url(address)
        async with page.expect_download() as download:
            await page.locator(".list").get_by_role("button", name="Export").click()
        kept = json.loads((await (await download.value).path()).read_text())
        assert sorted(chat["title"] for chat in kept["conversations"]) == ["", "Boats"]
        await page.get_by_role("button", name="Delete Boats").click()
        await page.locator("#confirm").get_by_role("button", name="Delete").click()
        await page.wait_for_url(at(cluster, "chat"))
        again = {"name": "chats.json", "mimeType": "application/json", "buffer": json.dumps(kept).encode()}
        await page.get_by_label("File of chats").set_input_files(again)
        await page.get_by_label("Search chats").fill("")
        await page.get_by_role("link", name="Boats").wait_for()
        assert await titles.count() == 3  # one of them twice: what is imported is another chat


async def test_calls_thoughts_and_two_columns(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
        said = answered({"reasoning_content": "Let me see."}, {"tool_calls": [call]}, finish="tool_calls")
        await page.route("**/v1/chat/completions", said)
        answer = await asked(page, "the weather?")
        assert await answer.locator(".fold summary").all_inner_texts() == [
            "Thought for 0.00 ms",
            'Called get_weather {"city": "Bern"}',
        ]
        assert not await answer.locator(".thoughts").is_visible()
        await page.unroute("**/v1/chat/completions")
        await page.route(
            "**/v1/chat/completions", answered({"content": "| a |\n|---|\n| **21** |\n\n```py\nx = 1\n```"})
        )
        await page.get_by_label("Result of get_weather").fill("21 degrees")
        async with page.expect_request("**/v1/chat/completions") as request:
            await page.get_by_role("button", name="Send result").click()
        told = (await request.value).post_data_json["messages"]
        assert told[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Bern"}'}
        assert told[2] == {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"}
        assert "reasoning" not in json.dumps(told)
        await page.locator(".md td strong").get_by_text("21").wait_for()
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await page.get_by_role("button", name="Copy code").click()
        await page.locator(".toast").get_by_text("Copied").wait_for()
        assert await page.evaluate("navigator.clipboard.readText()") == "x = 1"
        await page.locator(".acts .dropdown summary").last.click()
        await page.get_by_role("button", name="Copy as curl").last.click()
        await page.locator(".toast").get_by_text("Copied as curl").wait_for()
        curl = await page.evaluate("navigator.clipboard.readText()")
        assert curl.startswith(f"curl '{cluster.url}/v1/chat/completions'")
        assert '"tool_call_id": "call_1"' in curl
        await page.get_by_role("button", name="Compare").click()
        await page.get_by_role("region", name="Column B").get_by_role("button", name="Settings").click()
        await page.get_by_label("Temperature").fill("0.25")
        await page.get_by_role("button", name="Apply").last.click()
        bodies: list[Any] = []
        page.on("request", lambda one: bodies.append(one.post_data_json) if one.url.endswith("/completions") else None)
        await ask(page, "both of you")
        await page.locator(".thread").nth(1).locator(".turn.model:not(.running)").nth(2).wait_for()
        await page.locator(".thread").nth(0).locator(".turn.model:not(.running)").nth(2).wait_for()
        assert [body.get("temperature") for body in bodies] == [None, 0.25]
        assert bodies[0]["messages"] == bodies[1]["messages"]
        await page.get_by_role("button", name="Keep this one").last.click()
        assert await page.locator(".thread").count() == 1
        await page.get_by_role("button", name="Settings (1)").wait_for()


async def test_an_answer_is_stopped_and_goes_on_while_other_pages_are_shown(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        page = watched.page
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Longest answer, tokens").fill("2000")
        await page.get_by_label("Further fields of the body").fill('{"ignore_eos": true}')
        await page.get_by_role("button", name="Apply").last.click()
        await ask(page, "a long answer")
        await page.locator(".turn.running .timing summary").wait_for()
        await page.get_by_role("link", name="Fleet").click()
        await page.locator("[data-node='worker-0']").wait_for()
        await page.go_back()
        await page.locator(".turn.running .timing summary").wait_for()
        await page.keyboard.press("Escape")
        await page.locator(".note").get_by_text("Stopped.").wait_for()
        assert await page.locator(".turn.model .md").inner_text() != ""
        await page.locator("body").press("/")
        assert await page.evaluate("document.activeElement.ariaLabel") == "Message"


async def test_keys_and_tenants_are_made_and_revoked(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, at(cluster, "tenants")) as watched:
        page = watched.page
        await page.get_by_role("button", name="Enter the admin key").click()
        await page.keyboard.type(ADMIN_KEY)
        await page.keyboard.press("Enter")
        await page.get_by_text("in the gateway's files").wait_for()
        await page.get_by_role("button", name="New tenant").click()
        await page.get_by_label("Name").fill("acme")
        await page.get_by_label("Requests at a time").fill("7")
        await page.get_by_role("button", name="Create", exact=True).click()
        await page.get_by_role("region", name="Tenants").get_by_text("7 at a time").wait_for()
        await page.get_by_role("button", name="Create key").click()
        await page.get_by_label("Name, for your eyes").fill("deputy <b>")
        await page.get_by_label(
            "An administrator's"
        ).check()  # one of a tenant's would close the gateway to other tests
        await page.get_by_role("button", name="Create", exact=True).click()
        secret = await page.get_by_label("The key", exact=True).input_value()
        deputy = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=cluster.url, headers=deputy, timeout=60) as http:
            assert (await http.get("/admin/keys")).status_code == 200
            await page.get_by_role("button", name="I have it").click()
            row = page.get_by_role("row").filter(has_text="deputy <b>")
            assert "active" in await row.inner_text()
            assert secret not in await page.content()
            await page.get_by_role("button", name="Revoke deputy").click()
            await page.locator("#confirm").get_by_role("button", name="Revoke").click()
            await row.wait_for(state="detached")
            assert (await http.get("/admin/keys")).status_code == 401
        await page.get_by_label("Show revoked and expired").check()
        assert "revoked" in await row.inner_text()
        await page.get_by_role("button", name="Delete acme").click()
        await page.locator("#confirm").get_by_role("button", name="Delete").click()
        await page.get_by_role("row").filter(has_text="acme").wait_for(state="detached")


async def test_a_batch_is_submitted_watched_and_its_results_taken(cluster: Cluster, browser: Any) -> None:
    body = {"model": "tiny", "prompt": "one two", "max_tokens": 3}
    entries = [
        {"custom_id": "good", "method": "POST", "url": "/v1/completions", "body": body},
        {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": body | {"max_tokens": -1}},
    ]
    lines = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    async with open_page(browser, at(cluster, "batches")) as watched:
        page = watched.page
        given = {"name": "two.jsonl", "mimeType": "application/jsonl", "buffer": lines}
        await page.get_by_label("File of requests").set_input_files(given)
        row = page.get_by_role("row").filter(has_text="two.jsonl").first
        await row.get_by_text("completed").wait_for()
        assert "2 of 2 lines, 1 failed" in await row.inner_text()
        for words, wanted in (("Results", "good"), ("Errors", "bad")):
            async with page.expect_download() as download:
                await row.get_by_role("button", name=words).click()
            (result,) = (await (await download.value).path()).read_text().splitlines()
            assert json.loads(result)["custom_id"] == wanted
        await page.get_by_text("Files", exact=True).click()
        await page.get_by_role("button", name="Delete two.jsonl").click()
        await page.locator("#confirm").get_by_role("button", name="Delete").click()
        await page.get_by_role("button", name="Delete two.jsonl").wait_for(state="detached")
        wrong = {"name": "wrong.jsonl", "mimeType": "application/jsonl", "buffer": b"{}\n"}
        await page.get_by_label("File of requests").set_input_files(wrong)
        await page.get_by_role("row").filter(has_text="wrong.jsonl").get_by_text("failed").first.wait_for()
        assert "line 1" in await page.get_by_role("row").filter(has_text="wrong.jsonl").first.inner_text()


GROWS = """async (text) => {
  const { Growing, markdown } = await import("/console/static/chat/markdown.js");
  const whole = markdown(text).innerHTML, wrong = [];
  for (const step of [1, 2, 3, 7, 50]) {
    const root = document.createElement("div"), growing = new Growing(root);
    for (let end = step; end < text.length; end += step) growing.show(text.slice(0, end));
    growing.show(text, { done: true });
    if (root.innerHTML !== whole) wrong.push([step, root.innerHTML, whole]);
  }
  return wrong;
}"""
TEXT = """# A *title*

Words with [a link][1] and `code`,
a second line.

- one
- two **bold**

  a paragraph of two
- three
  1. deep
  2. deeper

7. seven
8. eight

```py
def f():
    return "x"  # c
```
| a | b |
|---|--:|
| 1 | **2** |

> quoted
> - list

Title
=====

[1]: https://example.org
<b>html</b> &amp; the [link][1]
"""


async def test_an_answer_that_grew_looks_like_one_that_came_at_once(cluster: Cluster, browser: Any) -> None:
    async with open_page(browser, cluster.url, admin_key=ADMIN_KEY) as watched:
        assert await watched.page.evaluate(GROWS, TEXT.replace("[a link][1]", "a link")) == []
