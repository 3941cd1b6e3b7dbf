"""The console's page of models over a Baton that loads them on demand, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.console.browser import open_page
from tests.e2e.stack import PATIENCE_S, up
from tests.models import build_tiny_model


@pytest.mark.long
async def test_models_are_loaded_and_unloaded_from_their_page(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    model, data = build_tiny_model(tmp_path / "tiny", "llama"), tmp_path / "data"
    named = [word for name in ("one", "two") for word in ("--model", f"{name}={model}")]
    options = ("--device", "fake", "--keep-alive", "-1", "--alias", "chat=one@90%,chat=two@10%")
    async with up(None, data, *named, *options) as stack:
        await stack.says("Baton serves one, two")
        key = (data / "users" / "admin.key").read_text().strip()
        async with open_page(browser, f"{stack.url}/console/models", admin_key=key) as watched:
            page = watched.page
            page.set_default_timeout(PATIENCE_S * 1000)
            two = page.locator("[data-key='two']")
            await two.get_by_text("not loaded").wait_for()
            await page.get_by_text("one 90 %, two 10 %").wait_for()
            await page.get_by_text("No model is kept here").wait_for()
            await page.get_by_role("button", name="load two", exact=True).click()
            await two.get_by_text("loaded, on 1 worker").wait_for()
            await page.locator("[data-key='one']").get_by_text("not loaded").wait_for()
            await page.get_by_role("button", name="unload two", exact=True).click()
            await page.get_by_role("button", name="Unload", exact=True).click()
            await two.get_by_text("not loaded").wait_for()
        async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as http:
            assert (await http.get("/admin/models")).status_code == 401
            state = (await http.get("/console/state")).json()
        assert [one["hosted"]["status"] for one in state["models"]] == ["unloaded", "unloaded"]
        stack.process.terminate()
        await stack.ends()
