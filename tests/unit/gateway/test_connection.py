"""A connection's bytes: nothing is written out of its place, nothing grows without a bound, and who is gone is noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest

from common.errors import UnavailableError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.http.connection import (
    MAX_AHEAD,
    MAX_FIELDS,
    MAX_FRAMING_BYTES,
    MAX_HEAD_BYTES,
    MAX_URL_BYTES,
    BoundedProtocol,
)
from gateway.tenants.tenants import Tenants
from tests.fakes.generations import ScriptedGenerations
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway
from tests.unit.gateway.wire import CHAT, LIMIT_S, ask, chunked, get, wire

BODY = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 4}).encode()
DONE = b"data: [DONE]\n\n"


class Hurried(BoundedProtocol):
    head_timeout_s = 0.1


@pytest.fixture(scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Gateway]:
    async with run_gateway(tokenizer, HttpSettings(max_body_bytes=200_000), protocol=Hurried) as gateway:
        yield gateway


@pytest.fixture
async def held(gateway: Gateway) -> ScriptedGenerations:
    """Answers stop after their first token until they are released."""
    gateway.script.hold_after = 1
    return gateway.script


NEXT = {
    "unfinished": (b"GET /hea", 408, "no complete request"),
    "no HTTP": (b"\x16\x03\x01\x02", 400, "not valid HTTP"),
    "an endless header": (get()[:-2] + b"x: " + b"a" * 600_000, 431, str(MAX_HEAD_BYTES)),
    "large headers": (get(headers=f"x: {'a' * MAX_HEAD_BYTES}\r\n"), 431, str(MAX_HEAD_BYTES)),
    "many headers": (get(headers="x: y\r\n" * MAX_FIELDS), 431, str(MAX_FIELDS)),
    "a long URL": (get("/" + "a" * MAX_URL_BYTES), 414, str(MAX_URL_BYTES)),
    "no URL": (b"GET http://[ HTTP/1.1\r\nhost: a\r\n\r\n", 400, "valid"),
    "another protocol": (get(version="0.9"), 505, "HTTP/1.1"),
    "two hosts": (b"GET /health HTTP/1.1\r\nhost: a\r\nHOST: a\r\n\r\n", 400, "2 Host headers"),
    "two hosts of old": (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400, "2 Host headers"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "0 Host headers"),
    "a tunnel": (b"CONNECT x:80 HTTP/1.1\r\n\r\n", 405, "CONNECT"),
    "a broken body": (chunked(BODY, then=b"nothing\r\n"), 400, "not valid HTTP"),
    "endless trailers": (chunked(BODY, then=b"x: y\r\n" * 50_000), 431, str(MAX_FRAMING_BYTES)),
    "an endless trailer": (chunked(BODY, then=b"x: " + b"y" * 400_000), 431, str(MAX_FRAMING_BYTES)),
    "endless extensions": (chunked() + b"1;" + b"a" * 400_000, 431, str(MAX_FRAMING_BYTES)),
}  # fmt: skip


@pytest.mark.parametrize("together", [True, False], ids=["together", "later"])
@pytest.mark.parametrize(("wrong", "status", "words"), NEXT.values(), ids=NEXT)
async def test_a_wrong_next_request_is_refused_behind_the_stream_that_is_under_way(
    gateway: Gateway, held: ScriptedGenerations, wrong: bytes, status: int, words: str, together: bool
) -> None:
    async with wire(gateway) as client:
        await client.say(ask(stream=True) + (wrong if together else b""))
        begun = await client.until(b'"index":0')
        if not together:
            client.writer.write(wrong)
        asyncio.get_running_loop().call_later(2 * Hurried.head_timeout_s, held.release.set)
        stream, refusal = await client.rest(before=begun)
    assert stream.status == 200
    assert stream.body.endswith(DONE)
    assert refusal.status == status
    assert words in refusal.error
    assert refusal.headers["x-request-id"]


@pytest.mark.parametrize(("wrong", "status", "words"), NEXT.values(), ids=NEXT)
async def test_a_wrong_first_request_is_refused(gateway: Gateway, wrong: bytes, status: int, words: str) -> None:
    async with wire(gateway) as client:
        await client.say(wrong)
        (refusal,) = await client.rest()
    assert refusal.status == status
    assert words in refusal.error


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
async def test_answers_come_in_the_order_of_their_requests(
    gateway: Gateway, held: ScriptedGenerations, together: bool
) -> None:
    asked = [
        ask(stream=True),
        get("/version"),
        chunked(BODY, then=b"x-request-id: trailer\r\n\r\n"),
        get(),
        ask(),
        get("/nowhere"),
    ]
    async with wire(gateway) as client:
        for part in [b"".join(asked)] if together else asked:
            await client.say(part)
        begun = await client.until(b'"index":0')
        held.hold_after = None
        held.release.set()
        client.writer.write(get("/version", headers="connection: close\r\n"))
        answers = await client.rest(before=begun)
    assert [answer.status for answer in answers] == [200, 200, 200, 200, 200, 404, 200]
    assert [b"version" in answer.body for answer in answers] == [False, True, False, False, False, False, True]
    assert "trailer" not in [answer.headers["x-request-id"] for answer in answers]


async def test_only_so_many_requests_are_read_ahead(gateway: Gateway, held: ScriptedGenerations) -> None:
    async with wire(gateway) as client:
        await client.say(ask() + get() * (MAX_AHEAD + 9))
        await held.until(lambda: bool(held.running))
        held.release.set()
        *answers, last = await client.rest()
    assert [answer.status for answer in answers] == [200] * (MAX_AHEAD + 1)
    assert last.status == 400
    assert str(MAX_AHEAD) in last.error


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("more", [b"", get(), b"GET /hea", get() * 3 + b"x"], ids=["alone", "one", "a part", "several"])
async def test_a_client_that_leaves_is_noticed_whatever_it_sent_ahead(
    gateway: Gateway, held: ScriptedGenerations, stream: bool, more: bytes
) -> None:
    async with wire(gateway) as client:
        await client.say(ask(stream=stream) + more)
        await held.until(lambda: bool(held.running))
    await held.until(lambda: len(held.cancelled) == 1)


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "before"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_an_old_client_that_leaves_is_noticed(
    gateway: Gateway, held: ScriptedGenerations, stream: bool, begun: bool
) -> None:
    """As nginx asks by default."""
    held.hold_after = 1 if begun else 0
    async with wire(gateway) as client:
        await client.say(ask(version="1.0", stream=stream))
        if stream and begun:
            await client.until(b'"index":0')
        else:
            await held.until(lambda: bool(held.running))
    await held.until(lambda: len(held.cancelled) == 1)


@pytest.mark.parametrize("status", [200, 503])
async def test_an_old_client_that_closed_its_side_early_gets_one_status_line(
    gateway: Gateway, held: ScriptedGenerations, status: int
) -> None:
    held.fail, held.fail_after = None if status == 200 else UnavailableError("gone"), 1
    async with wire(gateway) as client:
        await client.say(ask(version="1.0"))
        client.writer.write_eof()
        begun = await client.until(b"HTTP/1.1 ")
        held.release.set()
        (answer,) = await client.rest(before=begun)
    assert (answer.status, answer.headers["connection"]) == (status, "close")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_closes_its_side_gets_its_answer(
    gateway: Gateway, held: ScriptedGenerations, stream: bool, version: str
) -> None:
    async with wire(gateway) as client:
        await client.say(ask(version=version, stream=stream))
        client.writer.write_eof()
        begun = b""
        if stream:
            begun = await client.until(b'"index":0')
        elif version == "1.1":
            begun = await client.until(b"HTTP/1.1 100 Continue\r\n\r\n")  # whether it is still there is found out
        held.release.set()
        (answer,) = await client.rest(before=begun)
    assert answer.status == 200
    if not stream:  # that it is the client's last request may be known after the head was written
        assert answer.headers["connection"] == "close"
    assert not held.cancelled


async def test_a_client_that_closes_its_side_gets_all_answers(gateway: Gateway) -> None:
    async with wire(gateway) as client:
        await client.say(get() + ask() + get("/nowhere") + b"GET /unfin")
        client.writer.write_eof()
        assert [answer.status for answer in await client.rest()] == [200, 200, 404]


async def test_a_stream_to_a_client_that_closed_its_side_ends_when_it_leaves(
    gateway: Gateway, held: ScriptedGenerations
) -> None:
    async with wire(gateway) as client:
        await client.say(ask(stream=True, max_tokens=20))
        client.writer.write_eof()
        await client.until(b'"index":0')
    held.hold_after = 15
    held.release.set()
    await held.until(lambda: len(held.cancelled) == 1)


async def test_what_was_sent_ahead_and_is_not_whole_is_dropped(gateway: Gateway, held: ScriptedGenerations) -> None:
    """Also where it is read only after the client closed its side, and what is whole only then is kept."""
    for more in (b"GET /unfin", ask()[:-3], get() + ask()[:-3], b"\0"):
        async with wire(gateway) as client:
            await client.say(ask(stream=True))
            begun = await client.until(b'"index":0')
            client.writer.write(more)
            client.writer.write_eof()
            asyncio.get_running_loop().call_later(2 * Hurried.head_timeout_s, held.release.set)
            answers = [answer.status for answer in await client.rest(before=begun)]
        held.release.clear()
        assert answers == [200] + [200] * more.startswith(get()) + [400] * (more == b"\0")


async def test_half_a_request_and_no_more_is_closed(gateway: Gateway) -> None:
    for part in (b"GET /hea", ask()[:-3], ask(stream=True)[:-3]):
        async with wire(gateway) as client:
            await client.say(part)
            client.writer.write_eof()
            assert await client.rest() == []


class Writes(BoundedProtocol):
    """Keeps what is written, a part for each write."""

    parts: ClassVar[list[bytes]] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        write = transport.write
        transport.write = lambda data: (self.parts.append(bytes(data)), write(data))  # type: ignore[method-assign, assignment, func-returns-value]
        super().connection_made(transport)


async def test_a_streams_head_and_its_first_event_are_one_write(tokenizer: ChatTokenizer) -> None:
    async with run_gateway(tokenizer, HttpSettings(), protocol=Writes) as gateway:
        messages = [{"role": "user", "content": "Hello"}]
        said = ask(path=CHAT, stream=True, prompt=None, messages=messages, headers="connection: close\r\n")
        for request, first in ((said, b'"role":"assistant"'), (ask(stream=True, headers="connection: close\r\n"), b"")):
            Writes.parts.clear()
            async with wire(gateway) as client:
                await client.say(request)
                (answer,) = await client.rest()
            assert answer.body.endswith(DONE)
            head, *events = Writes.parts
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert first in head.partition(b"\r\n\r\n")[2]
            assert not any(b"HTTP/1.1" in event for event in events)


async def test_old_clients_get_streams_without_chunks(gateway: Gateway) -> None:
    async with wire(gateway) as client:
        await client.say(ask(version="1.0", stream=True, headers="connection: keep-alive\r\n"))
        (answer,) = await client.rest()
    assert "transfer-encoding" not in answer.headers
    assert answer.headers["connection"] == "close"
    assert answer.body.startswith(b"data: {")
    assert answer.body.endswith(DONE)


async def test_a_body_of_many_chunks_and_a_few_trailers_is_read(gateway: Gateway) -> None:
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 50_000)
    async with wire(gateway) as client:
        await client.say(chunked() + pieces + b"0\r\nx-checksum: 1\r\n\r\n" + get(headers="connection: close\r\n"))
        assert [answer.status for answer in await client.rest()] == [200, 200]


async def test_what_follows_an_answer_that_did_not_wait_for_the_body_is_not_waited_for_without_end(
    gateway: Gateway,
) -> None:
    """Nor is a word said: the answer to that request is written."""
    async with wire(gateway) as client:
        await client.say(get(headers="content-length: 1000\r\n") + b"a part")
        assert [answer.status for answer in await client.rest()] == [200]


async def test_empty_lines_do_not_keep_a_connection(gateway: Gateway) -> None:
    async with wire(gateway) as client:
        await client.say(b"\r\n")
        assert [answer.status for answer in await client.rest()] == [408]


async def test_a_body_that_was_refused_unseen_is_not_taken_for_requests(tokenizer: ChatTokenizer) -> None:
    """Who waits for `100 Continue` and hears 401 may send the next request in place of the body."""
    async with (
        run_gateway(tokenizer, HttpSettings(tenants=Tenants(api_keys=("k" * 20,)))) as gateway,
        wire(gateway) as client,
    ):
        await client.say(ask(headers="expect: 100-continue\r\n")[: -len(BODY)])
        (refusal,) = await client.rest()
    assert (refusal.status, refusal.headers["connection"]) == (401, "close")


@pytest.mark.parametrize("asked", [ask, get])
async def test_another_protocol_is_not_taken_up_and_the_body_is_not_lost(gateway: Gateway, asked: object) -> None:
    """Java's client offers HTTP/2 with its first request, whatever that is."""
    offer = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    first = ask(headers=offer) if asked is ask else get(headers=offer)
    async with wire(gateway) as client:
        await client.say(first + first + get(headers="connection: close\r\n"))
        answers = await client.rest()
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert (b"choices" in answers[1].body) == (asked is ask)


async def test_a_connection_without_a_request_ends(gateway: Gateway) -> None:
    async with wire(gateway) as client:
        await client.say(get())
        await client.until(b'{"status":"ok"}')
        client.writer.write_eof()
        async with asyncio.timeout(LIMIT_S):
            assert await client.reader.read() == b""
