"""The connection on which functions of Redis are called, against a server that says what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions
from hypothesis import given
from hypothesis import strategies as st

from common.store import RedisSettings, connect_store
from common.store import link as link_module
from common.store.link import Link, decoded, encoded
from tests.certificates import make_certificates

PATIENCE_S = 60.0
Serve = Callable[["Client"], Awaitable[None]]


class Client:
    """One connection, as the server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def asked(self) -> list[bytes]:
        """The next command."""
        count = int((await self.reader.readline())[1:])
        words = []
        for _ in range(count):
            size = int((await self.reader.readline())[1:])
            words.append((await self.reader.readexactly(size + 2))[:-2])
        return words

    def say(self, answer: bytes) -> None:
        self.writer.write(answer)


class Server:
    def __init__(self) -> None:
        self.connections = 0
        self.port = 0


@contextlib.asynccontextmanager
async def serving(*serves: Serve, timeout_s: float = PATIENCE_S) -> AsyncIterator[tuple[Link, Server]]:
    """Each connection is served by the next of `serves`, later ones by the last."""
    told = Server()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serve = serves[min(told.connections, len(serves) - 1)]
        told.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            await serve(Client(reader, writer))
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    told.port = server.sockets[0].getsockname()[1]
    url = f"redis://127.0.0.1:{told.port}"
    pool = redis.asyncio.ConnectionPool.from_url(url, protocol=2, driver_info=None)
    link = Link(redis.asyncio.Redis.from_pool(pool), pool.make_connection, timeout_s=timeout_s)
    try:
        yield link, told
    finally:
        await link.close()
        server.close()
        gc.collect()  # what warns of a connection that nobody closed


async def echo(client: Client) -> None:
    while True:
        words = await client.asked()
        client.say(b"$%d\r\n%b\r\n" % (len(words[1]), words[1]))


async def test_calls_of_one_turn_are_one_write_and_answers_come_back_to_their_callers() -> None:
    read: list[bytes] = []

    async def serve(client: Client) -> None:
        await client.asked()
        client.say(b":0\r\n")
        read.append(await client.reader.read(1 << 16))
        client.say(b":1\r\n:2\r\n-ERR three\r\n*2\r\n$-1\r\n$2\r\n\xff\n\r\n")
        await client.reader.read()

    async with serving(serve) as (link, _):
        assert await link.fcall("f", (), timeout_s=PATIENCE_S) == 0
        calls = (link.fcall(name, (b"\xff", "\u00e9", 1.5), timeout_s=PATIENCE_S) for name in ("a", "b", "c", "d"))
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[:2] + answers[3:] == [1, 2, [None, b"\xff\n"]]
    assert isinstance(answers[2], redis.exceptions.ResponseError)
    assert str(answers[2]) == "three"
    assert read[0].count(b"FCALL") == 4
    assert read[0].startswith(
        b"*6\r\n$5\r\nFCALL\r\n$1\r\na\r\n$1\r\n0\r\n$1\r\n\xff\r\n$2\r\n\xc3\xa9\r\n$3\r\n1.5\r\n"
    )


async def test_an_answer_that_comes_too_late_goes_to_nobody_else() -> None:
    late = asyncio.Event()

    async def serve(client: Client) -> None:
        await client.asked()
        await late.wait()
        client.say(b":1\r\n")
        await client.asked()
        client.say(b":2\r\n")
        await client.asked()
        client.say(b":3\r\n")
        await client.reader.read()

    async with serving(serve) as (link, server):
        with pytest.raises(TimeoutError):
            await link.fcall("f", (), timeout_s=0.5)
        left = asyncio.create_task(link.fcall("g", (), timeout_s=PATIENCE_S))
        await asyncio.sleep(0)
        left.cancel()
        late.set()
        assert await link.fcall("h", (), timeout_s=PATIENCE_S) == 3
        assert server.connections == 1


async def test_who_owes_an_answer_too_long_is_asked_again_on_another_connection() -> None:
    async def silent(client: Client) -> None:
        await client.reader.read()

    async with serving(silent, echo, timeout_s=1.0) as (link, server):
        with pytest.raises(TimeoutError):
            await link.fcall("f", (), timeout_s=0.5)
        assert await link.fcall("f", (), timeout_s=PATIENCE_S) == b"f"
        assert server.connections == 2


MAD = [b"", b"-READONLY no\r\n", b"?\r\n", b":x\r\n", b":0\r\n:0\r\n", b"*9\r\n" * 5]


@pytest.mark.quick(first=3)
@pytest.mark.parametrize("answer", MAD)
async def test_a_call_on_a_lost_or_mad_connection_is_made_again_on_another(answer: bytes) -> None:
    async def ends(client: Client) -> None:
        await client.asked()
        client.say(b"$1\r\nf\r\n")
        await client.asked()
        client.say(answer)
        await client.writer.drain()
        if answer:
            await client.reader.read()

    async with serving(ends, echo) as (link, server):
        assert await link.fcall("f", (), timeout_s=PATIENCE_S) == b"f"
        with contextlib.suppress(redis.exceptions.ResponseError):  # that it only reads is the answer
            assert await link.fcall("f", (), timeout_s=PATIENCE_S) in (b"f", 0)
        assert await link.fcall("f", (), timeout_s=PATIENCE_S) == b"f"
        assert server.connections == 2


async def test_a_connection_that_is_lost_before_its_first_call_is_said_at_once() -> None:
    async def serve(client: Client) -> None:
        await client.reader.read()

    async def lose(link: Link) -> None:
        while link._stream is None:
            await asyncio.sleep(0)
        link._stream.connection_lost(None)

    async with serving(serve) as (link, _):
        losing = asyncio.create_task(lose(link))
        with pytest.raises(redis.exceptions.ConnectionError, match="at once"):
            await link.fcall("f", (), timeout_s=PATIENCE_S)
        await losing


async def test_login_number_and_tls_are_said_before_the_first_call(tmp_path: Path) -> None:
    files, heard = make_certificates(tmp_path), list[list[bytes]]()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server, files.server_key)
    (tmp_path / "login").write_text("me:secret\n")

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(reader, writer)
        with contextlib.suppress(ValueError, ConnectionError):
            while True:
                heard.append(await client.asked())
                client.say(b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0, ssl=context) as server:
        url = f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}/3"
        settings = RedisSettings(url=url, credentials=tmp_path / "login", tls=files.of_client, timeout_s=PATIENCE_S)
        async with connect_store(settings) as store:
            for _ in range(2):
                assert await store.call("f", timeout_s=PATIENCE_S) == b"OK"
    call = [b"FCALL", b"f", b"0"]
    assert heard == [[b"AUTH", b"me", b"secret"], [b"SELECT", b"3"], call, call]


async def test_a_server_that_is_not_there_is_said_at_once_and_one_that_comes_is_found() -> None:
    async with serving(echo) as (_, server):
        port = server.port
    pool = redis.asyncio.ConnectionPool.from_url(f"redis://127.0.0.1:{port}", protocol=2, driver_info=None)
    link = Link(redis.asyncio.Redis.from_pool(pool), pool.make_connection, timeout_s=PATIENCE_S)
    results = await asyncio.gather(
        *(link.fcall("f", (), timeout_s=PATIENCE_S) for _ in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [redis.exceptions.ConnectionError] * 3
    await link.close()


async def test_neither_what_is_asked_nor_what_is_answered_grows_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_UNANSWERED_BYTES", 1000)
    monkeypatch.setattr(link_module, "MAX_ANSWER_BYTES", 1000)

    async def endless(client: Client) -> None:
        await client.asked()
        client.say(b"$100000\r\n" + b"x" * 90_000)
        await client.reader.read()

    async with serving(endless, echo) as (link, server):
        with pytest.raises(redis.exceptions.ConnectionError, match="too long"):
            await link.fcall("f", (), timeout_s=PATIENCE_S)
        assert await link.fcall("f", (), timeout_s=PATIENCE_S) == b"f"
        calls = [link.fcall("f", (b"x" * 100,), timeout_s=PATIENCE_S) for _ in range(20)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {bytes, TimeoutError}
        assert await link.fcall("f", (), timeout_s=PATIENCE_S) == b"f"
        assert server.connections == 2


ANSWERS = st.recursive(
    st.none() | st.integers(-(10**12), 10**12) | st.binary(max_size=30),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def written(answer: object) -> bytes:
    match answer:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % answer
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(answer), answer)
        case list():
            return b"*%d\r\n" % len(answer) + b"".join(map(written, answer))
    raise AssertionError


def depth(answer: object) -> int:
    return 1 + max(map(depth, answer), default=0) if isinstance(answer, list) else 0


@given(st.lists(ANSWERS.filter(lambda one: depth(one) <= link_module.MAX_DEPTH), max_size=5))
def test_answers_are_read_as_they_were_written(answers: list[object]) -> None:
    said, at, read = b"".join(map(written, answers)), 0, []
    while at < len(said):
        answer, at = decoded(said, at)
        read.append(answer)
    assert read == answers
    assert at == len(said)


@given(st.binary(max_size=60))
def test_what_is_no_answer_is_a_value_error_or_not_all_there(said: bytes) -> None:
    with contextlib.suppress(ValueError, link_module.PartError):
        _, at = decoded(said, 0)
        assert 0 < at <= len(said)


def test_a_command_s_words_are_bytes() -> None:
    assert encoded(("a", 1, 2.5, b"\x00")) == b"*4\r\n$1\r\na\r\n$1\r\n1\r\n$3\r\n2.5\r\n$1\r\n\x00\r\n"
    alike = [b"\r\n", b"bc", b"de"]
    assert encoded(("a", alike, 1)) == encoded(("a", *alike, 1))
    assert encoded(("a", [])) == encoded(("a",))
    with pytest.raises(ValueError, match="one length"):
        encoded(("a", [b"a", b"bcd"]))
