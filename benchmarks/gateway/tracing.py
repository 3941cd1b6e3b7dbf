"""The cost of traces: each process's CPU time for requests with and without a trace, and that of spans alone.

    python -m benchmarks.gateway.tracing [--requests 120] [--rounds 6] [--json FILE]       two cores, about 90 seconds

One Baton with the fake device (`baton up`, 1 prefill and 1 decode worker) serves both in turn: the client's `traceparent` says
whether a request is traced. Both arms have the same processes, and a slow phase of the machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean, stdev
from threading import Thread

import httpx
import psutil
import torch
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import SpanLimits

from benchmarks.environment import describe
from benchmarks.gateway.serving import SERVICES, cpu_s, fake_baton
from common.tracing import NoTracer, Span, child_of
from gateway.dialects import DIALECTS
from gateway.dialects.table import DialectTable
from gateway.http.exchange import fields_of, request_scope
from gateway.http.fields import parse_body
from gateway.observe.spans import RequestSpans, ServerSpans
from gateway.request.attempt import AttemptLine
from gateway.request.timeline import Timeline
from telemetry.spans import Readable
from telemetry.tracer import BATCH_SPANS, OtelTracer, resource_of

PATH = "/v1/completions"
PROMPT, ANSWER, CONCURRENCY = 256, 64, 8
STEP_MS = 5.0


def main(arguments: Sequence[str]) -> int:
    """Print the figures; with --json write them as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=120, help="of each arm and round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = describe("benchmarks.gateway.tracing", arguments, torch.device("cpu"))
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    with _sink() as url:
        spans = _span_costs(url)
        print(f"a span: {spans['record_us']:.2f} us to make and queue, {spans['send_us']:.1f} us to encode and send")
        gateway = _gateway_costs()
        print(
            f"a request's {gateway['spans']:g} spans of the gateway: {gateway['make_us']:.1f} us to make, "
            f"{gateway['encode_us']:.1f} us to encode"
        )
        requests = asyncio.run(_requests(url, options.requests, options.rounds))
    for service, figures in requests.items():
        print(
            f"{service}: {figures['untraced_ms']:.3f} ms of CPU a request, traced {figures['traced_ms']:.3f}: "
            f"{figures['added_ms']:+.3f} ± {figures['error_ms']:.3f} ms"
        )
    share = (gateway["make_us"] + gateway["encode_us"]) / 10 / requests["gateway"]["untraced_ms"]
    print(f"gateway: its spans are {share:.2f} % of its CPU time for a request")
    # Compared with the device's time for a request of this length, were it alone in the batch.
    device_ms = STEP_MS * ANSWER
    for service in ("prefill", "decode"):
        print(f"{service}: {100 * requests[service]['added_ms'] / device_ms:.2f} % of {ANSWER} steps of {STEP_MS:g} ms")
    if options.json:
        options.json.write_text(
            json.dumps({"facts": facts, "span": spans, "gateway": gateway, "requests": requests}, indent=1) + "\n"
        )
    return 0


def _span_costs(url: str, count: int = 4000) -> dict[str, float]:
    """Microseconds a span: on the caller's thread, and of the whole process until all are sent."""
    tracer = OtelTracer(url, service="benchmark", instance="one")
    parent = tracer.new_trace()
    began, began_cpu = time.thread_time(), time.process_time()
    for number in range(count):
        tracer.record(
            Span(
                name="prefill",
                context=child_of(parent),
                parent=parent,
                began_at=1.0,
                ended_at=2.0,
                attributes={
                    "baton.request_id": "cmpl-0",
                    "baton.attempt": 1,
                    "baton.worker": "p",
                    "baton.tokens": number,
                },
            )
        )
    recorded = time.thread_time() - began
    tracer.flush()
    tracer.close()
    return {
        "record_us": 1e6 * recorded / count,
        "send_us": 1e6 * (time.process_time() - began_cpu - recorded) / count,
    }


def _gateway_costs(count: int = 2000) -> dict[str, float]:
    """Microseconds of the gateway for all spans of one request: to make them, and to encode them. Without the machine's noise."""
    spans: list[Span] = []

    class Keeps(NoTracer):
        def wants(self, context: str) -> bool:
            return True

        def record(self, span: Span) -> None:
            spans.append(span)

    def serve() -> None:
        tracer = ServerSpans(Keeps())
        for _ in range(count):
            scope = {"type": "http", "path": PATH, "method": "POST", "headers": []}
            state, way = request_scope(scope), dialects.way(scope)
            assert way is not None
            with tracer.around(state, fields_of(scope), way):
                state.trace.attributes |= endpoint.describe(body)
                state.status = 200
                recorder.record(_timeline(state.trace.context))

    dialects = DialectTable(DIALECTS)
    endpoint = dialects.entries[PATH].endpoint
    asked = {"model": "demo", "prompt": "a", "max_tokens": ANSWER, "stream": True}
    body = parse_body(json.dumps(asked).encode(), endpoint.body)
    recorder = RequestSpans(Keeps(), "gateway")
    began = time.process_time()
    serve()
    made, each = time.process_time() - began, len(spans) / count
    readable = Readable(resource_of("gateway", "one"), SpanLimits())
    began = time.process_time()
    for at in range(0, len(spans), BATCH_SPANS):
        encode_spans([readable(span, 0) for span in spans[at : at + BATCH_SPANS]]).SerializeToString()
    encoded = time.process_time() - began
    return {"spans": each, "make_us": 1e6 * made / count, "encode_us": 1e6 * encoded / count}


def _timeline(context: str) -> Timeline:
    """A request as the owner keeps it, ended."""
    line = Timeline(
        request_id=f"cmpl-{context[3:35]}-0",
        received_at=1.0,
        submitted_at=1.1,
        prompt_tokens=PROMPT,
        traceparent=context,
    )
    costs = dict.fromkeys(("predicted_ms", "prefill_queue_ms", "prefill_compute_ms", "decode_ms", "candidates"), 1.5)
    attempt = AttemptLine(
        number=1, began_at=1.1, because="", prefill="prefill-0", decode=["decode-0"], reason="least loaded", costs=costs,
        traceparent=child_of(context), published_at=1.2, claimed_at=1.3, claimed_by="prefill-0", first_token_at=1.4,
    )  # fmt: skip
    line.began(attempt)
    line.first_token_at, line.completion_tokens = 1.4, ANSWER
    line.ended("length", "", 2.0)
    return line


async def _requests(url: str, requests: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU a request, by service."""
    spent: dict[str, dict[str, list[float]]] = {name: {"untraced": [], "traced": []} for name in SERVICES}
    flags = ("--otlp-endpoint", url, "--local-prefill-tokens", "0")
    with fake_baton(*flags, step_ms=STEP_MS) as (port, _, processes):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await _load(client, requests, traced=True)  # everything is warm afterwards
            for round_ in range(rounds):
                for arm in ("untraced", "traced") if round_ % 2 else ("traced", "untraced"):
                    await asyncio.sleep(2.5)  # what the last arm queued is sent
                    before = _cpu(processes)
                    await _load(client, requests, traced=arm == "traced")
                    await asyncio.sleep(2.5)
                    after = _cpu(processes)
                    for name in SERVICES:
                        spent[name][arm].append(1000 * (after[name] - before[name]) / requests)
    return {name: _compared(arms["untraced"], arms["traced"]) for name, arms in spent.items()}


def _compared(untraced: list[float], traced: list[float]) -> dict[str, float]:
    added = [b - a for a, b in zip(untraced, traced, strict=True)]
    return {
        "untraced_ms": mean(untraced),
        "traced_ms": mean(traced),
        "added_ms": mean(added),
        "error_ms": stdev(added) / len(added) ** 0.5 if len(added) > 1 else 0.0,
    }


def traceparent_of(sampled: bool) -> str:
    """A client's header, of a trace of its own."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{int(sampled):02x}"


async def _load(client: httpx.AsyncClient, count: int, *, traced: bool) -> None:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int) -> None:
        body = {
            "model": "demo", "prompt": [number % 200 + 1] * PROMPT, "max_tokens": ANSWER, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        async with slots:
            headers = {"traceparent": traceparent_of(traced)}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            answer.raise_for_status()

    await asyncio.gather(*(one(number) for number in range(count)))


def _cpu(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: cpu_s(process.pid) for name, process in processes.items()}


@contextmanager
def _sink() -> Iterator[str]:
    """A collector that takes everything and keeps nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
