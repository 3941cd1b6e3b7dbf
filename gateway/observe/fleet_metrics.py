"""Metrics of the workers, from their heartbeats: workers need no port or key for scraping.

Every gateway shows all workers, so sums need `max by (worker)` first (deploy/prometheus/rules.yml).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages import (
    AGE_BOUNDS_S,
    DRAFT_POSITIONS,
    Ages,
    EvictedBlocks,
    HostTierTotals,
    WorkerState,
    WorkerTotals,
)
from common.words import HostStatus, WorkerStatus
from gateway.placement.agreement import kv_name
from gateway.request.placement import Difference
from gateway.request.spec import Loads

LABELS = ["model_name", "worker"]
DEVICE_TIER = "device"
# Tiers of cached blocks, and the prompt tokens that came from each. Each is found in the next one up then.
TIERS: dict[str, Callable[[WorkerTotals], int]] = {
    DEVICE_TIER: lambda totals: max(0, totals.cached_tokens - totals.host.hit_tokens - totals.pulls.tokens),
    "peer": lambda totals: totals.pulls.tokens,
    "host": lambda totals: max(0, totals.host.hit_tokens - totals.disk.hit_tokens),
    "disk": lambda totals: totals.disk.hit_tokens,
}
GAUGES: dict[str, tuple[str, Callable[[WorkerState], float]]] = {
    "baton_worker_running_sequences": ("Sequences that hold blocks", lambda state: state.running),
    "baton_worker_waiting_sequences": ("Sequences claimed or imported, not in the batch", lambda state: state.waiting),
    "baton_worker_queued_prompt_tokens": ("Prompt tokens claimed, not yet computed", lambda state: state.queued_tokens),
    "baton_worker_kv_blocks": ("Blocks of the pool", lambda state: state.region.layout.num_blocks),
    "baton_worker_kv_free_blocks": ("Blocks free, or cached and evictable", lambda state: state.free_blocks),
    "baton_worker_kv_held_blocks": (
        "Blocks under a lease, a handoff's hold or in quarantine",
        lambda state: state.held_blocks,
    ),
    "baton_worker_prefill_tokens_per_second": ("Measured rate of prompts", lambda state: state.prefill_tokens_per_s),
    # A pass is predicted as fixed + tokens / bare rate, plus attention.
    "baton_worker_prefill_fixed_seconds": ("Fitted, of a pass of prompts", lambda state: state.prefill_fixed_ms / 1000),
    "baton_worker_prefill_bare_tokens_per_second": (
        "Fitted, of tokens with nothing before them",
        lambda state: state.prefill_bare_tokens_per_s,
    ),
    "baton_worker_prefill_double_tokens": (
        "Fitted: behind so many a token takes twice the time",
        lambda state: state.prefill_double_tokens,
    ),
    "baton_worker_local_tokens_per_second": (
        "Prompt tokens beside the batch within the step target",
        lambda state: state.local_tokens_per_s,
    ),
    "baton_worker_decode_step_seconds": ("Measured step of the batch", lambda state: state.decode_step_ms / 1000),
    "baton_worker_link_bytes_per_second": ("Slowest measured link", lambda state: state.link_bytes_per_s),
    "baton_worker_busy": ("1: a pass runs or work waits", lambda state: state.busy),
    "baton_worker_ready": ("1: takes work", lambda state: state.status == WorkerStatus.READY),
}
COUNTERS: dict[str, tuple[str, Callable[[WorkerState], float]]] = {
    "baton_worker_steps": ("Forward passes", lambda state: state.steps),
    "baton_worker_pass_seconds": ("Time in which a pass ran", lambda state: state.totals.pass_s),
    "baton_worker_prompt_tokens": ("Prompt tokens that looked for a prefix", lambda state: state.totals.prompt_tokens),
    "baton_worker_cached_tokens": ("Prompt tokens found in the cache", lambda state: state.totals.cached_tokens),
    "baton_worker_stateless_tokens": (
        "Prompt tokens whose KV was cached, but no recurrent state to go on from",
        lambda state: state.totals.stateless_tokens,
    ),
    "baton_worker_generated_tokens": ("Generated tokens", lambda state: state.totals.generated_tokens),
    "baton_worker_drafts": ("Verified drafts", lambda state: state.totals.drafts),
    "baton_worker_drafted_tokens": ("Verified tokens of drafts", lambda state: state.totals.drafted_tokens),
    "baton_worker_accepted_tokens": ("Those of them that were accepted", lambda state: state.totals.accepted_tokens),
    "baton_worker_transfer_blocks": ("Blocks pushed", lambda state: state.totals.pushed_blocks),
    "baton_worker_transfer_bytes": ("Bytes pushed", lambda state: state.totals.pushed_bytes),
    "baton_worker_transfer_seconds": ("Time of all pushes", lambda state: state.totals.push_s),
    "baton_worker_transfer_kept_bytes": (
        "Bytes of handoffs that were not sent: the decode worker had them",
        lambda state: state.totals.kept_bytes,
    ),
    "baton_worker_pulled_tokens": (
        "Prompt tokens found because a peer pushed their blocks",
        lambda state: state.totals.pulls.tokens,
    ),
    "baton_worker_pulled_bytes": ("Bytes that peers pushed for prompts", lambda state: state.totals.pulls.bytes),
    "baton_worker_preemptions": (
        "Sequences that had to give their blocks back",
        lambda state: state.totals.preemptions,
    ),
    "baton_worker_failed_steps": ("Forward passes without results", lambda state: state.totals.failed_steps),
    "baton_worker_dropped_inputs": (
        "Texts that no pass computed, as nobody waited for them",
        lambda state: state.totals.dropped_inputs,
    ),
    "baton_worker_out_of_memory": ("Those of them for lack of memory", lambda state: state.totals.out_of_memory),
    "baton_worker_refused_handoffs": (
        "Handoffs refused: stale, expired, incomplete or wrong",
        lambda state: state.totals.refused_handoffs,
    ),
    "baton_worker_bad_digests": ("Handoffs with a wrong byte, refused", lambda state: state.totals.bad_digests),
    "baton_worker_expired_jobs": ("Jobs claimed too late to begin", lambda state: state.totals.expired_jobs),
    "baton_worker_lost_frames": ("Token frames that the bus did not take", lambda state: state.totals.lost_frames),
    "baton_worker_malformed_messages": ("Messages that no decoder accepts", lambda state: state.totals.malformed),
    "baton_worker_forged_messages": ("Messages in another's name, dropped", lambda state: state.totals.forged),
    "baton_worker_dead_letters": ("Messages given up", lambda state: state.totals.dead_letters),
}


# Gauges and counters that each tier below the pool has.
TIER_GAUGES = {
    "bytes": ("Room for evicted blocks", "capacity_bytes"),
    "used_bytes": ("Of it with blocks", "used_bytes"),
}
TIER_COUNTERS = {
    "stored_blocks": "Blocks that came from the tier above",
    "loaded_blocks": "Blocks copied back",
    "evicted_blocks": "Blocks of tokens that gave way to others",
    "surplus_blocks": "Part of these that were beyond their tenant's share",
    "lost_blocks": "Blocks of tokens evicted from the tier above before they were copied",
    "bad_digests": "Blocks that came back with a wrong byte, or files that are torn: computed again",
    "failed_copies": "Copies that took too long, or ended by an error",
}
LOWER_TIERS: dict[str, Callable[[WorkerTotals], HostTierTotals]] = {
    "host": lambda totals: totals.host,
    "disk": lambda totals: totals.disk,
}


# Outcomes of pulls, by the name that counts them.
PULLS = {"pulled": "pulls", "missed": "missed", "failed": "failed", "bad_digest": "bad_digests"}
AGES: dict[str, tuple[str, Callable[[WorkerTotals], Ages]]] = {
    "baton_worker_block_lifetime_seconds": (
        "From a block's first release to its eviction",
        lambda totals: totals.lifetime,
    ),
    "baton_worker_block_idle_seconds": (
        "From a block's last release to its eviction",
        lambda totals: totals.idle,
    ),
    "baton_worker_block_reuse_gap_seconds": (
        "From a block's release to its next use",
        lambda totals: totals.reuse,
    ),
}


class HostedMetrics(Collector):
    """The models that hosts load when they are wanted."""

    def __init__(self, models: Iterable[str], loads: Loads) -> None:
        """`models` may grow."""
        self._models = models
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        text = "1 for the present status of a model that hosts load when it is wanted"
        family = GaugeMetricFamily("baton_hosted_models", text, labels=["model_name", "status"])
        for model in self._models:
            found = self._loads.find(model)
            for status in HostStatus if found is not None else ():
                if status is not HostStatus.OTHER:
                    family.add_metric([model, str(status)], float(found is not None and found.status is status))
        yield family
        text = "Workers that run or start at hosts (running), and how many the planner wants (wanted)"
        workers = GaugeMetricFamily("baton_hosted_workers", text, labels=["model_name", "role", "count"])
        for model in self._models:
            for role, (running, wanted) in self._loads.workers(model).items():
                workers.add_metric([model, role, "running"], running)
                if wanted is not None:
                    workers.add_metric([model, role, "wanted"], wanted)
        yield workers


class FleetMetrics(Collector):
    """Computes metrics of the live workers on each scrape."""

    def __init__(
        self, workers: Callable[[], Iterable[WorkerState]], differences: Callable[[], Iterable[Difference]] = tuple
    ) -> None:
        self._workers = workers
        self._differences = differences

    def register(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # empty until a scrape

    def collect(self) -> Iterator[Metric]:
        states = sorted(self._workers(), key=lambda state: state.worker)
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for state in states:
                gauge.add_metric([state.model, state.worker], float(value(state)))
            yield gauge
        for name, (text, value) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for state in states:
                counter.add_metric([state.model, state.worker], float(value(state)))
            yield counter
        yield _hits_by_tier(states)
        yield from _of_tiers(states)
        yield _evicted(states)
        yield _pulls(states)
        yield from _ages(states)
        yield _accepted_by_position(states, "baton_worker_accepted_tokens_per_position", LABELS)
        yield _drafters(states)
        yield _roles(states)
        yield _refused(self._differences())
        yield from _as_vllm(states)


def _hits_by_tier(states: list[WorkerState]) -> Metric:
    hits = CounterMetricFamily(
        "baton_worker_cache_hit_tokens", "Prompt tokens found in a tier of the cache", labels=[*LABELS, "tier"]
    )
    for state in states:
        for tier, count in TIERS.items():
            hits.add_metric([state.model, state.worker, tier], float(count(state.totals)))
    return hits


def _of_tiers(states: list[WorkerState]) -> Iterator[Metric]:
    for tier, totals in LOWER_TIERS.items():
        for name, (text, field) in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"baton_worker_{tier}_tier_{name}", text, labels=LABELS)
            for state in states:
                gauge.add_metric([state.model, state.worker], float(getattr(totals(state.totals), field)))
            yield gauge
        for name, text in TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"baton_worker_{tier}_tier_{name}", text, labels=LABELS)
            for state in states:
                counter.add_metric([state.model, state.worker], float(getattr(totals(state.totals), name)))
            yield counter


def _evicted(states: list[WorkerState]) -> Metric:
    evicted = CounterMetricFamily(
        "baton_worker_evicted_blocks", "Cached blocks that gave way to others", labels=[*LABELS, "reason"]
    )
    for state in states:
        for reason in EvictedBlocks.__struct_fields__:
            evicted.add_metric([state.model, state.worker, reason], float(getattr(state.totals.evicted, reason)))
    return evicted


def _pulls(states: list[WorkerState]) -> Metric:
    pulls = CounterMetricFamily("baton_worker_pulls", "Questions to peers for blocks", labels=[*LABELS, "outcome"])
    for state in states:
        for outcome, field in PULLS.items():
            pulls.add_metric([state.model, state.worker, outcome], float(getattr(state.totals.pulls, field)))
    return pulls


def _ages(states: list[WorkerState]) -> Iterator[Metric]:
    for name, (text, ages_of) in AGES.items():
        ages = HistogramMetricFamily(name, text, labels=LABELS)
        for state in states:
            told = ages_of(state.totals)
            counts = [*told.counts, *[0] * (len(AGE_BOUNDS_S) + 1)][: len(AGE_BOUNDS_S) + 1]
            buckets = [*zip([*map(str, AGE_BOUNDS_S), "+Inf"], accumulate(counts), strict=True)]
            ages.add_metric([state.model, state.worker], buckets=buckets, sum_value=told.sum_s)
        yield ages


def _accepted_by_position(states: list[WorkerState], name: str, labels: list[str]) -> Metric:
    accepted = CounterMetricFamily(name, "Accepted tokens by their position in the draft", labels=[*labels, "position"])
    for state in states:
        for position, count in enumerate(state.totals.accepted_by_position[:DRAFT_POSITIONS]):
            accepted.add_metric([state.model, state.worker, str(position)], float(count))
    return accepted


def _drafters(states: list[WorkerState]) -> Metric:
    drafters = GaugeMetricFamily(
        "baton_worker_drafter", "1: the worker's drafts come from this", labels=[*LABELS, "drafter"]
    )
    for state in states:
        if state.drafter:
            drafters.add_metric([state.model, state.worker, state.drafter], 1.0)
    return drafters


def _roles(states: list[WorkerState]) -> Metric:
    roles = GaugeMetricFamily("baton_worker_role", "1: the worker takes work of this role", labels=[*LABELS, "role"])
    for state in states:
        for role in state.roles:
            roles.add_metric([state.model, state.worker, role], 1.0)
    return roles


def _refused(differences: Iterable[Difference]) -> Metric:
    refused = GaugeMetricFamily(
        "baton_worker_refused", "1: ready, and gets no new work here: it differs in this", labels=[*LABELS, "what"]
    )
    for one in differences:
        refused.add_metric([one.model, one.worker, one.what], 1.0)
    return refused


def _as_vllm(states: list[WorkerState]) -> Iterator[Metric]:
    """The worker as an engine of vLLM's dashboards."""
    labels = ["model_name", "engine"]
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV pool that is in use, 0 to 1", labels=labels)
    queries = CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens that looked for a prefix", labels=labels)
    hits = CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens found in the cache", labels=labels)
    preemptions = CounterMetricFamily("vllm:num_preemptions", "Preempted sequences", labels=labels)
    drafts = CounterMetricFamily("vllm:spec_decode_num_drafts", "Verified drafts", labels=labels)
    drafted = CounterMetricFamily("vllm:spec_decode_num_draft_tokens", "Verified tokens of drafts", labels=labels)
    accepted = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens", "Accepted tokens of drafts", labels=labels)
    # Workers report only sums, so the mean of a pass is known but no quantiles: all go into the last bucket.
    passes = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a forward pass", labels=labels)
    config = GaugeMetricFamily(
        "vllm:cache_config_info",
        "1: the KV pool is like this",
        labels=[*labels, "block_size", "num_gpu_blocks", "cache_dtype"],
    )
    for state in states:
        values = [state.model, state.worker]
        layout, totals = state.region.layout, state.totals
        computed = totals.prompt_tokens - totals.cached_tokens + totals.generated_tokens
        passes.add_metric(values, buckets=[("+Inf", state.steps)], sum_value=computed)
        config.add_metric([*values, str(layout.block_size), str(layout.num_blocks), kv_name(layout)], 1.0)
        blocks = max(1, state.region.layout.num_blocks)
        usage.add_metric(values, 1.0 - state.free_blocks / blocks)
        queries.add_metric(values, state.totals.prompt_tokens)
        hits.add_metric(values, state.totals.cached_tokens)
        preemptions.add_metric(values, state.totals.preemptions)
        drafts.add_metric(values, totals.drafts)
        drafted.add_metric(values, totals.drafted_tokens)
        accepted.add_metric(values, totals.accepted_tokens)
    yield from (usage, queries, hits, preemptions, drafts, drafted, accepted, passes, config)
    yield _accepted_by_position(states, "vllm:spec_decode_num_accepted_tokens_per_pos", labels)
