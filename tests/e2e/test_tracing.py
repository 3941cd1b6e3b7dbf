"""One trace of a request across all processes, as a collector gets it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import nats
import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from tests.e2e.cluster import ROOT, Cluster
from tests.e2e.otlp_sink import SunkSpan, otlp_sink
from tests.integration.waiting import eventually

FAKE = {"fake": True, "kv_memory_mb": 8, "fake_step_ms": 5}
SLOW_ONES = ("--trace-rest-share", "0", "--ttft-slo-ms", "10000", "--tpot-slo-ms", "10000")
CLIENT = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
MOVED = 'baton_worker_transfer_bytes_total{model_name="tiny",worker="prefill-0"}'
PROMETHEUS = ROOT / "deploy" / "prometheus"
QUERIES = sorted([*PROMETHEUS.glob("*.yml"), *(ROOT / "deploy/grafana/dashboards").glob("*.json")])
VLLM = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "request_max_num_generation_tokens_bucket",
    "iteration_tokens_total_bucket",
    "cache_config_info",
]
# The parent of each span of an undisturbed request with a handoff.
PARENTS = {
    "admission": "server", "attempt": "server",
    "placement": "attempt", "queue": "attempt",
    "wait": "attempt", "prefill": "attempt", "reserve": "attempt", "transfer": "attempt", "verify": "transfer",
    "decode": "attempt",
}  # fmt: skip


def named(spans: list[SunkSpan]) -> dict[str, list[SunkSpan]]:
    """By name; the server span is "server"."""
    found: dict[str, list[SunkSpan]] = {}
    for span in sorted(spans, key=lambda span: span.began):
        found.setdefault("server" if span.name.startswith("POST") else span.name, []).append(span)
    return found


def traced(cluster_folder: Path, model: Path, url: str, **options: object) -> Cluster:
    return Cluster(
        cluster_folder,
        model=model,
        gateway_options=("--otlp-endpoint", url),
        otlp_endpoint=url,
        **(FAKE | options),  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class TracedRun:
    """What a client, a collector and a scrape got from one Baton."""

    first: dict[str, Any]
    """The answer to the request that brought a trace of the client's."""
    again: dict[str, Any]
    """The answer to the same request without a trace."""
    spans: list[SunkSpan]
    """All spans of the first request."""
    later: list[SunkSpan]
    """The spans of all requests."""
    metrics: str

    @property
    def one(self) -> dict[str, SunkSpan]:
        """The first request's spans by name."""
        return {name: found[0] for name, found in named(self.spans).items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """The same request three times: with a trace, with one that is not sampled, without."""
    folder = tmp_path_factory.mktemp("traced")
    body = {"model": "tiny", "prompt": [5] * 300, "max_tokens": 12, "ignore_eos": True, "seed": 7}
    header = f"00-{CLIENT[0]}-{CLIENT[1]}-01"
    async with otlp_sink() as sink:
        async with (
            traced(folder, model, sink.url, max_batch_tokens=128) as cluster,
            httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
        ):
            first = (await client.post("/v1/completions", json=body, headers={"traceparent": header})).json()
            spans = await sink.until(lambda spans: len(spans) >= len(PARENTS) + 1)
            unsampled = {"traceparent": header[:-1] + "0"}
            assert (await client.post("/v1/completions", json=body, headers=unsampled)).is_success
            again = (await client.post("/v1/completions", json=body)).json()
            await sink.until(lambda spans: len(spans) >= 2 * (len(PARENTS) + 1))
            metrics = await eventually(partial(moved, client))
        later = list(sink.spans)  # every process has ended and sent what it had
    return TracedRun(first, again, spans, later, metrics)


async def moved(client: httpx.AsyncClient) -> str:
    """The scrape, once a heartbeat told what was moved."""
    scrape = (await client.get("/metrics")).text
    return scrape if value_of(scrape, MOVED) else ""


def value_of(scrape: str, sample: str) -> float:
    found = [line for line in scrape.splitlines() if line.startswith(sample)]
    return float(found[0].split()[-1]) if found else 0.0


def test_one_trace_goes_from_the_http_request_to_the_last_token(run: TracedRun) -> None:
    assert {span.trace for span in run.spans} == {CLIENT[0]}
    one = run.one
    assert set(one) == {*PARENTS, "server"}
    assert one["server"].parent == CLIENT[1]
    assert {name: one[name].parent for name in PARENTS} == {name: one[PARENTS[name]].id for name in PARENTS}


def test_each_span_comes_from_the_process_that_did_the_work(run: TracedRun) -> None:
    services = {name: (span.service, span.instance.partition("-")[0]) for name, span in run.one.items()}
    assert {services[name] for name in ("server", "admission", "attempt", "placement", "queue")} == {
        ("baton-gateway", "gateway")
    }
    assert {services[name] for name in ("wait", "prefill", "reserve", "transfer")} == {("baton-prefill", "prefill")}
    assert {services[name] for name in ("verify", "decode")} == {("baton-decode", "decode")}


def test_an_undisturbed_request_has_one_attempt_and_no_error(run: TracedRun) -> None:
    for span in run.spans:
        assert span.began <= span.ended
        assert not span.error
        assert span.attributes.get("baton.attempt", 1) == 1


def test_the_server_span_tells_what_was_asked_and_answered(run: TracedRun) -> None:
    request = run.one["server"].attributes
    assert request["gen_ai.operation.name"] == "text_completion"
    assert request["gen_ai.request.model"] == "tiny"
    assert (request["gen_ai.request.max_tokens"], request["gen_ai.request.seed"]) == (12, 7)
    assert request["gen_ai.response.id"] == run.first["id"]
    assert request["gen_ai.response.finish_reasons"] == ["length"]
    assert (request["gen_ai.usage.input_tokens"], request["gen_ai.usage.output_tokens"]) == (300, 12)
    assert request["http.response.status_code"] == 200


def test_the_server_span_tells_how_long_it_waited_and_who_worked(run: TracedRun) -> None:
    server = run.one["server"]
    assert 0 < server.attributes["gen_ai.server.time_to_first_token"] < server.ended - server.began
    assert 0 < server.attributes["baton.queue_ms"] < 1000 * server.attributes["gen_ai.server.time_to_first_token"]
    assert server.attributes["baton.prefill.workers"] == ["prefill-0"]
    assert server.attributes["baton.decode.workers"] == ["decode-0"]


def test_the_placement_span_tells_why_these_workers(run: TracedRun) -> None:
    placement = dict(run.one["placement"].events)["placement"]
    assert placement["baton.placement.reason"]
    assert placement["baton.placement.decode"] == ["decode-0"]
    assert placement["baton.placement.candidates"] >= 1
    assert placement["baton.placement.predicted_ms"] == -1  # nobody has measured anything yet


def test_the_prefill_span_has_an_event_for_each_chunk(run: TracedRun) -> None:
    prefill = run.one["prefill"]
    assert prefill.attributes["baton.prefill.chunks"] == 3  # at most 128 tokens each
    assert [event["baton.tokens"] for _, event in prefill.events] == [128, 128, 44]
    assert prefill.attributes["baton.cached_tokens"] == 0


def test_the_transfer_span_counts_the_blocks_that_moved(run: TracedRun) -> None:
    transfer = run.one["transfer"].attributes
    assert transfer["baton.transfer.blocks"] == 19
    assert transfer["baton.transfer.link"] == "shm"
    assert transfer["baton.transfer.bytes"] > 0
    assert sum(event["baton.transfer.blocks"] for _, event in run.one["transfer"].events) == 19


def test_the_attempt_span_counts_all_tokens_and_the_decode_span_its_own(run: TracedRun) -> None:
    one = run.one
    assert one["decode"].attributes["baton.tokens"] == 11  # the first one is the prefill worker's
    assert (one["attempt"].attributes["baton.tokens"], one["attempt"].attributes["baton.outcome"]) == (12, "ok")


def test_a_request_without_a_trace_gets_its_own_and_an_unsampled_one_sends_no_spans(run: TracedRun) -> None:
    unasked = named([span for span in run.later if span.trace != CLIENT[0]])
    assert len(run.later) == 2 * (len(PARENTS) + 1)  # none of the unsampled request
    assert unasked["server"][0].parent == ""
    assert unasked["server"][0].attributes["gen_ai.response.id"] == run.again["id"]
    assert unasked["prefill"][0].attributes["baton.cached_tokens"] == 288


@pytest.mark.parametrize("file", QUERIES, ids=lambda file: file.name)
def test_every_series_that_rules_alerts_and_dashboards_query_exists(run: TracedRun, file: Path) -> None:
    """In this scrape, or as the record of a rule."""
    exposed = families(run.metrics)
    recorded = set(re.findall(r"record: (\S+)", (PROMETHEUS / "rules.yml").read_text()))
    asked = set(re.findall(r"\b(?:vllm:|baton:|baton_)[a-zA-Z0-9_:]+", file.read_text()))
    assert asked <= exposed | recorded, f"{file}: {asked - exposed - recorded}"


def test_there_are_queries_to_compare() -> None:
    assert {file.suffix for file in QUERIES} == {".yml", ".json"}


def test_the_scrape_has_vllm_s_names(run: TracedRun) -> None:
    assert {f"vllm:{name}" for name in VLLM} <= families(run.metrics)
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= families(run.metrics)


@pytest.mark.parametrize("sample", [MOVED, "baton_slo_requests_total{"])
def test_what_was_moved_and_judged_is_counted(run: TracedRun, sample: str) -> None:
    assert value_of(run.metrics, sample) > 0


def families(metrics: str) -> set[str]:
    """The names of a scrape's series."""
    names: set[str] = set()
    for _, _, name, kind in (line.split(" ") for line in metrics.splitlines() if line.startswith("# TYPE")):
        names |= {f"{name}{suffix}" for suffix in ("", "_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return names


class Wire:
    """Everything that was said on the bus about requests, as (kind, request, `traceparent` or "")."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, str]] = []
        self.tokens: list[tuple[str, str, str]] = []  # worker instead of kind
        self._news = asyncio.Event()

    async def hear(self, raw: Msg) -> None:
        message = msgspec.msgpack.decode(raw.data)
        kind = message.get("type", "")
        about = message.get("job") or message
        if about.get("request_id"):
            self.said.append((kind, about["request_id"], about.get("traceparent", "")))
        for one in message.get("tokens", []) if kind == "frame" else []:
            self.tokens.append((message["worker"], one["request_id"], one.get("traceparent", "")))
        self._news.set()

    def kinds(self, request: str) -> set[str]:
        return {kind for kind, about, _ in self.said if about == request}

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until what was heard is so."""
        try:
            async with asyncio.timeout(60):
                while not holds():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"said so far: {self.said}") from None


async def test_every_message_about_a_request_carries_its_trace_and_so_do_log_lines(model: Path, tmp_path: Path) -> None:
    slow = {"fake_token_us": 10_000, "max_batch_tokens": 16, "log_format": "json"}
    body = {"model": "tiny", "max_tokens": 4, "ignore_eos": True}
    left_trace = "1" * 32
    async with otlp_sink() as sink, traced(tmp_path, model, sink.url, **slow) as cluster:
        wire, bystander = Wire(), await nats.connect(cluster.nats.url)
        await bystander.subscribe("baton.>", cb=wire.hear)
        await bystander.flush()
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            header = {"traceparent": f"00-{CLIENT[0]}-{CLIENT[1]}-01"}
            answer = await client.post("/v1/completions", json=body | {"prompt": [5] * 20}, headers=header)
            served = f"{answer.json()['id']}-0"
            all_of_it = {"job", "claim", "reserve", "handoff", "imported", "settle", "received"}
            await wire.until(lambda: all_of_it <= wire.kinds(served))
            await wire.until(lambda: len(wire.tokens) >= 4)

            header = {"traceparent": f"00-{left_trace}-{CLIENT[1]}-01"}
            asking = client.post("/v1/completions", json=body | {"prompt": [6] * 400}, headers=header)
            leaving = asyncio.create_task(asking)
            await wire.until(lambda: {about for kind, about, _ in wire.said if kind == "reserve"} > {served})
            leaving.cancel()  # 4 s before its first token
            (left,) = {about for _, about, _ in wire.said} - {served}
            await wire.until(lambda: {"job", "claim", "reserve", "cancel", "writer_done"} <= wire.kinds(left))
        await bystander.close()
    lines = [json.loads(line) for line in (tmp_path / "prefill-0.log").read_text().splitlines() if line[0] == "{"]
    logged = {line["event"]: line["trace_id"] for line in lines if line.get("request_id") == left}

    (hung_up,) = [line for line in (tmp_path / "gateway.log").read_text().splitlines() if "http.client_left" in line]
    assert hung_up.endswith(f" trace_id={left_trace}")

    traces = {served: CLIENT[0], left: left_trace}
    assert [(kind, about) for kind, about, context in wire.said if context[3:35] != traces[about]] == []
    assert {context for kind, _, context in wire.said if kind in ("handoff", "imported")}.isdisjoint(
        {context for kind, _, context in wire.said if kind == "job"}
    )  # these are of the transfer
    frames = {worker: [context for by, _, context in wire.tokens if by == worker] for worker, _, _ in wire.tokens}
    assert {worker: contexts[0][3:35] for worker, contexts in frames.items()} == {
        "prefill-0": CLIENT[0], "decode-0": CLIENT[0],
    }  # fmt: skip
    assert frames["decode-0"][-1] == ""  # 69 bytes a token are too many
    assert logged["prefill.gave_up"] == left_trace


async def test_a_moved_request_is_one_trace_with_two_linked_attempts(model: Path, tmp_path: Path) -> None:
    async with otlp_sink() as sink, traced(tmp_path, model, sink.url, decode=2, fake_step_ms=10) as cluster:
        body = {"model": "tiny", "prompt": [9] * 50, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            seen, killed = 0, ""
            async for line in response.aiter_lines():
                seen += line.startswith("data: {") and "error" not in json.loads(line.removeprefix("data: "))
                if seen == 20 and not killed:
                    told = await client.get("/debug/requests")
                    killed = told.json()["running"][0]["decode_worker"]
                    cluster.kill(killed)
        spans = await sink.until(lambda spans: "server" in named(spans) and len(named(spans).get("attempt", [])) == 2)
        other = ({"decode-0", "decode-1"} - {killed}).pop()
        spans = await sink.until(lambda spans: other in {s.instance for s in named(spans).get("decode", [])})
        (trace,) = {span.trace for span in spans}
        (retry,) = [line for line in (tmp_path / "gateway.log").read_text().splitlines() if "request.retry" in line]
        assert retry.endswith(f" trace_id={trace}")
        first, second = named(spans)["attempt"]
        assert (first.attributes["baton.decode.worker"], second.attributes["baton.decode.worker"]) == (killed, other)
        assert first.error == first.attributes["baton.outcome"] == second.attributes["baton.retry.reason"] != ""
        assert second.links == [first.id]
        assert not second.error
        assert first.attributes["baton.tokens"] + second.attributes["baton.tokens"] == 400
        parents = {span.parent: span.instance for span in named(spans)["decode"]}
        assert parents[second.id] == other
        assert first.id not in parents  # killed: what it would have said is not made up by anybody else


async def test_tail_sampling_sends_all_of_a_slow_request_s_trace_and_nothing_of_a_quick_one_s(
    model: Path, tmp_path: Path
) -> None:
    async with otlp_sink() as sink:
        slow = Cluster(
            tmp_path,
            model=model,
            gateway_options=("--otlp-endpoint", sink.url, *SLOW_ONES),
            otlp_endpoint=sink.url,
            trace_rest_share=0,
            fake_token_us=15_000,  # 12 s for 800 tokens
            **FAKE,  # type: ignore[arg-type]
        )
        async with slow as cluster, httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            body = {"model": "tiny", "max_tokens": 4, "ignore_eos": True}
            for prompt in ([5] * 4, [6] * 800, [7] * 4):
                assert (await client.post("/v1/completions", json=body | {"prompt": prompt})).is_success
            spans = await sink.until(lambda spans: len(spans) >= len(PARENTS) + 1)
    assert len({span.trace for span in spans}) == 1
    by_name = named(spans)
    assert set(by_name) == {*PARENTS, "server"}  # of all processes, also those that ended long before it was known
    assert by_name["admission"][0].attributes["baton.slo.missed"] == "ttft"
    assert by_name["prefill"][0].attributes["baton.prompt_tokens"] == 800
    assert len(sink.spans) == len(PARENTS) + 1
