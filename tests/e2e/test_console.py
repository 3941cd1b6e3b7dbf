"""The console over HTTP: a whole Baton with the fake device, and what its page is made of and gets to see."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.console.assets import FOLDER, load_assets
from gateway.tenants.tenants import CONSOLE_DATA, CONSOLE_PAGES
from tests.console.fleet import (
    ADMIN,
    ADMIN_KEY,
    complete,
    console_cluster,
    generated,
    one_pair,
    roles,
    second_gateway,
    status,
    until_event,
    until_state,
)
from tests.e2e.cluster import ROOT, Cluster

NOBODY = {"authorization": ""}
LARGEST_PAGE = 320_000  # bytes, all files
LARGEST_ZIPPED = 120_000
STATE_FIELDS = {
    "gateway",
    "version",
    "model",
    "max_model_len",
    "models",
    "has_admin",
    "not_ready",
    "time_unix",
    "levels",
}
STATE_FIELDS |= {"in_flight", "waiting", "workers", "gateways", "links", "handovers", "latencies", "placed", "refused"}
STATE_FIELDS |= {"events", "tenants", "not_ready_since", "trace_url", "log", "lost", "planners", "decisions"}


ROLES = {"decode-0": ["decode"], "prefill-0": ["prefill"], "worker-0": ["decode", "prefill"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with console_cluster(tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """With the admin key. No API key is asked for."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, headers=ADMIN) as client:
        yield client


async def test_the_page_may_load_and_run_its_own_files_only(http: httpx.AsyncClient) -> None:
    names = ["/", *(f"/console/static/{name}" for name in load_assets())]
    names += [f"/console/{page}" for page in CONSOLE_PAGES]
    assert len(names) > 20
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


async def test_a_page_has_an_address_below_which_its_files_are_found(http: httpx.AsyncClient) -> None:
    whole = (await http.get("/")).text
    for path, up in (("/console/overview", "../"), ("/console/requests/x-1", "../../"), ("/console/chat/", "../../")):
        answer = await http.get(path, headers=NOBODY)
        assert (answer.status_code, answer.text) == (200, whole.replace('"console/static', f'"{up}console/static')), (
            path
        )


async def test_a_wrong_address_is_a_page_for_browsers_and_an_error_object_for_clients(http: httpx.AsyncClient) -> None:
    for path in ("/console/nothing", "/console/nothing/x", "/console/requests/a/b", "/console/a/b/c/d"):
        asked = await http.get(path, headers=NOBODY)
        assert (asked.status_code, "error" in asked.json()) == (404, True), path
        shown = await http.get(path, headers=NOBODY | {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert (shown.status_code, shown.headers["content-type"]) == (404, "text/html; charset=utf-8"), path
        assert f'src="{"../" * (path.count("/") - 1)}console/static/main.js"' in shown.text
        assert "content-security-policy" in shown.headers


async def test_types_and_unknown_files(http: httpx.AsyncClient) -> None:
    types = {
        "main.js": "text/javascript",
        "style.css": "text/css",
        "icon.svg": "image/svg+xml",
        "frame/dom.js": "text/javascript",
    }
    for name, kind in types.items():
        assert (await http.get(f"/console/static/{name}")).headers["content-type"].startswith(kind)
    for name in ("nothing.js", "..%2froutes.py", "%2e%2e/routes.py", "__init__.py"):
        assert (await http.get(f"/console/static/{name}")).status_code == 404, name


def test_the_page_is_small_and_takes_nothing_from_elsewhere() -> None:
    files = {name: asset.body for name, asset in load_assets().items()}
    assert sum(map(len, files.values())) <= LARGEST_PAGE
    assert sum(len(gzip.compress(content)) for content in files.values()) <= LARGEST_ZIPPED
    for name, content in files.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        if not name.startswith("vendor/"):  # these name their homes, and the policy holds for them, too
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
    # Tokens are generated while the handoff is under way, and heartbeats bring the totals.
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
    (model,) = state["models"]
    assert (model["name"], model["architecture"], model["max_model_len"] > 0) == ("tiny", "LlamaForCausalLM", True)
    (tenant,) = state["tenants"]
    assert (tenant["tenant"], tenant["requests"], tenant["completion_tokens"]) == ("default", 1, 6)


async def test_what_was_measured_is_told_as_columns_and_refused_requests_are_found(http: httpx.AsyncClient) -> None:
    await complete(http, first=11, tokens=6)
    async with asyncio.timeout(60):
        while True:
            told = (await http.get("/console/history?span=10m")).json()
            ended, workers = (told["series"].get(name, []) for name in ("ended", "workers"))
            if sum(filter(None, ended)) > 0 and max(filter(None, workers), default=0) == 3:
                break
            await asyncio.sleep(0.2)
    assert {len(column) for column in told["series"].values()} == {len(told["at"])}
    assert (told["step_s"], told["length"], set(told["gateways"])) == (2, 300, {"gateway"})
    assert any(value for value in told["series"]["ttft_p95"])
    again = (await http.get(f"/console/history?span=10m&since={told['at'][-1]}")).json()
    assert all(at > told["at"][-1] for at in again["at"])
    refused = await http.post("/v1/completions", json={"model": "nobody", "prompt": "x"})
    assert refused.status_code == 404
    [found] = (await http.get("/console/search?status=refused&model=nobody")).json()["requests"]
    assert (found["request_id"], found["gateway"]) == (refused.headers["x-request-id"], "gateway")
    detail = (await http.get(f"/debug/requests/{found['request_id']}")).json()["requests"][0]
    assert "nobody" in detail["detail"]
    done = (await http.get("/console/search?status=done&worker=decode-0")).json()["requests"]
    assert {one["status"] for one in done} == {"length"}
    for wrong in ("history?span=1d", "history?since=x", "search?status=odd"):
        assert (await http.get(f"/console/{wrong}")).status_code == 400


async def test_what_tells_of_everybody_needs_the_key(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {path for path in paths if path.startswith("/console/") and "{" not in path} == set(CONSOLE_DATA)
    for path in (*CONSOLE_DATA, "/debug/requests"):
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


async def test_the_stream_tells_of_requests_of_all_gateways_and_ends_with_its_own(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    async with (
        second_gateway(cluster) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=60, headers=ADMIN) as other,
    ):
        await until_state(http, lambda state: len(state["gateways"]) == 2)
        async with http.stream("GET", "/console/events") as here, other.stream("GET", "/console/events") as there:
            assert here.headers["content-type"].startswith("text/event-stream")
            events, elsewhere = here.aiter_lines(), there.aiter_lines()
            async with one_pair(http, other):
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
            async with asyncio.timeout(60):  # it does not wait for those who watch
                async for _ in elsewhere:
                    pass
                assert await process.wait() == 0


async def test_keys_are_made_listed_and_revoked_from_the_command_line(cluster: Cluster) -> None:
    async def keys(*arguments: str, secret: str = ADMIN_KEY) -> tuple[int, str]:
        command = [sys.executable, "-m", "cli.keys", *arguments, "--url", cluster.url]
        environment = os.environ | {"BATON_ADMIN_KEY": secret}
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, **pipes)  # type: ignore[arg-type]
        told = (await process.communicate())[0].decode()
        assert process.returncode is not None
        return process.returncode, told

    code, told = await keys("create", "--admin", "--name", "deputy")
    made = re.match(r"(key_[0-9a-f]{16}), shown only here: (baton-\S+)\n\Z", told)
    assert (code, made is not None) == (0, True), told
    assert made is not None
    name, secret = made.groups()
    assert re.search(
        rf"(?m)^{name} +deputy +admin +active +20\d\d-\d\d-\d\d +- +-$", (await keys("list", secret=secret))[1]
    )
    assert await keys("revoke", name) == (0, f"{name} is revoked\n")
    code, told = await keys("list", secret=secret)
    assert (code, "BATON_ADMIN_KEY" in told, secret in told) == (2, True, False)
    assert name not in (await keys("list"))[1]
    assert json.loads((await keys("list", "--json"))[1])["keys"][0]["state"] == "revoked"
    assert (await keys("create", "nobody"))[0] == 2
