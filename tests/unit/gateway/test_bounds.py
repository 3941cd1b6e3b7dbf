"""What a client may send at most: heads, bodies, nesting, time. Each refusal says what was too much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import InvalidRequestError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.http import body, connection
from gateway.http.connection import MAX_HEAD_BYTES, BoundedProtocol
from gateway.templates import template
from gateway.templates.template import ChatTemplate
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

CHAT = "/v1/chat/completions"
LIMIT_S = 15.0


class Hurried(BoundedProtocol):
    head_timeout_s = 0.2
    unread_timeout_s = 0.2


class Small(BoundedProtocol):
    max_connections = 2


class Curt(Small):
    max_leaving = 0


@pytest.fixture(scope="module")
async def hurried(tokenizer: ChatTokenizer) -> AsyncIterator[Gateway]:
    """A gateway that waits for little."""
    settings = HttpSettings(body_timeout_s=0.2, max_body_bytes=2_000_000)
    async with run_gateway(tokenizer, settings, protocol=Hurried) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def _time_to_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a client reads its refusal later than a second after it was sent."""
    monkeypatch.setattr(connection, "LEAVE_TIMEOUT_S", LIMIT_S)


async def said_to(gateway: Gateway, *parts: bytes) -> tuple[int, str]:
    """Send the parts and return the status and message of the answer, after which the connection must be closed."""
    port = int(gateway.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(LIMIT_S):
            for part in parts:
                try:
                    writer.write(part)
                    await writer.drain()
                except ConnectionError:
                    break  # it said no before all was sent
            answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


async def test_a_client_that_never_completes_its_head_is_told_and_closed(hurried: Gateway) -> None:
    assert await said_to(hurried, b"GET /health HTTP/1.1\r\nhost: localhost\r\n") == (
        408, "no complete request within 0.2 s"
    )  # fmt: skip


async def test_connections_beyond_the_bound_are_told_until_one_is_closed(tokenizer: ChatTokenizer) -> None:
    async with run_gateway(tokenizer, HttpSettings(), protocol=Small) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        (_, first), (_, second) = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        refusal = await gateway.http.get("/health")
        assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")
        assert refusal.json()["error"]["code"] == "too_many_connections"
        first.close()
        async with asyncio.timeout(LIMIT_S):
            while (await gateway.http.get("/health")).status_code != 200:
                pass
        second.close()


async def test_a_crowd_beyond_the_bound_is_cut_off(tokenizer: ChatTokenizer) -> None:
    async with run_gateway(tokenizer, HttpSettings(), protocol=Curt) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        async with asyncio.timeout(LIMIT_S):
            assert await connections[-1][0].read() == b""
        for _, writer in connections:
            writer.close()


async def test_a_client_that_says_nothing_is_told_and_closed(hurried: Gateway) -> None:
    status, _ = await said_to(hurried)
    assert status == 408


async def test_a_client_that_does_not_read_its_answer_is_cut_off_and_its_work_cancelled(hurried: Gateway) -> None:
    hurried.script.script, hurried.script.max_model_len = lambda spec: [5] * 300_000, None
    asked = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(asked)}\r\n\r\n".encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(hurried.url.rpartition(":")[2]), limit=1)
    writer.write(head + asked)  # the stream's limit is 1: nothing is read from the socket after a few bytes
    await hurried.script.until(lambda: bool(hurried.script.cancelled))
    writer.close()
    assert len(hurried.script.cancelled) == 1


async def test_a_second_head_on_the_same_connection_is_timed_too(hurried: Gateway) -> None:
    port = int(hurried.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b'{"status":"ok"}')
    writer.write(b"GET /health HTTP/1.1\r\n")
    async with asyncio.timeout(LIMIT_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_body_that_never_ends_is_told_and_closed(hurried: Gateway) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n".encode()
    assert await said_to(hurried, head, b'{"model":') == (408, "the body was not complete after 0.2 s")


async def test_bodies_that_are_read_at_a_time_have_a_bound_together(
    hurried: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "MAX_LARGEST_BODIES", 2)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1900000\r\n\r\n".encode()
    heard = await asyncio.gather(*(said_to(hurried, head, b" " * 1_800_000) for _ in range(3)))
    assert sorted(status for status, _ in heard) == [408, 408, 429]
    assert (await hurried.http.post(CHAT, content=b" " * 1_900_000)).status_code == 400


async def test_headers_without_end_are_refused(gateway: Gateway) -> None:
    lines = (b"x-filler: " + b"a" * 988 + b"\r\n") * (MAX_HEAD_BYTES // 1_000 + 1)
    status, message = await said_to(gateway, b"GET /health HTTP/1.1\r\nhost: localhost\r\n", lines)
    assert status == 431
    assert str(MAX_HEAD_BYTES) in message


async def test_a_header_without_end_is_cut_off(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on sending may not hear why: what the server no longer reads resets the connection."""
    monkeypatch.setattr(connection, "LEAVE_TIMEOUT_S", 0.2)
    port = int(gateway.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nx-filler: ")

    async def send_for_ever() -> None:
        while True:
            writer.write(b"a" * 100_000)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_for_ever(), LIMIT_S)
    writer.close()


async def test_complete_headers_beyond_the_bound_are_refused(gateway: Gateway) -> None:
    answer = await gateway.http.get("/health", headers={"x-filler": "a" * (MAX_HEAD_BYTES + 1)})
    assert answer.status_code == 431


async def test_headers_within_the_bound_are_served(gateway: Gateway) -> None:
    answer = await gateway.http.get("/health", headers={"x-filler": "a" * (MAX_HEAD_BYTES - 1_000)})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("nested", ['{"a":' * 50_000, "[" * 50_000, '{"prompt":' + "[" * 50_000])
async def test_a_deeply_nested_body_is_refused(hurried: Gateway, path: str, nested: str) -> None:
    answer = await hurried.http.post(path, content=nested)
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x"}] * 4_097}, "messages"),
        ({"n": 17}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1_001}, "stop"),
        ({"logit_bias": {str(index): 1 for index in range(1_025)}}, "logit_bias"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
        ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"user": "x" * 1_025}, "user"),
        ({"chat_template_kwargs": {str(index): 1 for index in range(65)}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}}, "response_format"),
        ({"guided_choice": ["x"] * 4_097}, "guided_choice"),
        ({"seed": 10**400}, "seed"),
        ({"temperature": 10**400}, "temperature"),
    ],
)  # fmt: skip
async def test_a_field_beyond_its_bound_is_named(hurried: Gateway, fields: dict[str, Any], param: str) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]} | fields
    answer = await hurried.http.post(CHAT, content=json.dumps(asked))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_template_that_writes_too_much_is_stopped_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_RENDERED_CHARS", 10_000)
    endless = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}", {})
    with pytest.raises(InvalidRequestError, match="the prompt is too long: more than 10000 characters"):
        endless.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ 'x' * 999999999999 }}",
        "{{ [1] * 99999999 }}",
        "{{ 99999999 * 'x' }}",
        "{{ 9 ** 99999999 }}",
        "{{ range(999999999) | list }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
