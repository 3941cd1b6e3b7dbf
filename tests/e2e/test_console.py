"""The console over HTTP: a whole Baton with the fake device, and what its page is made of and gets to see."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.console.assets import FOLDER
from tests.e2e.cluster import Cluster
from tests.models import build_tiny_model

LARGEST_PAGE = 80_000  # bytes, all files
LARGEST_ZIPPED = 26_000
STATE_FIELDS = {
    "gateway",
    "version",
    "model",
    "max_model_len",
    "needs_key",
    "has_admin",
    "not_ready",
    "time_unix",
    "levels",
}
STATE_FIELDS |= {"in_flight", "waiting", "workers", "gateways", "links", "handovers", "latencies", "placed", "refused"}
STATE_FIELDS |= {"events"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("console")
    model = build_tiny_model(folder / "tiny", "llama")
    async with Cluster(folder / "run", model=model, fake=True, kv_memory_mb=8, fake_step_ms=2) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=20) as client:
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
    body = {"model": "tiny", "prompt": list(range(3, 43)), "max_tokens": 6, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200
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
    assert {name: worker["roles"] for name, worker in workers.items()} == {
        "prefill-0": ["prefill"],
        "decode-0": ["decode"],
    }
    for worker in workers.values():
        assert worker["kv_used"] + worker["kv_held"] + worker["kv_free"] == worker["kv_blocks"]
        assert json.loads(json.dumps(worker["incarnation"])) == worker["incarnation"] != ""
    (link,) = state["links"]
    (move,) = state["handovers"]
    assert (link["from"], link["to"], link["handovers"]) == ("prefill-0", "decode-0", 1)
    assert link["bytes"] == move["bytes"] == move["blocks"] * workers["decode-0"]["block_bytes"] > 0
    assert move["request_id"].startswith(answer.json()["id"])
    assert state["gateways"][0]["id"] == "gateway"
    assert state["latencies"]["ended"] == 1
    assert state["latencies"]["completion_tokens"] == 6
    assert sum(state["placed"].values()) == 1


async def test_without_an_admin_key_nobody_manages_workers(http: httpx.AsyncClient) -> None:
    for order in ("roles", "drain"):
        answer = await http.post(f"/admin/workers/decode-0/{order}", json={"roles": ["decode"]})
        assert answer.status_code == 401
        assert "admin key" in answer.json()["error"]["message"]
    assert (await http.get("/console/state")).json()["has_admin"] is False
