"""Sessions under names: what a gateway kept another one restores, each tenant has its own, and nothing is unbounded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.answers import sessions as states
from gateway.http.problem import NotKeptError
from gateway.keeping.layout import StoreFullError
from gateway.responses import rooms
from gateway.responses.rooms import Rooms
from gateway.responses.store import ResponseStore
from gateway.sessions import store as sessions
from tests.integration.responses.conftest import KEYS, One
from tests.unit.gateway.conftest import MODEL

PATH = "/v1/sessions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PARTS = 3  # of a session: mark, content, record
Json = dict[str, Any]


@pytest_asyncio.fixture
async def gateway(here: One) -> One:
    """One that keeps nothing yet."""
    for kept in (await told(await here.http.get(PATH)))["data"]:
        await told(await here.http.delete(f"{PATH}/{kept['name']}"))
    return here


@pytest_asyncio.fixture
async def stranger(here: One) -> AsyncIterator[httpx.AsyncClient]:
    """Another tenant's client."""
    async with httpx.AsyncClient(
        base_url=here.url, headers={"authorization": f"Bearer {KEYS[1]}"}, timeout=60
    ) as client:
        yield client


async def asked(gateway: One, session: str, **fields: Any) -> list[int]:
    """Ask within a session; return the tokens of its state then."""
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT | fields, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    spec = gateway.script.submitted[-1]
    return [*spec.token_ids, *gateway.script.script(spec)[:4]]


async def told(answer: httpx.Response, status: int = 200) -> Json:
    assert answer.status_code == status, answer.text
    return dict(answer.json())


async def test_another_gateway_restores_what_one_saved(gateway: One, there: One) -> None:
    tokens = await asked(gateway, "agent", cache_salt="salt")
    saved = await told(await gateway.http.post(PATH, json={"name": "book", "session": "agent"}))
    assert (saved["object"], saved["name"], saved["model"], saved["num_tokens"]) == (
        "session",
        "book",
        MODEL,
        len(tokens),
    )
    assert (await told(await there.http.get(PATH)))["data"] == [saved]
    assert await told(await there.http.get(f"{PATH}/book")) == saved
    there.script.cached_tokens = 3
    restored = await told(await there.http.post(f"{PATH}/book/restore", headers={"x-session-id": "later"}))
    assert restored == saved | {"cached_tokens": 3}
    spec = there.script.submitted[-1]
    assert (spec.token_ids, spec.sampling.max_tokens, spec.sharing.keep.ttl_s) == (tokens, 1, 86_400.0)
    assert spec.sharing.salt == gateway.script.submitted[-1].sharing.salt
    again = await told(await there.http.post(PATH, json={"name": "again"}, headers={"x-session-id": "later"}))
    assert again["num_tokens"] == len(tokens)
    assert (await told(await there.http.delete(f"{PATH}/book")))["deleted"]
    await told(await gateway.http.get(f"{PATH}/book"), 404)
    await told(await gateway.http.post(f"{PATH}/book/restore"), 404)


async def test_a_name_keeps_the_newest_that_was_saved(gateway: One) -> None:
    await asked(gateway, "agent")
    await told(await gateway.http.post(PATH, json={"name": "book", "session": "agent"}))
    longer = await asked(gateway, "agent", messages=[{"role": "user", "content": "Hello, and much more than that"}])
    await told(await gateway.http.post(PATH, json={"name": "book", "session": "agent"}))
    await told(await gateway.http.post(f"{PATH}/book/restore"))
    assert gateway.script.submitted[-1].token_ids == longer
    assert len((await told(await gateway.http.get(PATH)))["data"]) == 1


async def test_each_tenant_has_its_own(gateway: One, stranger: httpx.AsyncClient) -> None:
    await asked(gateway, "agent")
    await told(await gateway.http.post(PATH, json={"name": "book", "session": "agent"}))
    await told(await stranger.get(f"{PATH}/book"), 404)
    await told(await stranger.post(f"{PATH}/book/restore"), 404)
    await told(await stranger.delete(f"{PATH}/book"), 404)
    await told(await stranger.post(PATH, json={"name": "mine", "session": "agent"}), 404)
    assert (await told(await stranger.get(PATH)))["data"] == []


@pytest.mark.parametrize("name", ["*", "%3E", "%2A"])
async def test_a_wildcard_of_subjects_names_no_session(name: str, gateway: One) -> None:
    await asked(gateway, "agent")
    await told(await gateway.http.post(PATH, json={"name": "book", "session": "agent"}))
    await told(await gateway.http.get(f"{PATH}/{name}"), 404)
    await told(await gateway.http.delete(f"{PATH}/{name}"), 404)
    await told(await gateway.http.post(f"{PATH}/book/restore"))


async def test_a_slot_is_the_session_of_its_requests(gateway: One) -> None:
    body = {"prompt": "Hello", "n_predict": 4, "id_slot": 3}
    assert (await gateway.http.post("/completion", json=body)).status_code == 200
    count = len(gateway.script.submitted[-1].token_ids) + 4
    saved = await told(await gateway.http.post("/slots/3?action=save", json={"filename": "a.bin"}))
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (3, "a.bin", count)
    assert (await told(await gateway.http.post("/slots/3?action=erase")))["n_erased"] == count
    await told(await gateway.http.post("/slots/3?action=save", json={"filename": "b.bin"}), 404)
    restored = await told(await gateway.http.post("/slots/3?action=restore", json={"filename": "a.bin"}))
    assert (restored["n_restored"], restored["timings"]["restore_ms"] >= 0) == (count, True)
    assert (await told(await gateway.http.post("/slots/3?action=save", json={"filename": "b.bin"})))["n_saved"] == count


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (PATH, {"name": "book", "session": "unheard"}, 404),
        (PATH, {"name": "book"}, 400),
        (PATH, {"name": "../book", "session": "agent"}, 400),
        (f"{PATH}/none/restore", {}, 404),
        ("/slots/1?action=save", {}, 400),
        ("/slots/1?action=fly", {"filename": "a"}, 400),
        ("/slots/9999?action=erase", {}, 400),
        ("/slots/x?action=erase", {}, 400),
    ],
)
async def test_wrong_ones_are_refused(path: str, body: Json, status: int, gateway: One) -> None:
    await told(await gateway.http.post(path, json=body), status)


async def test_what_was_kept_with_other_weights_is_not_restored(gateway: One, monkeypatch: pytest.MonkeyPatch) -> None:
    await asked(gateway, "agent")
    await told(await gateway.http.post(PATH, json={"name": "book", "session": "agent"}))
    load = sessions.Sessions.load

    async def of_another(self: sessions.Sessions, tenant: str, name: str) -> states.SessionState:
        state = await load(self, tenant, name)
        return states.SessionState(model=state.model, weights="others", cache_salt="", token_ids=state.token_ids)

    monkeypatch.setattr(sessions.Sessions, "load", of_another)
    await told(await gateway.http.post(f"{PATH}/book/restore"), 409)


async def test_a_tenant_has_a_bound(gateway: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "TENANT_SESSIONS", 2)
    monkeypatch.setattr(rooms, "LOOK_AGAIN_S", 0.0)
    await asked(gateway, "agent")
    for name in ("one", "two", "one"):
        await told(await gateway.http.post(PATH, json={"name": name, "session": "agent"}))
    answer = await gateway.http.post(PATH, json={"name": "three", "session": "agent"})
    assert answer.json()["error"]["code"] == "insufficient_storage"
    monkeypatch.setattr(sessions, "SESSION_BYTES", 4)
    await told(await gateway.http.post(PATH, json={"name": "one", "session": "agent"}), 400)


def state(num_tokens: int) -> states.SessionState:
    return states.SessionState(model=MODEL, weights="w", cache_salt="", token_ids=bytes(4 * num_tokens))


async def stored(kept: ResponseStore, tenant: str) -> int:
    """Number of messages of a tenant's sessions."""
    kinds = [sessions._each(tenant, "*"), sessions._mark(sessions._each(tenant, "*"))]
    return sum([await kept.streams.count(subject) for subject in kinds])


async def test_of_parallel_saves_one_is_kept_and_nothing_else(store: ResponseStore) -> None:
    """Contents of the others stayed until they were too old."""
    kept = [sessions.Sessions(store.streams, Rooms(store.streams, store.limits)) for _ in range(2)]
    await asyncio.gather(*(kept[n % 2].save("acme", "book", state(n)) for n in range(1, 9)))
    record = await kept[0].record("acme", "book")
    assert len((await kept[1].load("acme", "book")).token_ids) == 4 * record.num_tokens
    assert await stored(store, "acme") == PARTS
    await asyncio.gather(kept[0].save("acme", "book", state(9)), kept[1].drop("acme", "book"))
    with contextlib.suppress(NotKeptError):
        await kept[0].load("acme", "book")
    assert await stored(store, "acme") == PARTS * len(await kept[0].listed("acme"))


async def test_what_a_gateway_left_half_done_is_absent_and_swept(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = sessions.Sessions(store.streams, store.rooms)
    for name in ("one", "two", "three"):
        record = await kept.save("half", name, state(5))
        await (store.streams.purge if name == "two" else kept._delete)(sessions._content(record))
    for read in (kept.record, kept.load, kept.drop):
        with pytest.raises(NotKeptError):
            await read("half", {kept.record: "one", kept.load: "two"}.get(read, "three"))
    assert await stored(store, "half") == 1  # the mark of "two"
    for name in ("one", "two"):
        await kept.save("half", name, state(5))
    await store.streams.purge(sessions._record("half", "one"))
    await kept._delete(sessions._content(await kept.record("half", "two")))
    assert await kept.listed("half") == []
    assert await stored(store, "half") == PARTS  # these may be of saves that run
    monkeypatch.setattr(sessions, "SAVE_S", -2.0)
    assert await kept.listed("half") == []
    assert await stored(store, "half") == 0


async def test_a_gateway_with_another_clock_sweeps_no_save_that_runs(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, sweeps = (sessions.Sessions(store.streams, store.rooms) for _ in range(2))
    naming = saves._name

    async def swept_before(record: sessions.SessionRecord) -> sessions.SessionRecord | None:
        with monkeypatch.context() as patch:
            patch.setattr(sessions.time, "time", lambda: time.time_ns() / 1e9 + 10 * sessions.SAVE_S)
            assert await sweeps.listed("skewed") == []
        return await naming(record)

    monkeypatch.setattr(saves, "_name", swept_before)
    await saves.save("skewed", "one", state(5))
    assert (await sweeps.load("skewed", "one")).token_ids == state(5).token_ids


async def test_sessions_count_in_a_tenant_s_share(store: ResponseStore) -> None:
    limits = dataclasses.replace(store.limits, tenant_share=20_000 / store.limits.store_bytes)
    kept, another = (sessions.Sessions(store.streams, Rooms(store.streams, limits)) for _ in range(2))
    await kept.save("sharing", "one", state(2_500))
    await kept.save("sharing", "one", state(3_000))
    for each in (kept, another):
        with pytest.raises(StoreFullError):
            await each.save("sharing", "two", state(2_500))
    await kept.drop("sharing", "one")
    await kept.save("sharing", "two", state(2_500))
