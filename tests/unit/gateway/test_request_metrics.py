"""What `/metrics` says of requests that ended and of the workers."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from common.messages import (
    Ages,
    EvictedBlocks,
    Goal,
    HostTierTotals,
    KVLayout,
    PullTotals,
    Region,
    Tokens,
    WorkerState,
    WorkerTotals,
)
from common.words import WorkerStatus
from gateway.observe.fleet_metrics import FleetMetrics
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.request_metrics import RequestMetrics
from gateway.request.attempt import AttemptLine
from gateway.request.spec import Load
from gateway.request.timeline import Timeline
from worker.context import Totals

GOAL = Goal(ttft_ms=1000.0, tpot_ms=50.0)
LAYOUT = KVLayout(num_blocks=100, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
STATE = WorkerState(
    worker="d0", incarnation=1, roles=["decode"], status=WorkerStatus.READY, model="m", model_fingerprint="f",
    tokenizer_fingerprint="t", vocab_size=10, max_model_len=100,
    region=Region(transport="shm", incarnation=1, layout=LAYOUT, address={}),
    free_blocks=25, held_blocks=5, decode_step_ms=4.0, steps=50,
    totals=WorkerTotals(prompt_tokens=1000, cached_tokens=300, generated_tokens=90, pushed_bytes=4096, preemptions=2),
)  # fmt: skip


def ended(*, status: str = "length", ttft_s: float = 0.5, tokens: int = 11, decode_s: float = 0.2) -> Timeline:
    line = Timeline(request_id="r-0", received_at=10.0, submitted_at=10.1, prompt_tokens=40, goal=GOAL)
    line.began(AttemptLine(number=1, began_at=10.1, because="", prefill="p", decode=["d"], reason="load"))
    if status != "error":
        first = Tokens(request_id="r-0", attempt=1, position=0, token_ids=b"", prefill_ms=100.0)
        line.took(first, tokens, status, 10.0 + ttft_s)
    line.ended(status, "", 10.0 + ttft_s + decode_s)
    return line


@pytest.mark.parametrize(
    ("line", "missed"),
    [
        (ended(), ""),
        (ended(ttft_s=1.1), "ttft"),
        (ended(decode_s=0.6), "tpot"),
        (ended(tokens=1, decode_s=9.0), ""),  # no token after the first
        (ended(ttft_s=5.0, decode_s=5.0), "ttft"),
        (ended(status="error"), "error"),
    ],
)
def test_which_target_was_missed(line: Timeline, missed: str) -> None:
    assert line.missed == missed


def test_phases_of_a_request_add_up_and_cancelled_ones_are_neither_good_nor_bad() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(["m"], registry)
    for line in (ended(), ended(ttft_s=2.0), ended(status="cancelled"), ended(status="error")):
        metrics.observe(line)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m"} | labels)

    assert value("vllm:request_queue_time_seconds_sum") == pytest.approx(0.3 + 1.8)  # of the two that ended well
    assert value("vllm:request_prefill_time_seconds_sum") == pytest.approx(0.2)
    assert value("vllm:request_decode_time_seconds_sum") == pytest.approx(0.4)
    assert value("vllm:request_inference_time_seconds_sum") == pytest.approx(0.6)
    assert value("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.04)
    assert value("vllm:request_generation_tokens_sum") == 22
    assert [value("baton_slo_requests_total", missed=missed) for missed in ("none", "ttft", "error")] == [1, 1, 1]
    assert value("baton_slo_good_tokens_total") == 11
    assert value("baton_requests_total", status="cancelled") == 1
    assert value("baton_request_attempts_count") == 4


def test_waits_are_counted_by_reason_and_only_known_ones() -> None:
    registry = CollectorRegistry()
    metrics, line = RequestMetrics(["m"], registry), ended()
    line.waited_ms = 500.0
    attempt = line.attempts[0]
    attempt.published_at, attempt.claimed_at, attempt.first_token_at = 10.2, 10.3, None
    told = {"room": 30.0, "prompts": 20.0, "made up": 9.0}
    line.took(Tokens(request_id="r-0", attempt=1, position=0, token_ids=b"", waits=told), 1, "", 10.5)
    metrics.observe(line)

    def value(reason: str) -> float | None:
        return registry.get_sample_value("baton_prompt_wait_seconds_total", {"model_name": "m", "reason": reason})

    found = {reason: value(reason) for reason in ("place", "claim", "room", "load", "prompts", "made up")}
    assert found == {
        "place": 0.5, "claim": pytest.approx(0.1), "room": 0.03, "load": 0.0, "prompts": 0.02, "made up": None,
    }  # fmt: skip
    assert attempt.as_json(10.0)["waits_ms"] == {"room": 30.0, "prompts": 20.0}


def test_hits_are_told_apart_by_who_knew_of_them() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(["m"], registry)
    for promised, cached in ((32, 32), (0, 16), (32, 48), (64, 16), (16, None)):
        line = ended()
        line.attempts[0].promised_tokens, line.attempts[0].cached_tokens = promised, cached
        metrics.observe(line)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m"} | labels)

    assert value("baton_prefix_hit_tokens_total", tier="device", placed_by="index") == 32 + 0 + 32 + 16
    assert value("baton_prefix_hit_tokens_total", tier="device", placed_by="worker") == 0 + 16 + 16 + 0
    assert value("baton_prefix_lost_tokens_total") == 64 - 16


def test_the_fleet_is_shown_as_it_is_heard_now() -> None:
    registry, fleet = CollectorRegistry(), [STATE, msgspec.structs.replace(STATE, worker="p0", roles=["prefill"])]
    FleetMetrics(lambda: fleet).register(registry)

    def value(name: str, worker: str = "d0", **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "worker": worker} | labels)

    assert value("baton_worker_kv_free_blocks") == 25
    assert value("baton_worker_decode_step_seconds") == pytest.approx(0.004)
    assert value("baton_worker_transfer_bytes_total") == 4096
    assert (value("baton_worker_role", role="decode"), value("baton_worker_role", role="prefill")) == (1, None)
    assert value("baton_worker_cache_hit_tokens_total", tier="device") == 300
    assert value("baton_worker_cache_hit_tokens_total", tier="host") == 0
    engine = {"model_name": "m", "engine": "d0"}
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", engine) == pytest.approx(0.75)
    assert registry.get_sample_value("vllm:prefix_cache_hits_total", engine) == 300
    assert registry.get_sample_value("vllm:num_preemptions_total", engine) == 2
    passes = [registry.get_sample_value(f"vllm:iteration_tokens_total_{part}", engine) for part in ("sum", "count")]
    assert passes == [1000 - 300 + 90, 50]
    pool = engine | {"block_size": "16", "num_gpu_blocks": "100", "cache_dtype": "float32"}
    assert registry.get_sample_value("vllm:cache_config_info", pool) == 1
    fleet.pop(0)  # lost
    assert (value("baton_worker_kv_free_blocks"), value("baton_worker_kv_free_blocks", "p0")) == (None, 25)


def test_hits_of_a_tier_are_no_hits_of_those_above() -> None:
    host, disk = HostTierTotals(hit_tokens=96, stored_blocks=7), HostTierTotals(hit_tokens=32, failed_copies=2)
    totals = msgspec.structs.replace(STATE.totals, host=host, disk=disk)
    registry = CollectorRegistry()
    FleetMetrics(lambda: [msgspec.structs.replace(STATE, totals=totals)]).register(registry)
    labels = {"model_name": "m", "worker": "d0"}
    hits = [
        registry.get_sample_value("baton_worker_cache_hit_tokens_total", labels | {"tier": tier})
        for tier in ("device", "host", "disk")
    ]
    assert hits == [204, 64, 32]
    assert registry.get_sample_value("baton_worker_disk_tier_failed_copies_total", labels) == 2
    assert registry.get_sample_value("baton_worker_host_tier_stored_blocks_total", labels) == 7


def test_pulls_are_counted_by_their_outcome_and_as_hits_of_peers() -> None:
    pulls = PullTotals(pulls=2, tokens=48, bytes=4096, missed=3, bad_digests=1)
    totals = msgspec.structs.replace(STATE.totals, pulls=pulls, kept_bytes=512)
    registry = CollectorRegistry()
    FleetMetrics(lambda: [msgspec.structs.replace(STATE, totals=totals)]).register(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"baton_worker_{name}_total", {"model_name": "m", "worker": "d0"} | labels)

    outcomes = ("pulled", "missed", "failed", "bad_digest")
    assert [value("pulls", outcome=outcome) for outcome in outcomes] == [2, 3, 0, 1]
    assert [value("cache_hit_tokens", tier=tier) for tier in ("device", "peer")] == [252, 48]
    assert (value("pulled_tokens"), value("pulled_bytes"), value("transfer_kept_bytes")) == (48, 4096, 512)


def test_ages_of_blocks_are_histograms() -> None:
    told = Ages(counts=[3, 0, 2], sum_s=21.5)
    totals = msgspec.structs.replace(STATE.totals, idle=told)
    registry = CollectorRegistry()
    FleetMetrics(lambda: [msgspec.structs.replace(STATE, totals=totals)]).register(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"baton_worker_block_{name}", {"model_name": "m", "worker": "d0"} | labels)

    found = [value("idle_seconds_bucket", le=bound) for bound in ("1.0", "4.0", "16.0", "+Inf")]
    assert found == [3, 3, 5, 5]
    assert (value("idle_seconds_sum"), value("lifetime_seconds_count")) == (21.5, 0)


def test_evictions_are_shown_by_reason() -> None:
    totals = msgspec.structs.replace(STATE.totals, evicted=EvictedBlocks(unused=5, kept=2))
    state = msgspec.msgpack.decode(
        msgspec.msgpack.encode(msgspec.structs.replace(STATE, totals=totals)), type=WorkerState
    )
    registry = CollectorRegistry()
    FleetMetrics(lambda: [state]).register(registry)
    shown = {
        reason: registry.get_sample_value(
            "baton_worker_evicted_blocks_total", {"model_name": "m", "worker": "d0", "reason": reason}
        )
        for reason in ("spent", "unused", "found", "kept", "tenant")
    }
    assert shown == {"spent": 0, "unused": 5, "found": 0, "kept": 2, "tenant": 0}


def test_drafts_are_shown_under_our_names_and_under_those_of_vllm() -> None:
    totals = Totals()
    for drafted, accepted in ((8, 3), (8, 0), (32, 20), (2, 2)):
        totals.verified(drafted=drafted, accepted=accepted)
    counts = {"preemptions": 0, "bad_digests": 0, "expired_jobs": 0, "lost_frames": 0, "malformed": 0}
    message = totals.as_message(**counts, dead_letters=0, forged=0, pass_s=0.0)
    state = msgspec.msgpack.decode(
        msgspec.msgpack.encode(msgspec.structs.replace(STATE, totals=message, drafter="mtp")), type=WorkerState
    )
    registry = CollectorRegistry()
    FleetMetrics(lambda: [state]).register(registry)
    ours, theirs = {"model_name": "m", "worker": "d0"}, {"model_name": "m", "engine": "d0"}
    for name, count in (("drafts", 4), ("draft_tokens", 50), ("accepted_tokens", 25)):
        assert registry.get_sample_value(f"vllm:spec_decode_num_{name}_total", theirs) == count
        our_name = name.replace("draft_tokens", "drafted_tokens")
        assert registry.get_sample_value(f"baton_worker_{our_name}_total", ours) == count
    assert registry.get_sample_value("baton_worker_drafter", ours | {"drafter": "mtp"}) == 1
    at = [
        registry.get_sample_value("vllm:spec_decode_num_accepted_tokens_per_pos_total", theirs | {"position": str(one)})
        for one in range(17)
    ]
    assert at == [3, 3, 2, *[1] * 13, None]
    first = registry.get_sample_value("baton_worker_accepted_tokens_per_position_total", ours | {"position": "0"})
    assert first == 3


def test_a_heartbeat_of_an_older_worker_has_totals_of_nothing() -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(STATE))
    del raw["totals"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=WorkerState).totals == WorkerTotals()


def test_who_waits_is_not_running() -> None:
    metrics = GatewayMetrics(["m"])
    text = metrics.render(
        {"m": Load(in_flight=7, waiting={"low": (0, 0), "normal": (2, 300), "high": (1, 5)})}
    ).decode()
    assert 'vllm:num_requests_running{model_name="m"} 4.0' in text
    assert 'vllm:num_requests_waiting{model_name="m"} 3.0' in text
    assert 'baton_waiting_prompt_tokens{model_name="m",tier="normal"} 300.0' in text


def test_each_model_is_counted_under_its_own_name_and_unknown_ones_under_the_first() -> None:
    metrics = GatewayMetrics(["m", "n"])
    requests = RequestMetrics(["m", "n"], metrics.registry)
    for model in ("n", "n", "whatever a client writes"):
        line = ended()
        line.model = model
        requests.observe(line)
        metrics.failed("overloaded", model=model)
    loads = {"m": Load(counters={"placed:load": 1}), "n": Load(in_flight=3, counters={"placed:load": 4, "retries": 2})}
    for _ in range(2):  # counters are told as sums since the start
        text = metrics.render(loads).decode()
    for name, m, n in (
        ("baton_requests_total", 1, 2),
        ("baton_request_errors_total", 1, 2),
        ("baton_placements_total", 1, 4),
        ("vllm:num_requests_running", 0, 3),
    ):
        labels = {"baton_requests_total": {"status": "length"}, "baton_request_errors_total": {"code": "overloaded"}}
        labels |= {"baton_placements_total": {"reason": "load"}}
        values = [
            metrics.registry.get_sample_value(name, {"model_name": model} | labels.get(name, {}))
            for model in ("m", "n")
        ]
        assert values == [m, n], name
    assert 'baton_gateway_events_total{event="retries",model_name="n"} 2.0' in text
    assert "whatever" not in text
