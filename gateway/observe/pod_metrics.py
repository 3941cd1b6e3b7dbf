"""The metrics of a whole Baton as one pod, by which routers that stand before it choose among pods.

Endpoint pickers (of llm-d, of the Gateway API) read the first sample of a family, under vLLM's names, from the pod they route to.
So there is one sample of each, without a label for workers: `/metrics` has those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages import WorkerState
from common.words import WorkerStatus
from gateway.request.spec import Load


class PodMetrics(Collector):
    """The figures of one scrape."""

    def __init__(self, workers: Iterable[WorkerState], loads: Iterable[Load], *, now: float) -> None:
        """`now`: seconds since 1970."""
        self._workers = list(workers)
        self._ready = [state for state in self._workers if state.status == WorkerStatus.READY]
        self._waiting_here = sum(requests for load in loads for requests, _ in load.waiting.values())
        self._now = now

    def text(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        model = {"model_name": ",".join(sorted({state.model for state in self._workers}))}
        running = sum(state.running for state in self._workers)
        waiting = self._waiting_here + sum(state.waiting for state in self._workers)
        yield _sample("vllm:num_requests_running", "Sequences of all workers that hold blocks", running, model)
        yield _sample("vllm:num_requests_waiting", "Requests that wait here or at a worker", waiting, model)
        yield _sample(
            "vllm:kv_cache_usage_perc", "Used share of the fullest role's KV pools, 0 to 1", self._usage(), model
        )
        yield _sample("vllm:lora_requests_info", "Time of this answer", self._now, _NO_ADAPTERS)
        if prefilling := self._of_role("prefill") or self._ready:
            layouts = [state.region.layout for state in prefilling]
            blocks = sum(layout.num_blocks for layout in layouts)
            shape = {"block_size": str(layouts[0].block_size), "num_gpu_blocks": str(blocks)}
            yield _sample("vllm:cache_config_info", "1: prompts are cached in such blocks", 1.0, model | shape)

    def _of_role(self, role: str) -> list[WorkerState]:
        return [state for state in self._ready if role in state.roles]

    def _usage(self) -> float:
        """A pod with one full role is full; one without a ready worker, too."""
        roles = {role for state in self._ready for role in state.roles}
        return max((_used_share(self._of_role(role)) for role in roles), default=1.0)


_NO_ADAPTERS = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}


def _used_share(states: Sequence[WorkerState]) -> float:
    blocks = sum(state.region.layout.num_blocks for state in states)
    return 1.0 - sum(state.free_blocks for state in states) / max(1, blocks)


def _sample(name: str, text: str, value: float, labels: dict[str, str]) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=list(labels))
    gauge.add_metric(list(labels.values()), float(value))
    return gauge
