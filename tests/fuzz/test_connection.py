"""A connection's bytes, cut anywhere: the answers are the same, whole and in order, and what is wrong is said last."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any

import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.connection import MAX_AHEAD, MAX_HEAD_BYTES, BoundedProtocol
from tests.unit.gateway.wire import LIMIT_S, answers_in

OFFER = b"connection: upgrade\r\nupgrade: h2c\r\n"
HEAD = b" HTTP/1.1\r\nhost: localhost\r\n"
ECHO = b"POST /echo" + HEAD
ASKED: list[tuple[bytes, int, bytes]] = [
    (b"GET /text" + HEAD + b"\r\n", 200, b"text"),
    (b"GET /none" + HEAD + b"\r\n", 404, b""),
    (b"GET /text" + HEAD + OFFER + b"\r\n", 200, b"text"),
    (b"\r\n\r\nGET /text" + HEAD + b"\r\n", 200, b"text"),
    (ECHO + b"content-length: 5\r\n\r\nGET /", 200, b"GET /"),
    (ECHO + OFFER + b"content-length: 4\r\n\r\n\r\n\r\n", 200, b"\r\n\r\n"),
    (ECHO + b"transfer-encoding: chunked\r\n\r\n2;x=y\r\nab\r\n1\r\nc\r\n0\r\nt: u\r\n\r\n", 200, b"abc"),
    (ECHO + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 200, b""),
    (b"POST /deaf" + HEAD + b"content-length: 3\r\n\r\nabc", 200, b"deaf"),
]  # fmt: skip
ENDS: list[tuple[bytes, int | None]] = [
    (b"", None), (b"GET /text", None), (b"\0", 400), (b"GET /text HTTP/3.7\r\n\r\n", 400), (b"GET nothing HTTP/1.1\r\n\r\n", 400),
    (b"GET /" + b"a" * MAX_HEAD_BYTES + HEAD + b"\r\n", 414), (ECHO + b"content-length: 9\r\n\r\nabc", None),
    (ECHO + b"transfer-encoding: chunked\r\n\r\nZ\r\n", 400), (ECHO + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    (b"GET /text" + HEAD + b"x: y\r\n" * 300 + b"\r\n", 431),
]  # fmt: skip


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says `text`, what it was sent, or what it did not listen to."""
    said, status, path = b"", 200, scope["path"]
    if path == "/echo":
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            said, more = said + message["body"], message["more_body"]
    else:
        await asyncio.sleep(0)
        said, status = path[1:].encode() * (path != "/none"), 404 if path == "/none" else 200
    await send({"type": "http.response.start", "status": status, "headers": []})
    for byte in said:
        await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


SHORT_EXAMPLES = 30


def test_cut_anywhere_the_answers_are_the_same(tried: Counter[str]) -> None:
    many = settings().max_examples > 1_000  # `make fuzz`

    @settings(max_examples=2_000 if many else SHORT_EXAMPLES, deadline=None)
    @given(
        asked=st.lists(st.sampled_from(ASKED), max_size=MAX_AHEAD),
        end=st.sampled_from(ENDS),
        cuts=st.lists(st.integers(1, 400), max_size=30),
    )
    def send(asked: list[tuple[bytes, int, bytes]], end: tuple[bytes, int | None], cuts: list[int]) -> None:
        tried["a connection's bytes"] += 1
        said = b"".join(data for data, _, _ in asked) + end[0]
        answers = answers_in(asyncio.run(answered(said, cuts)))
        assert [(answer.status, answer.body) for answer in answers[: len(asked)]] == [each[1:] for each in asked]
        assert [answer.status for answer in answers[len(asked) :]] == ([] if end[1] is None else [end[1]])

    send()


async def answered(said: bytes, cuts: list[int]) -> bytes:
    """What comes back for `said`, sent in pieces of these sizes and then the rest, and no more."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=BoundedProtocol, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            for size in cuts:
                writer.write(said[:size])
                said = said[size:]
                await asyncio.sleep(0)
            writer.write(said)
            writer.write_eof()
            return await reader.read()
        finally:
            writer.close()
            server.should_exit = True
            await serving
