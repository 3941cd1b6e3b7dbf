"""A Baton as one pod: what an endpoint picker reads of it, the first sample of each family."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from common.messages import KVLayout, Region, WorkerState
from common.words import WorkerStatus
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.observe.pod_metrics import PodMetrics
from gateway.request.spec import Load
from gateway.tenants.tenants import Tenants
from tests.unit.gateway.conftest import run_gateway

LAYOUT = KVLayout(num_blocks=100, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")


def worker(name: str, *roles: str, free: int, **changes: Any) -> WorkerState:
    state = WorkerState(
        worker=name, incarnation=1, roles=list(roles), status=WorkerStatus.READY, model="llama", model_fingerprint="m",
        tokenizer_fingerprint="t", vocab_size=10, max_model_len=100, free_blocks=free,
        region=Region(transport="shm", incarnation=1, layout=LAYOUT, address={}),
    )  # fmt: skip
    return msgspec.structs.replace(state, **changes)


def read(text: bytes) -> dict[str, Sample]:
    """As a picker does: of each family the first sample."""
    return {family.name: family.samples[0] for family in text_string_to_metric_families(text.decode())}


def test_a_picker_reads_sums_of_all_workers_and_the_fullest_role() -> None:
    workers = [
        worker("p", "prefill", free=90, running=2, waiting=3),
        worker("d0", "decode", free=30, running=5),
        worker("d1", "decode", free=10, running=4, waiting=1),
    ]
    loads = [Load(in_flight=20, waiting={"normal": (6, 100), "low": (1, 10)})]
    text = PodMetrics(workers, loads, now=1234.0).text()
    found = read(text)
    assert found["vllm:num_requests_running"].value == 11
    assert found["vllm:num_requests_waiting"].value == 11
    assert found["vllm:kv_cache_usage_perc"].value == pytest.approx(0.8)
    config = found["vllm:cache_config_info"]
    assert (config.value, config.labels["block_size"], config.labels["num_gpu_blocks"]) == (1.0, "16", "100")
    adapters = found["vllm:lora_requests_info"]
    assert adapters.value == 1234.0
    assert adapters.labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert all(len(family.samples) == 1 for family in text_string_to_metric_families(text.decode()))


def test_a_pod_without_a_ready_worker_is_full() -> None:
    stopped = worker("w", "decode", "prefill", free=100, status=WorkerStatus.DRAINING)
    for workers in ([], [stopped]):
        found = read(PodMetrics(workers, [], now=1.0).text())
        assert found["vllm:kv_cache_usage_perc"].value == 1.0
        assert "vllm:cache_config_info" not in found


async def test_pickers_need_no_key(tokenizer: ChatTokenizer) -> None:
    settings = HttpSettings(tenants=Tenants(api_keys=("secret-1",), admin_key="a" * 20))
    async with run_gateway(tokenizer, settings, key="secret-1") as gateway:
        assert (await gateway.http.get("/metrics")).status_code == 401
        answer = await gateway.http.get("/metrics/pod")
    assert answer.headers["content-type"].startswith("text/plain")
    assert read(answer.content)["vllm:num_requests_running"].value == 0
