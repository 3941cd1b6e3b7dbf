"""Files of the Batch API over a real NATS: bounds of tenants, half-written and half-deleted files, a full store."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from fastapi import Request
from starlette.types import Message

from common import subjects
from common.errors import (
    InvalidRequestError,
    OverloadedError,
    ServingError,
    UnavailableError,
)
from gateway.answers.tokenizer import ChatTokenizer
from gateway.batches.records import BatchLimits, FileRecord
from gateway.batches.routes import BatchRoutes
from gateway.http.exchange import request_scope
from gateway.http.problem import ConflictError
from gateway.keeping.layout import StoreFullError, token_of
from gateway.tenants.tenants import Tenant
from services.runtime.servers import run_nats
from tests.integration.batches.one import LIMITS, TENANT, One, each_once, echo, unattended


async def test_bounds_of_a_tenant(url: str, tokenizer: ChatTokenizer) -> None:
    few = BatchLimits(store_bytes=LIMITS.store_bytes, tenant_files=2, tenant_batches=1, tenant_share=1e-5)
    one = One(url, tokenizer, echo, limits=few)
    await one.open()
    try:
        with pytest.raises(StoreFullError, match="bytes are left"):
            await one.store.new_file("small", 1_000)
        batch = await one.begin(1, tenant="small")
        with pytest.raises(OverloadedError, match="not over"):
            await one.store.new_batch(
                "small", input_file_id=batch.input_file_id, endpoint="/v1/completions", metadata=None
            )
        with pytest.raises(ConflictError):
            await one.store.delete_file("small", batch.input_file_id)
        writer = await one.store.new_file("small", 10)
        await writer.write(b"{}\n")
        second: FileRecord = await writer.finish("b")
        with pytest.raises(StoreFullError, match="2 files"):
            await one.store.new_file("small", 10)
        await one.store.delete_file("small", second.id)
        await one.store.new_file("small", 10)
    finally:
        with contextlib.suppress(ServingError):
            await one.store.cancel("small", batch.id)
        await one.close()


async def test_a_tenant_s_share_holds_for_files_that_say_no_length_and_for_many_at_a_time(
    url: str, tokenizer: ChatTokenizer
) -> None:
    one = One(url, tokenizer, echo, limits=replace(LIMITS, tenant_share=1e-3, tenant_files=3))  # 67,108 bytes
    await one.open()
    try:
        at_a_time = [await one.store.new_file("chunks", 0) for _ in range(2)]
        for writer in at_a_time:
            await writer.write(b"x" * 999 + b"\n")
            for _ in range(39):
                await writer.write(b"x" * 999 + b"\n")
        await at_a_time[0].finish("first")
        with pytest.raises(StoreFullError, match="27108 bytes are left"):
            await at_a_time[1].finish("second")
        await at_a_time[1].drop()
        alone = await one.store.new_file("chunks", 0)
        with pytest.raises(StoreFullError, match="27108 bytes are left"):
            await alone.write((b"x" * 99 + b"\n") * 512)  # two parts
        await alone.drop()
        few = [await one.store.new_file("chunks", 1) for _ in range(3)]
        for writer in few[:2]:
            await writer.write(b"x")
            await writer.finish("small")
        await few[2].write(b"x")
        with pytest.raises(StoreFullError, match="3 files"):
            await few[2].finish("small")
        await few[2].drop()
        assert [file.bytes for file in await one.store.files("chunks")] == [40_000, 1, 1]
    finally:
        await one.close()


async def test_a_file_whose_acknowledgement_is_lost_is_there_as_a_whole_or_not_at_all(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unattended(url, tokenizer) as one:
        writer = await one.store.new_file("lost", 3)
        await writer.write(b"{}\n")
        create = one.streams.create

        async def unanswered(subject: str, data: bytes) -> bool:
            kept = await create(subject, data)
            if subject.startswith("baton.batch.file."):
                raise UnavailableError("the answer is lost")
            return kept

        monkeypatch.setattr(one.streams, "create", unanswered)
        with pytest.raises(UnavailableError):
            await writer.finish("a")
        assert len(await one.store.files("lost")) == 1
        await writer.drop()  # as an upload does that ends with an error
        assert await one.store.files("lost") == []
        assert await one.streams.count(subjects.batch_part(writer.id, "*")) == 0


async def test_a_file_that_is_half_deleted_can_be_deleted_again(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unattended(url, tokenizer) as one:
        writer = await one.store.new_file("half", 3)
        await writer.write(b"{}\n")
        file = await writer.finish("a")
        purge, purged = one.streams.purge, 0

        async def away_after_the_first(subject: str) -> None:
            nonlocal purged
            purged += 1
            if purged == 2:
                raise UnavailableError("NATS is away")
            await purge(subject)

        monkeypatch.setattr(one.streams, "purge", away_after_the_first)
        with pytest.raises(UnavailableError):
            await one.store.delete_file("half", file.id)
        await one.store.delete_file("half", file.id)
        assert await one.store.files("half") == []
        assert await one.streams.count(subjects.batch_part(file.id, "*")) == 0


async def test_a_list_goes_on_without_what_only_another_release_can_read(url: str, tokenizer: ChatTokenizer) -> None:
    async with unattended(url, tokenizer) as one:
        here, there = await one.begin(1, tenant="listing"), await one.begin(1, tenant="listing")
        await one.streams.put(there.subject, msgspec.msgpack.encode(msgspec.to_builtins(there) | {"status": "paused"}))
        assert [batch.id for batch in await one.store.batches("listing")] == [here.id]
        files = await one.store.files("listing")
        unreadable = subjects.batch_file(token_of("listing"), files[0].id)
        await one.streams.put(unreadable, b"\xc1")
        assert [file.id for file in await one.store.files("listing")] == [file.id for file in files[1:]]


async def test_the_head_of_a_file_reads_none_of_it(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tenant = One(url, tokenizer, echo), Tenant(name="head")
    await one.open()
    writer = await one.store.new_file("head", 0)
    await writer.write(b"{}\n" * 1000)
    file = await writer.finish("a")
    part, read, sent = one.store.part, [], []

    async def counted(file_id: str, number: int) -> bytes:
        read.append(number)
        return await part(file_id, number)

    async def send(message: Message) -> None:
        sent.append(message)

    monkeypatch.setattr(one.store, "part", counted)
    for method, parts, size in (("HEAD", [], 0), ("GET", [0, 1, 2, 3], 3000)):
        scope = {"type": "http", "method": method, "path_params": {"file_id": file.id}, "headers": []}
        request_scope(scope).tenant = tenant
        answer = await BatchRoutes(one.store, ()).content(Request(scope))
        await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        assert read == parts
        assert answer.headers["content-length"] == "3000"
        assert sum(len(message.get("body", b"")) for message in sent) == size
    await one.close()


async def test_a_full_store_refuses_files_and_keeps_what_it_has(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    limits = BatchLimits(store_bytes=200_000, tenant_share=1.0)
    async with run_nats(data_dir=tmp_path / "nats") as server:
        async with One(server.url, tokenizer, echo, limits=limits) as one:
            batch = await one.end_of(await one.begin(5))
            writer = await one.store.new_file(TENANT, 0)  # it says no length
            await writer.write(b"x" * 150_000)
            with pytest.raises(StoreFullError, match="bytes are left"):
                await writer.finish("large")
            with pytest.raises(StoreFullError, match="maximum bytes"):
                await one.streams.create(subjects.batch_part("file-large", 0), b"x" * 250_000)
            with pytest.raises(StoreFullError, match="room for results"):
                await one.store.new_file(TENANT, 150_000)
            each_once(await one.entries(batch), 5)


async def test_what_nats_cannot_carry_is_refused(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """A server that is not configured by us, with its max_payload of 1 MiB or less."""
    async with run_nats(data_dir=tmp_path / "nats", extra="max_payload: 4096\n") as server:
        async with One(server.url, tokenizer, echo) as one:
            writer = await one.store.new_file(TENANT, 0)
            await writer.write(b"x" * 5_000)
            with pytest.raises(InvalidRequestError, match="max_payload"):
                await writer.finish("large")
            batch = await one.end_of(await one.begin(2, max_tokens=200, logprobs=20))
            assert (batch.status, batch.failed) == ("completed", 2)
            told = [entry["response"]["body"]["error"]["message"] for entry in await one.entries(batch)]
            assert all("max_payload" in message for message in told)
