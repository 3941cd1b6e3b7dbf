"""`baton bench`: what is sent, what is counted, what a broken server leads to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.bench.client import Connection, Sample, Target, percentile
from cli.bench.load import arrivals, bodies, read_prompts
from cli.bench.report import histogram, render, time_line
from cli.bench.results import summarize
from cli.bench.run import Run
from cli.bench.settings import BenchSettings
from common.settings import ConfigError


def test_the_same_seed_sends_the_same_load() -> None:
    settings = BenchSettings(input_len=20, output_len=10, range_ratio=0.5, prefix_len=7)
    assert bodies(settings, "m", 5, 1) == bodies(settings, "m", 5, 1) != bodies(settings, "m", 5, 2)
    load = [json.loads(body) for body in bodies(settings, "m", 50, 1)]
    assert len({tuple(body["prompt"][:7]) for body in load}) == 1
    assert {len(body["prompt"]) for body in load} <= set(range(17, 38))
    assert len({len(body["prompt"]) for body in load}) > 1
    assert all(5 <= body["max_tokens"] <= 15 for body in load)


def test_arrivals() -> None:
    assert arrivals(BenchSettings(request_rate=4, burstiness="inf", num_prompts=3), 0) == [0.0, 0.25, 0.5]
    assert arrivals(BenchSettings(num_prompts=3), 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_keep_the_rate_that_is_named(seed: int) -> None:
    at = arrivals(BenchSettings(request_rate=10, num_prompts=400), seed)
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert at[0] == 0
    assert sum(gaps) == pytest.approx(40, rel=0.02)  # less the gap behind the last one
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.2)  # as in a Poisson process
    assert arrivals(BenchSettings(request_rate=10, num_prompts=1), seed) == [0.0]


def test_burstiness_spreads_the_gaps_and_keeps_the_rate() -> None:
    def gaps(shape: float) -> list[float]:
        at = arrivals(BenchSettings(request_rate=10, num_prompts=400, burstiness=shape), 1)
        return [later - earlier for earlier, later in itertools.pairwise(at)]

    for shape in (0.2, 25.0):
        assert statistics.mean(gaps(shape)) == pytest.approx(0.1, rel=0.05)
        assert statistics.stdev(gaps(shape)) == pytest.approx(0.1 / shape**0.5, rel=0.2)


def test_more_fields_of_each_request() -> None:
    body = json.loads(bodies(BenchSettings(extra_body='{"top_k": 5, "temperature": 1}'), "m", 1, 1)[0])
    assert (body["top_k"], body["temperature"]) == (5, 1)
    for wrong in ("{", "[1]"):
        with pytest.raises(ConfigError, match="extra-body"):
            bodies(BenchSettings(extra_body=wrong), "m", 1, 1)


def test_prompts_from_files(tmp_path: Path) -> None:
    lines, shared, bad = tmp_path / "a.jsonl", tmp_path / "b.json", tmp_path / "c.jsonl"
    lines.write_text('{"prompt": "one", "output_len": 3}\n{"other": 1}\n{"prompt": "two"}\n')
    shared.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}]}, {"conversations": []}]))
    bad.write_text('{"other": 1}\n')
    assert read_prompts(lines, 9) == [("one", 3), ("two", 9)]
    assert read_prompts(shared, 9) == [("hello", 9)]
    for path in (bad, tmp_path / "none"):
        with pytest.raises(ConfigError, match="dataset-path"):
            read_prompts(path, 9)


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([7.0], 0.99) == 7.0


def test_goodput_counts_what_meets_every_objective() -> None:
    fast = Sample(arrived=0.0, ttft=0.1, gaps=[0.1] * 9, tokens=10, prompt_tokens=5, ended=1.0)
    late = Sample(arrived=0.0, ttft=0.6, gaps=[0.1] * 9, tokens=10, prompt_tokens=5, ended=1.5)
    slow = Sample(arrived=0.0, ttft=0.1, gaps=[0.2] * 9, tokens=10, prompt_tokens=5, ended=1.9)
    lost = Sample(arrived=0.0, error="HTTP 503")
    run = Run(started=0.0, ended=2.0, samples=[fast, late, slow, lost])
    settings = BenchSettings(ttft_slo_ms=500, tpot_slo_ms=150)
    found = summarize(run, settings)
    assert (found["completed"], found["failed"], found["errors"]) == (3, 1, {"HTTP 503": 1})
    assert found["goodput_requests_per_s"] == 0.5
    assert found["slo_attainment"] == 0.25
    assert found["output_tokens_per_s"] == 15
    assert found["ttft_ms"]["p50"] == pytest.approx(100)
    said = render(found, run, settings)
    assert "1 x HTTP 503" in said
    assert "25.0% within the objectives (TTFT ≤ 500 ms, TPOT ≤ 150 ms)" in said


def test_without_an_objective_nothing_is_within_it() -> None:
    run = Run(started=0.0, ended=2.0, samples=[Sample(arrived=0.0, ttft=0.1, tokens=10, ended=1.0)])
    found = summarize(run, BenchSettings())
    assert (found["goodput_requests_per_s"], found["slo_attainment"]) == (None, None)
    said = render(found, run, BenchSettings())
    assert "no objective was given" in said
    assert "%  within" not in said
    assert "100.0% within" not in said


def test_percentiles_are_always_the_same() -> None:
    run = Run(started=0.0, ended=2.0, samples=[Sample(arrived=0.0, ttft=0.1, tokens=10, ended=1.0)])
    said = render(summarize(run, BenchSettings()), run, BenchSettings()).splitlines()
    head = next(line for line in said if line.startswith("  ms"))
    assert head.split() == ["ms", "mean", "min", "p50", "p90", "p95", "p99", "max"]
    assert [line.split()[0] for line in said[said.index(head) + 1 :][:2]] == ["TTFT", "TPOT"]


def test_a_run_without_answers_has_a_report() -> None:
    run = Run(started=0.0, ended=1.0, samples=[Sample(arrived=0.0, error="HTTP 500")])
    assert "0 requests" in render(summarize(run, BenchSettings()), run, BenchSettings())


def test_plots() -> None:
    bars = histogram([1.0, 1.0, 1.0, 13.0], bins=4)
    assert [bar.count("█") for bar in bars] == [40, 0, 0, 13]
    assert [bar.split()[-1] for bar in bars] == ["75.0%", "75.0%", "75.0%", "100.0%"]
    assert len(histogram([2.0, 2.0])) == 1
    samples = [Sample(arrived=0.0, ttft=0.5, ended=1.0), Sample(arrived=5.0, ttft=1.0, ended=10.0)]
    _, ended, slowest = time_line(samples, 0.0)
    assert ended.count("█") == 2
    assert (slowest.count("█"), slowest.count("▄")) == (1, 1)


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://a:1", "a", 1, "/v1/completions"),
        ("https://a/v1", "a", 443, "/v1/completions"),
        ("http://a/x/", "a", 80, "/x/v1/completions"),
    ],
)
def test_targets(url: str, host: str, port: int, path: str) -> None:
    target = Target.of(url, "/v1/completions")
    assert (target.host, target.port, target.path) == (host, port, path)


@pytest.mark.parametrize("url", ["a:1", "ftp://a", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        Target.of(url, "/v1/completions")


@contextlib.asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[Target]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
        writer.write(answer)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield Target("127.0.0.1", listening.sockets[0].getsockname()[1])


def stream(*chunks: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def refusal(body: bytes) -> bytes:
    return b"HTTP/1.1 400 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def asked(answer: bytes) -> Sample:
    sample = Sample(arrived=0.0)
    async with server(answer) as target:
        connection = await Connection.open(target)
        try:
            await connection.complete(b"{}", sample)
        finally:
            connection.close()
    return sample


async def test_an_event_may_be_split_over_chunks() -> None:
    event = b'data: {"choices": [{"text": "a"}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 3}}\n\n'
    sample = await asked(stream(event + event[:9], event[9:], usage, b"data: [DONE]\n\n"))
    assert (len(sample.gaps), sample.tokens, sample.prompt_tokens) == (1, 2, 3)


async def test_a_chat_s_opening_chunk_is_no_token() -> None:
    opening = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    token = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    assert (await asked(stream(opening, token, b"data: [DONE]\n\n"))).gaps == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", "HTTP 503$"),
        (refusal(b'{"error": {"message": "too long"}}'), "HTTP 400: too long"),
        (refusal(b'{"error": "no such model"}'), "HTTP 400: no such model"),
        (refusal(b'{"detail": "Not \\u001b[2J Found"}'), r"HTTP 400: Not \\x1b\[2J Found"),
        (refusal(b"<h1>Bad\nGateway</h1>"), "HTTP 400: <h1>Bad Gateway</h1>"),
        (b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n", "HTTP 400: no$"),
        (b"", "without an answer"),
        (stream(b'data: {"choices": [{"text": "a"}]}\n\n'), "ended early"),
        (stream(b'data: {"error": {"message": "no memory"}}\n\n'), "no memory"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "not streamed"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(answer: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await asked(answer)
