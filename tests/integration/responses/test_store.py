"""Responses and conversations in a real NATS: parts, fences, bounds of tenants, events that are followed."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import InvalidRequestError, OverloadedError
from common.wire import NatsSettings, connect
from gateway.http.problem import NotKeptError
from gateway.keeping.layout import StoreFullError
from gateway.responses import rooms
from gateway.responses import store as store_module
from gateway.responses.conversations import Conversations
from gateway.responses.records import Content, Events, ResponseLimits, ResponseRecord, new_response_id
from gateway.responses.store import ResponseStore, response_streams
from services.runtime.servers import run_nats
from tests.integration.waiting import eventually

CONTENT = Content(input=b'[{"id":"msg_1"}]', object=b'{"id":"resp","output":[]}')


@pytest.fixture
def tenant() -> str:
    return f"tenant {uuid.uuid4().hex}"


def response(tenant: str, **fields: Any) -> ResponseRecord:
    fields = {"status": "completed"} | fields
    return ResponseRecord(id=new_response_id(), tenant=tenant, created_at=int(time.time()), **fields)


def bounded(store: ResponseStore, **limits: Any) -> ResponseStore:
    return ResponseStore(store.streams, dataclasses.replace(store.limits, **limits))


async def test_a_response_of_many_parts_is_read_as_it_was_written_and_by_its_tenant_alone(
    store: ResponseStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PART_BYTES", 1_000)
    content = Content(input=b"[" + b"1," * 50_000 + b"1]", object=b'{"text":"' + b"x" * 30_000 + b'"}')
    kept = await store.keep(response(tenant), content)
    assert kept.parts > 100
    assert await store.whole(tenant, kept.id) == (kept, content)
    for stranger, response_id in (
        (f"{tenant}x", kept.id),
        (tenant, new_response_id()),
        (tenant, "resp_*"),
        (tenant, ">"),
    ):
        with pytest.raises(NotKeptError):
            await store.whole(stranger, response_id)
        with pytest.raises(NotKeptError):
            await store.delete(stranger, response_id)
    await store.delete(tenant, kept.id)
    with pytest.raises(NotKeptError):
        await store.record(tenant, kept.id)


async def test_history_is_in_order_and_names_the_response_that_is_gone(store: ResponseStore, tenant: str) -> None:
    contents = [Content(input=b"[]", object=b'{"n":%d}' % number) for number in range(20)]
    kept = [(await store.keep(response(tenant), content)).id for content in contents]
    assert await store.history(tenant, kept) == contents
    await store.delete(tenant, kept[7])
    with pytest.raises(NotKeptError, match=kept[7]):
        await store.history(tenant, kept)


async def test_the_oldest_responses_make_room_for_new_ones(store: ResponseStore, tenant: str) -> None:
    few = bounded(store, tenant_responses=3)
    kept = [(await few.keep(response(tenant), CONTENT)).id for _ in range(5)]
    for gone in kept[:2]:
        with pytest.raises(NotKeptError):
            await few.record(tenant, gone)
    for there in kept[2:]:
        await few.whole(tenant, there)
    after = bounded(store, tenant_responses=3)  # another gateway, which looks first
    await after.keep(response(tenant), CONTENT)
    with pytest.raises(NotKeptError):
        await after.record(tenant, kept[2])
    await after.record(tenant, kept[3])


async def test_a_tenant_s_bytes_are_bounded_and_no_other_s_suffer(store: ResponseStore, tenant: str) -> None:
    small = bounded(store, tenant_share=3_000 / store.limits.store_bytes)
    other = await small.keep(response(f"{tenant}'s neighbour"), CONTENT)
    large = Content(input=b"[]", object=b"x" * 1_200)
    kept = [(await small.keep(response(tenant), large)).id for _ in range(3)]
    with pytest.raises(NotKeptError):
        await small.record(tenant, kept[0])
    await small.record(tenant, kept[2])
    await small.whole(other.tenant, other.id)
    with pytest.raises(StoreFullError, match="bytes are left"):
        await small.keep(response(tenant), Content(input=b"[]", object=b"x" * 4_000))
    with pytest.raises(InvalidRequestError, match="store to false"):
        await bounded(store, content_bytes=100).keep(response(tenant), large)


async def test_background_responses_that_are_not_over_are_bounded_and_stay(
    store: ResponseStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "LOOK_AGAIN_S", 60.0)
    few = bounded(store, tenant_running=2, tenant_responses=3)
    running = [(await few.keep(response(tenant, status="queued"), CONTENT)).id for _ in range(2)]
    with pytest.raises(OverloadedError, match="not over"):
        await few.keep(response(tenant, status="queued"), CONTENT)
    await few.change(tenant, running.pop(), lambda now: now.to("cancelled"))
    monkeypatch.setattr(rooms, "LOOK_AGAIN_S", 0.0)
    running.append((await few.keep(response(tenant, status="queued"), CONTENT)).id)
    for _ in range(3):
        await few.keep(response(tenant), CONTENT)
    for response_id in running:
        await few.record(tenant, response_id)


async def test_only_who_began_a_response_last_ends_it(store: ResponseStore, tenant: str) -> None:
    queued = await store.keep(response(tenant, status="queued"), CONTENT)
    first = await store.change(tenant, queued.id, lambda now: now.to("in_progress", starts=1))
    given_back = await store.change(tenant, queued.id, lambda now: now.to("queued"))
    second = await store.change(tenant, queued.id, lambda now: given_back.to("in_progress", starts=2))
    stale, true = (Content(input=b"[]", object=said) for said in (b'"stale"', b'"true"'))
    assert not await store.end(first.to("completed"), stale)
    assert await store.end(second.to("completed"), true)
    assert not await store.end(second.to("failed"), stale)
    record, content = await store.whole(tenant, queued.id)
    assert (record.status, content) == ("completed", true)
    with pytest.raises(ValueError, match="can't be"):
        record.to("cancelled")


async def test_events_are_followed_as_they_come_from_any_place_on(
    store: ResponseStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "FOLLOW_S", 60.0)  # it is woken
    record = await store.keep(response(tenant, status="queued", keeps_events=True), CONTENT)
    await store.add_events(record, 0, Events(first=0, data=b"e0\n\ne1\n\n"))
    seen = store.follow(record)
    first = await anext(seen)
    assert isinstance(first, Events)
    assert [first.behind(after) for after in (-1, 0, 1, 9)] == [b"e0\n\ne1\n\n", b"e1\n\n", b"", b""]
    following = asyncio.ensure_future(anext(seen))
    assert await store.add_events(record, 1, Events(first=2, data=b"e2\n\n", is_last=True))
    assert await following == Events(first=2, data=b"e2\n\n", is_last=True)
    with pytest.raises(StopAsyncIteration):
        await anext(seen)
    assert not await store.add_events(record, 1, Events(first=2, data=b"other"))


async def test_who_follows_hears_of_an_end_without_a_last_event(
    store: ResponseStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "FOLLOW_S", 0.05)
    record = await store.keep(response(tenant, status="queued", keeps_events=True), CONTENT)
    following = asyncio.ensure_future(_all(store.follow(record)))
    cancelled = await store.change(tenant, record.id, lambda now: now.to("cancelled"))
    assert await following == [cancelled]


async def _all(found: AsyncIterator[Any]) -> list[Any]:
    return [one async for one in found]


async def test_what_is_kept_goes_after_its_time(tmp_path: Path, tenant: str) -> None:
    async with run_nats(data_dir=tmp_path) as server, connect(NatsSettings(url=server.url), name="test") as wire:
        limits = ResponseLimits(keep_s=0.5)
        streams = response_streams(wire, limits)
        streams.open()
        brief = ResponseStore(streams, limits)
        kept, conversations = await brief.keep(response(tenant), CONTENT), Conversations(brief)
        conversation = await conversations.create(tenant, {})

        async def is_gone() -> bool:
            try:
                await brief.record(tenant, kept.id)
            except NotKeptError:
                return True
            return False

        await eventually(is_gone)
        with pytest.raises(NotKeptError):
            await conversations.record(tenant, conversation.id)
        await streams.close()


# -- conversations -------------------------------------------------------------------------------------------------------


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


async def test_items_of_a_conversation_keep_their_order(store: ResponseStore, tenant: str) -> None:
    conversations = Conversations(store)
    conversation = await conversations.create(tenant, {"topic": "demo"})
    first = await conversations.add(tenant, conversation.id, [said("a"), said("b") | {"id": "mine"}, said("c")])
    await conversations.add(tenant, conversation.id, [said("d")])
    items = await conversations.items(tenant, conversation.id)
    assert texts(items) == ["a", "b", "c", "d"]
    assert [item["id"] for item in items[:3]] == [item["id"] for item in first]
    assert items[1]["id"] == "mine"
    assert len({item["id"] for item in items}) == 4
    assert await conversations.item(tenant, conversation.id, "mine") == items[1]
    before = await conversations.record(tenant, conversation.id)
    shrunk = await conversations.remove(tenant, conversation.id, "mine")  # an early turn is written anew
    assert shrunk.bytes < before.bytes
    assert texts(await conversations.items(tenant, conversation.id)) == ["a", "c", "d"]
    with pytest.raises(NotKeptError):
        await conversations.remove(tenant, conversation.id, "mine")
    assert (await conversations.describe(tenant, conversation.id, {"topic": "other"})).metadata == {"topic": "other"}
    await conversations.delete(tenant, conversation.id)
    with pytest.raises(NotKeptError):
        await conversations.items(tenant, conversation.id)


async def test_a_conversation_is_its_tenant_s_alone(store: ResponseStore, tenant: str) -> None:
    conversations = Conversations(store)
    conversation = await conversations.create(tenant, {})
    for stranger, conversation_id in (
        (f"{tenant}x", conversation.id),
        (tenant, "conv_*"),
        (tenant, "conv_" + "0" * 32),
    ):
        for act in (
            conversations.record(stranger, conversation_id),
            conversations.items(stranger, conversation_id),
            conversations.add(stranger, conversation_id, [said("a")]),
            conversations.describe(stranger, conversation_id, {}),
            conversations.delete(stranger, conversation_id),
        ):
            with pytest.raises(NotKeptError):
                await act


async def test_two_that_add_to_a_conversation_at_a_time_lose_nothing(store: ResponseStore, tenant: str) -> None:
    here, there = Conversations(store), Conversations(bounded(store))
    conversation = await here.create(tenant, {})
    turns = [[said(f"{number} first"), said(f"{number} second")] for number in range(8)]
    each = [(here, there)[number % 2].add(tenant, conversation.id, turn) for number, turn in enumerate(turns)]
    await asyncio.gather(*each)
    found = await here.items(tenant, conversation.id)
    assert sorted(texts(found)) == sorted(text for turn in turns for text in texts(turn))
    assert len({item["id"] for item in found}) == 16
    for at in range(0, 16, 2):  # turns are whole
        assert texts(found[at : at + 2])[0].split()[0] == texts(found[at : at + 2])[1].split()[0]


async def test_bounds_of_conversations(store: ResponseStore, tenant: str) -> None:
    few = Conversations(bounded(store, tenant_conversations=1, conversation_items=3, history_bytes=2_000))
    conversation = await few.create(tenant, {})
    with pytest.raises(StoreFullError, match="1 conversations"):
        await few.create(tenant, {})
    with pytest.raises(InvalidRequestError, match="3 items in all"):
        await few.add(tenant, conversation.id, [said("a")] * 4)
    with pytest.raises(InvalidRequestError, match="2000 bytes"):
        await few.add(tenant, conversation.id, [said("a" * 2_000)])
    with pytest.raises(InvalidRequestError, match="shorten it"):
        await few.add(tenant, conversation.id, [said("a" * (5 << 20))])
    assert await few.items(tenant, conversation.id) == []


async def test_a_record_of_another_release_is_no_room_taken(store: ResponseStore, tenant: str) -> None:
    record = response(tenant)
    await store.streams.create(record.subject, msgspec.msgpack.encode({"id": 1}))
    kept = await store.keep(response(tenant), CONTENT)
    assert await store.record(tenant, kept.id) == kept
