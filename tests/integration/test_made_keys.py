"""Keys made through one gateway and valid at all: two gateways over a real NATS, with its users and without."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from common import subjects
from common.errors import UnavailableError
from common.messages import Goal
from common.wire import NatsSettings, Wire
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings, create_app
from gateway.request.active import timeline_of
from gateway.tenants import kept
from gateway.tenants.kept import KeptKeys
from gateway.tenants.register import NOTHING
from gateway.tenants.tenants import Tenants
from gateway.tenants.usage import DAY_S
from services.runtime.permissions import Member, make_users, nats_users
from services.runtime.servers import Server, run_nats
from tests.fakes.generations import ScriptedGenerations
from tests.integration.waiting import eventually
from tests.ports import own_port

ADMIN = "an-admin-key-of-a-test"
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """Each test's own: what is made holds for all who ask it."""
    async with run_nats(data_dir=tmp_path / "nats") as running:
        yield running


class One:
    """A gateway without workers: its routes, its keys."""

    def __init__(self, http: httpx.AsyncClient, keys: KeptKeys, tenants: Tenants, script: ScriptedGenerations) -> None:
        self.http, self.keys, self.tenants, self.script = http, keys, tenants, script

    async def make(self, **body: Any) -> dict[str, Any]:
        answer = await self.http.post("/admin/keys", headers=AS_ADMIN, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def serves(self, key: str) -> bool:
        body = {"model": "m", "prompt": "one", "max_tokens": 2}
        answer = await self.http.post("/v1/completions", headers={"authorization": f"Bearer {key}"}, json=body)
        assert answer.status_code in (200, 401), answer.text
        if answer.status_code == 200:  # a script ends no time line
            line = timeline_of(self.script.submitted[-1], time.monotonic())
            line.completion_tokens = 2
            self.script.timelines.end(line)
        return answer.status_code == 200


async def refuses(one: One, key: str) -> bool:
    return not await one.serves(key)


@contextlib.asynccontextmanager
async def gateway(
    nats: NatsSettings, tokenizer: ChatTokenizer, name: str = "g0", *, path: Path | None = None
) -> AsyncIterator[One]:
    tenants = Tenants(admin_key=ADMIN, path=path)
    script = ScriptedGenerations(lambda _: [*tokenizer.encode("two"), *tokenizer.eos_ids])
    wire = Wire()
    keys = KeptKeys(wire, tenants, gateway_id=name, incarnation=1)
    settings = HttpSettings(tenants=tenants)
    app = create_app(generations=script, catalogue=script.catalogue(tokenizer, name="m"), settings=settings, keys=keys)
    with contextlib.suppress(UnavailableError):
        await wire.open(nats, name=name)
    async with (
        keys.following(),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        yield One(http, keys, tenants, script)
    await wire.leave()


async def test_a_key_is_valid_everywhere_until_it_is_revoked_anywhere(
    server: Server, tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    nats = NatsSettings(url=server.url)
    async with gateway(nats, tokenizer) as here, gateway(nats, tokenizer, "g1") as there:
        assert await here.serves("")  # no key yet, so none is asked for
        with caplog.at_level(logging.INFO, logger="baton.audit"):
            key = await here.make(name="ci")
            assert await here.serves(key["key"])
            assert not await here.serves("")
            await eventually(lambda: refuses(there, ""))
            assert await there.serves(key["key"])
            told = await there.http.get("/admin/keys", headers=AS_ADMIN)
            assert key["key"] not in told.text
            assert next((one["id"], one["name"], one["state"]) for one in told.json()["keys"]) == (
                key["id"],
                "ci",
                "active",
            )
            answer = await there.http.post(f"/admin/keys/{key['id']}/revoke", headers=AS_ADMIN)
            assert answer.json()["state"] == "revoked"
        assert not await there.serves(key["key"])
        await eventually(lambda: refuses(here, key["key"]))
        assert not await here.serves("")
        events = [(one.message, one.key, one.by) for one in caplog.records]  # type: ignore[attr-defined]
        who = here.tenants.from_file[0].id
        assert events == [("keys.created", key["id"], who), ("keys.revoked", key["id"], who)]
        assert key["key"] not in caplog.text
    async with gateway(nats, tokenizer, "g2") as later:  # it is on disk
        assert not await later.serves(key["key"])
        assert (await later.http.get("/admin/keys", headers=AS_ADMIN)).json()["keys"][0]["state"] == "revoked"


async def test_only_an_admin_may(server: Server, tokenizer: ChatTokenizer) -> None:
    async with gateway(NatsSettings(url=server.url), tokenizer) as one:
        user = await one.make()
        second = await one.make(admin=True, name="deputy")
        asked = [("GET", "/admin/keys"), ("POST", "/admin/keys"), ("POST", f"/admin/keys/{second['id']}/revoke")]
        asked += [
            ("GET", "/admin/tenants"),
            ("POST", "/admin/tenants/x"),
            ("DELETE", "/admin/tenants/x"),
            ("GET", "/admin/usage"),
        ]
        for method, path in asked:
            for secret in ("", user["key"], user["id"], "baton-wrong"):
                answer = await one.http.request(method, path, headers={"authorization": f"Bearer {secret}"})
                assert answer.status_code == 401, (method, path)
        deputy = {"authorization": f"Bearer {second['key']}"}
        made = (await one.http.post("/admin/keys", headers=deputy, json={})).json()
        assert made["created_by"] == second["id"]
        assert not await one.serves(second["key"])  # it is for administration alone
        assert (await one.http.post(f"/admin/keys/{second['id']}/revoke", headers=AS_ADMIN)).status_code == 200
        assert (await one.http.get("/admin/keys", headers=deputy)).status_code == 401


async def test_tenants_are_made_changed_and_deleted(
    server: Server, tokenizer: ChatTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('[tenants.filed]\nkeys = ["a-key-of-the-file"]\n')
    async with gateway(NatsSettings(url=server.url), tokenizer, path=path) as one:

        async def ask(method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
            answer = await one.http.request(method, path, headers=AS_ADMIN, **more)
            return answer.status_code, answer.json()

        status, told = await ask("POST", "/admin/keys", json={"tenant": "acme"})
        assert (status, told["error"]["param"]) == (400, "tenant")
        assert "POST /admin/tenants/acme" in told["error"]["message"]
        with caplog.at_level(logging.INFO, logger="baton.audit"):
            options = {"requests_per_minute": 1, "weight": 2, "cache_salt": "a-secret-salt", "kv_share": 0.25}
            options["loads"] = ["small"]
            status, told = await ask("POST", "/admin/tenants/acme", json=options)
        assert "a-secret-salt" not in str([vars(record) for record in caplog.records])
        assert (status, told["requests_per_minute"], told["source"], told["loads"]) == (200, 1, "made", ["small"])
        tenant = one.tenants.named("acme")
        assert tenant is not None
        assert (tenant.may_load("small"), tenant.may_load("large")) == (True, False)
        key = await one.make(tenant="acme")
        assert await one.serves(key["key"])
        assert (
            await one.http.post(
                "/v1/completions", headers={"authorization": f"Bearer {key['key']}"}, json={"model": "m", "prompt": "x"}
            )
        ).status_code == 429
        status, told = await ask("POST", "/admin/tenants/acme", json={"loads": []})
        assert (told["requests_per_minute"], told["loads"]) == (0, [])
        assert one.keys.register.tenants["acme"].loads == [], "none, which is not any"
        assert (await ask("POST", "/admin/tenants/acme", json={}))[1]["loads"] is None
        assert one.keys.register.tenants["acme"].cache_salt == "a-secret-salt"  # nobody could read it to send it again
        assert (await ask("POST", "/admin/tenants/acme", json={"cache_salt": ""}))[1]["shares_cache"]
        assert await one.serves(key["key"])
        goal = {"ttft_slo_ms": 200, "tpot_slo_ms": 20.5}
        told = (await ask("POST", "/admin/tenants/acme", json=goal))[1]
        assert told | goal == told
        assert one.keys.register.tenants["acme"].goal == Goal(ttft_ms=200.0, tpot_ms=20.5)
        assert (await ask("DELETE", "/admin/tenants/acme"))[0] == 409
        await ask("POST", f"/admin/keys/{key['id']}/revoke")
        assert await ask("DELETE", "/admin/tenants/acme") == (200, {"name": "acme", "deleted": True})
        for method, where, wanted in [
            ("DELETE", "/admin/tenants/acme", 404),
            ("POST", "/admin/tenants/filed", 409),
            ("POST", "/admin/tenants/a%20b", 400),
            ("POST", "/admin/tenants/b%0A", 400),
            ("POST", "/admin/keys/key_0123456789abcdef/revoke", 404),
            ("POST", "/admin/keys/nothing/revoke", 404),
            ("POST", f"/admin/keys/{one.tenants.from_file[0].id}/revoke", 409),
        ]:
            assert (await ask(method, where))[0] == wanted, (method, where)
        listed = {one["name"]: one["source"] for one in (await ask("GET", "/admin/tenants"))[1]["tenants"]}
        assert listed == {"default": "built in", "filed": "file"}
        wrong = [({"expires_in_days": 0}, "expires_in_days"), ({"name": "a\nb"}, "name"), ({"x": 1}, "x")]
        for body, field in wrong:
            status, told = await ask("POST", "/admin/keys", json=body)
            assert (status, told["error"]["param"]) == (400, field)
        assert (await ask("POST", "/admin/tenants/b", json={"weight": 0}))[1]["error"]["param"] == "weight"


async def test_usage_is_of_all_gateways_and_outlives_them(server: Server, tokenizer: ChatTokenizer) -> None:
    nats = NatsSettings(url=server.url)

    async def used(one: One, hours: str = "24") -> dict[str, Any]:
        answer = await one.http.get("/admin/usage", params={"hours": hours}, headers=AS_ADMIN)
        return {entry["key"]: entry for entry in answer.json().get("keys", [])}

    async with gateway(nats, tokenizer) as first:
        key = await first.make()
        assert await first.serves(key["key"])
        assert sum((await used(first))[key["id"]]["requests"]) == 1  # at once
    async with gateway(nats, tokenizer, "g1") as second:
        assert await second.serves(key["key"])
        entry = (await used(second))[key["id"]]
        assert (sum(entry["requests"]), entry["tenant"], len(entry["requests"])) == (2, "default", 24)
        assert sum(entry["completion_tokens"]) == 4
        assert len((await used(second, "168"))[key["id"]]["requests"]) == 7
        for wrong in ("0", "745", "x"):
            answer = await second.http.get("/admin/usage", params={"hours": wrong}, headers=AS_ADMIN)
            assert answer.json()["error"]["param"] == "hours"


async def test_without_nats_what_is_known_holds_and_nothing_is_made(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(run_nats(data_dir=tmp_path / "nats", port=own_port()))
        nats = NatsSettings(url=server.url)
        async with gateway(nats, tokenizer) as one:
            key = await one.make()
            await stack.aclose()

            async def is_refused() -> bool:
                answer = await one.http.post("/admin/keys", headers=AS_ADMIN, json={})
                return answer.status_code == 503

            await eventually(is_refused)
            assert await one.serves(key["key"])
            late_nats = dataclasses.replace(nats, connect_timeout_s=0.2)
            async with gateway(late_nats, tokenizer, "late") as late:  # nobody may come in who could be revoked
                assert not late.tenants.open_to_all
            async with run_nats(data_dir=tmp_path / "nats", port=server.port):

                async def is_made() -> bool:
                    return (await one.http.post("/admin/keys", headers=AS_ADMIN, json={})).status_code == 200

                await eventually(is_made)
                assert len(one.keys.register.keys) == 2


async def test_a_server_that_lost_the_keys_gets_them_with_the_next_change(
    tokenizer: ChatTokenizer, server: Server
) -> None:
    async with gateway(NatsSettings(url=server.url), tokenizer) as one:
        first = await one.make()
        await one.keys._js.delete_stream(subjects.KEYS_STREAM)
        assert await one.serves(first["key"])
        second = await one.make()
        async with gateway(NatsSettings(url=server.url), tokenizer, "g1") as other:
            assert await other.serves(first["key"])
            assert await other.serves(second["key"])


async def test_a_tenant_made_just_now_at_one_gateway_gets_a_key_at_another(
    tokenizer: ChatTokenizer, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LOOK_EACH_S", 3600.0)
    nats = NatsSettings(url=server.url)
    async with gateway(nats, tokenizer) as here, gateway(nats, tokenizer, "g1") as there:
        assert (await here.http.post("/admin/tenants/acme", headers=AS_ADMIN, json={})).status_code == 200
        key = await there.make(tenant="acme")
        assert await there.serves(key["key"])


async def test_a_gateway_that_runs_long_tells_of_its_own_older_days(tokenizer: ChatTokenizer, server: Server) -> None:
    async with gateway(NatsSettings(url=server.url), tokenizer) as one:
        now = time.time()
        for days in (5, 0):
            one.keys.usage.add("k", "acme", [1, 0, 0, 0, 0], now=now - days * DAY_S)
            await one.keys._write_usage()
        one.keys.usage.add("k", "acme", [1, 0, 0, 0, 0], now=now + DAY_S)  # forgets what is old and written
        records = await one.keys.used(7)
        assert sum(used.counts[0] for record in records for used in record.used) == 3


async def test_two_changes_at_once_are_both_kept(tokenizer: ChatTokenizer, server: Server) -> None:
    nats = NatsSettings(url=server.url)
    async with gateway(nats, tokenizer) as here, gateway(nats, tokenizer, "g1") as there:
        made = await asyncio.gather(*(one.make() for one in (here, there) for _ in range(5)))
        await there.make()
        assert {key["id"] for key in made} <= there.keys.register.keys.keys()


async def test_a_gateways_user_may_keep_keys_and_one_made_before_serves_as_before(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "API_TIMEOUT_S", 0.5)
    users = make_users([Member("gateway", "g0"), Member("gateway", "old"), Member("decode", "d0")], tmp_path / "users")
    old = users.nats.index('user: "old"')
    before = users.nats[:old] + users.nats[old:].replace('"baton.keys', '"baton.other').replace("BATON_KEYS", "X")
    assert nats_users([]) != before
    async with run_nats(data_dir=tmp_path / "nats", extra=before) as server:

        def settings(user: str) -> NatsSettings:
            return NatsSettings(url=dataclasses.replace(server, login=None).url, credentials=users.nats_file(user))

        async with gateway(settings("g0"), tokenizer) as new:
            key = await new.make()
            assert await new.serves(key["key"])
        async with gateway(settings("old"), tokenizer, "old") as one:
            assert one.keys.register == NOTHING
            assert await one.serves("")
            answer = await one.http.post("/admin/keys", headers=AS_ADMIN, json={})
            assert (answer.status_code, "baton users" in json.dumps(answer.json())) == (503, True)
