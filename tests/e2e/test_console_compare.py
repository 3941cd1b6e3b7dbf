"""The console over models that pool alone: its state over HTTP, and texts that are compared in a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.console.browser import UNREADABLE, open_page
from tests.e2e.stack import PATIENCE_S, Up, up
from tests.pooling_models import build_pooling_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(folder: Path) -> AsyncIterator[Up]:
    mini = build_pooling_model(folder / "mini")
    cross = build_pooling_model(folder / "cross", "BertForSequenceClassification", num_labels=1)
    async with up(None, folder / "data", "--model", str(mini), "--model", str(cross)) as running:
        await running.says("Baton serves mini, cross")
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_a_fleet_that_only_pools_is_shown(stack: Up) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as http:
        asked = await http.post("/v1/embeddings", json={"model": "mini", "input": "the cat sat"})
        tokens = asked.json()["usage"]["total_tokens"]
        while True:
            state = (await http.get("/console/state")).json()
            workers = {one["model"]: one for one in state["workers"]}
            if workers.get("mini", {}).get("pooled_tokens") == tokens:
                break
        assert [worker["roles"] for worker in workers.values()] == [["pool"], ["pool"]]
        assert {worker["kv_blocks"] for worker in workers.values()} == {0}
        models = {one["name"]: (one["makes"], one["dimensions"], one["labels"]) for one in state["models"]}
        assert models == {"mini": ("vectors", 32, 0), "cross": ("scores", 32, 1)}
        [line] = (await http.get("/debug/requests")).json()["latest"]
        assert (line["prefill_worker"], line["status"]) == (workers["mini"]["id"], "stop")
        assert (await http.get("/console/compare")).status_code == 200


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
async def test_texts_are_compared_and_ranked_by_keyboard(stack: Up, browser: Any) -> None:
    async with open_page(browser, f"{stack.url}/console/compare") as watched:
        page = watched.page
        page.set_default_timeout(PATIENCE_S * 1000)
        await page.get_by_role("button", name="Compare").wait_for()
        area = page.get_by_label("Texts, one a line")
        await area.fill("the cat sat\n\nthe cat sat\nparis is the capital of france")
        await area.press("Control+Enter")
        await page.get_by_text("3 texts,").wait_for()
        rows = await page.locator("[aria-label='Matrix'] tbody tr").all_inner_texts()
        found = [row.split()[-3:] for row in rows]
        assert (found[0][:2], found[1][:2], found[2][2]) == (["1.00", "1.00"], ["1.00", "1.00"], "1.00")
        assert found[0][2] == found[2][0] != "1.00"
        assert await page.get_by_label("Model").locator("option").all_inner_texts() == ["mini"]
        await page.get_by_label("Kind").focus()
        await page.keyboard.press("ArrowDown")
        assert await page.get_by_label("Model").locator("option").all_inner_texts() == ["mini", "cross"]
        await page.get_by_label("Model").select_option("cross")
        await page.get_by_label("Query").press("Enter")
        await page.locator("[aria-label='Result'] tbody tr").nth(2).wait_for()
        scores = [float(cell) for cell in await page.locator("td[data-label='Score']").all_inner_texts()]
        assert scores == sorted(scores, reverse=True)
        await page.get_by_label("Kind").focus()
        await page.keyboard.press("ArrowUp")
        await area.fill("alone")
        await area.press("Control+Enter")
        await page.get_by_text("Give 2 to 24 texts, one a line: these are 1.").wait_for()
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            assert await page.evaluate(UNREADABLE) == [], scheme


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
async def test_pool_workers_have_their_place_among_others(stack: Up, browser: Any, folder: Path) -> None:
    key = (folder / "data" / "users" / "admin.key").read_text().strip()
    async with open_page(browser, f"{stack.url}/console/fleet", admin_key=key) as watched:
        page = watched.page
        page.set_default_timeout(PATIENCE_S * 1000)
        await page.get_by_text("2 workers: 0 prefill, 0 decode, 2 pool").wait_for()
        await page.get_by_role("button", name="Heat map").click()
        await page.get_by_role("heading", name="Pool (2)").wait_for()
        await page.get_by_role("link", name="pool-0").first.click()
        await page.get_by_role("button", name="Drain").wait_for()
        assert await page.get_by_role("button", name="Decode").count() == 0
        assert await page.get_by_text("KV cache in use").count() == 0
        await page.get_by_role("link", name="Models").click()
        await page.get_by_text("vectors of 32 features").wait_for()
