"""The admin key that `baton up` makes where it was given no key."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx

from tests.e2e.stack import PATIENCE_S, up
from tests.models import build_tiny_model


async def test_without_keys_an_admin_key_is_made_for_orders_and_nothing_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "data" / "users" / "admin.key"
    async with up(build_tiny_model(tmp_path / "tiny", "llama"), tmp_path / "data", "--device", "fake") as started:
        assert str(file) in await started.says("admin key")
        assert file.stat().st_mode & 0o777 == 0o600
        admin = {"authorization": f"Bearer {file.read_text().strip()}"}
        async with httpx.AsyncClient(base_url=started.url, timeout=PATIENCE_S) as client:
            assert (await client.get("/console/state")).status_code == 200
            assert [(await client.get("/admin/keys", headers=how)).status_code for how in ({}, admin)] == [401, 200]
        started.process.send_signal(signal.SIGINT)
        assert (await started.ends())[0] == 0
    assert not file.exists()
