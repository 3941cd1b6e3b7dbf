"""What `baton up` makes of a gateway's word."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.up.readiness import reason_not_ready
from tests.certificates import make_certificates
from tests.ports import own_port


def answer(status: str, body: object) -> bytes:
    text = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text


READY = answer("200 OK", {"workers": {"prefill": 1, "decode": 2}})


@asynccontextmanager
async def saying(words: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that answers each request with these words; yields its URL."""

    async def told(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /ready HTTP/1.1\r\n")
        writer.write(words)
        writer.close()

    async with await asyncio.start_server(told, "127.0.0.1", 0, ssl=tls) as server:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (READY, None),
        (
            answer("200 OK", {"workers": {"prefill": 0, "decode": 2}}),
            "0 of 1 prefill and 2 of 2 decode workers are ready",
        ),
        (answer("503 Unavailable", {"reason": "no worker"}), "no worker"),
        (
            answer("503 Unavailable", {"reason": "none agrees", "refused": {"d": "block size"}}),
            "none agrees; d: block size",
        ),
        (b"", "the gateway starts"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "the gateway starts"),
    ],
)
async def test_it_is_ready_or_says_why_not(words: bytes, reason: str | None) -> None:
    async with saying(words) as url:
        assert await reason_not_ready(url, {"prefill": 1, "decode": 2, "pool": 0}) == reason


async def test_one_that_does_not_listen_starts() -> None:
    assert await reason_not_ready(f"http://127.0.0.1:{own_port()}", {"prefill": 1, "decode": 1}) == "the gateway starts"


async def test_who_signed_its_certificate_does_not_matter(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server, made.server_key)
    async with saying(READY, context) as url:
        assert await reason_not_ready(url, {"prefill": 1, "decode": 1}) is None
