"""What clients do differently: packed bodies, marks before them, slashes behind paths, formats of metrics."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

from gateway.http.body import ENCODINGS, ZSTD_MODULES
from tests.needs import missing
from tests.unit.gateway.conftest import MODEL, Gateway
from tests.unit.gateway.wire import get, wire

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 4}).encode()
GZIP = {"content-encoding": "gzip"}


async def post(gateway: Gateway, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    return await gateway.http.post(COMPLETIONS, content=content, headers=headers)


async def test_a_gzip_body_is_read(gateway: Gateway) -> None:
    for headers in (GZIP, {"content-encoding": "GZip"}):
        assert (await post(gateway, gzip.compress(BODY), headers)).status_code == 200
    assert (await post(gateway, BODY, {"content-encoding": "identity"})).status_code == 200


# Made by the test: each worker of pytest loads this module, and the bomb is of 300 MB.
@pytest.mark.parametrize(
    ("make", "status", "words"),
    [
        (lambda: BODY, 400, "gzip"),
        (lambda: gzip.compress(BODY)[:-9], 400, "not complete"),
        (lambda: gzip.compress(BODY) * 2, 400, "follows"),
        (lambda: gzip.compress(BODY) + b"x", 400, "follows"),
        (lambda: zlib.compress(BODY), 400, "gzip"),
        (lambda: b"", 400, "not complete"),
        (lambda: gzip.compress(b"[" * 200_001), 413, "200000"),
        (lambda: gzip.compress(b"\0" * 300_000_000, 1)[:150_000], 413, "200000"),
    ],
    ids=["plain", "cut", "twice", "more", "zlib", "empty", "large", "bomb"],
)  # fmt: skip
async def test_a_wrong_gzip_body_is_refused_within_the_bound(
    gateway: Gateway, make: Callable[[], bytes], status: int, words: str
) -> None:
    answer = await post(gateway, make(), GZIP)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.fixture
def zstd() -> Any:
    """The library, where it is installed."""
    if "zstd" not in ENCODINGS:
        missing("backports.zstd is not installed: `make test` installs it")
    return next(import_module(name) for name in ZSTD_MODULES if find_spec(name.partition(".")[0]) is not None)


async def test_a_zstd_body_is_read_within_the_bound(gateway: Gateway, zstd: Any) -> None:
    packed = zstd.compress(BODY)
    far = {zstd.CompressionParameter.window_log: 24, zstd.CompressionParameter.enable_long_distance_matching: 1}
    cases = [
        (packed, 200, ""),
        (BODY, 400, "zstd"),
        (packed[:-3], 400, "not complete"),
        (packed + b"x", 400, "follows"),
        (zstd.compress(b"[" * 200_001), 413, "200000"),
        (zstd.compress(bytes(300_000_000), 1)[:150_000], 413, "200000"),
        (zstd.compress(bytes(1 << 25), options=far), 400, "zstd"),
    ]
    for body, status, words in cases:
        answer = await post(gateway, body, {"content-encoding": "zstd"})
        assert (answer.status_code, words in answer.text) == (status, True), answer.text


async def test_zstd_without_its_library_has_a_remedy(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ENCODINGS, "zstd", raising=False)
    answer = await post(gateway, BODY, {"content-encoding": "zstd"})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip")
    assert "backports.zstd" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "deflate", "x" * 99])
async def test_another_encoding_is_named(gateway: Gateway, encoding: str) -> None:
    answer = await post(gateway, BODY, {"content-encoding": encoding})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, ", ".join(ENCODINGS))
    assert encoding[:50] in answer.json()["error"]["message"]


async def test_a_byte_order_mark_is_passed_over(gateway: Gateway) -> None:
    assert (await post(gateway, b"\xef\xbb\xbf" + BODY)).status_code == 200
    assert (await post(gateway, b"\xef\xbb\xbf\xef\xbb\xbf" + BODY)).status_code == 400


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models//", f"/v1/models/{MODEL}/", "/health/", "/metrics/"])
async def test_a_path_may_end_with_a_slash(gateway: Gateway, path: str) -> None:
    answer = await gateway.http.get(path)
    assert answer.status_code == 200
    if "models" in path:
        assert answer.json() == (await gateway.http.get(path.rstrip("/"))).json()


async def test_an_answer_to_a_path_with_a_slash_is_no_redirect(gateway: Gateway) -> None:
    answer = await gateway.http.post(COMPLETIONS + "/", content=BODY)
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)


async def test_an_unknown_path_is_told_what_is_served(gateway: Gateway) -> None:
    for path in ("/v1/moderations", "/v0/chat", "/" + "x" * 9_000):
        answer = await gateway.http.post(path, json={})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 404
        assert path[:200] in message
        assert "/v1/chat/completions, /v1/completions" in message
        assert "/openapi.json" in message
        assert len(message) < 500


async def test_a_path_that_begins_with_two_slashes_is_no_host(gateway: Gateway) -> None:
    async with wire(gateway) as client:
        await client.say(get("//v1/health") + get("http://any.example/health?x=1", headers="connection: close\r\n"))
        first, second = await client.rest()
    assert (first.status, second.status) == (404, 200)
    assert "//v1/health" in first.error


async def test_metrics_come_in_the_format_that_is_asked_for(gateway: Gateway) -> None:
    scrape = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    answered = await gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello"})
    assert answered.status_code == 200  # a request's metrics are there from the first one on
    opened = await gateway.http.get("/metrics", headers={"accept": scrape})
    assert opened.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert opened.text.endswith("# EOF\n")
    plain = await gateway.http.get("/metrics", headers={"accept": "text/plain"})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = [
        {sample.name for family in read(answer.text) for sample in family.samples}
        for read, answer in ((open_families, opened), (families, plain))
    ]
    assert names[0] == names[1]
    assert "vllm:time_to_first_token_seconds_bucket" in names[0]
    assert [name for name in names[0] if name.endswith("_created")] == []


@pytest.mark.parametrize(
    ("offer", "packed"),
    [("gzip", True), ("br, GZIP;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.0", False), ("identity", False)],
)
async def test_metrics_are_packed_for_who_reads_that(gateway: Gateway, offer: str, packed: bool) -> None:
    answer = await gateway.http.get("/metrics", headers={"accept-encoding": offer})
    assert (answer.headers.get("content-encoding") == "gzip") is packed
    assert "vllm:num_requests_running" in answer.text
