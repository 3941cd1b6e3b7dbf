"""Settings of a worker's KV events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsSettings:
    """Addresses and bounds, by vLLM's names; see docs/kv.md."""

    endpoint: str
    replay_endpoint: str | None
    binds: bool  # else it connects to a reader that binds
    topic: str
    data_parallel_rank: int = 0  # this worker's number among those of its pod
    buffer_steps: int = 10_000  # batches kept for who asks again
    hwm: int = 100_000  # messages queued for a slow reader, who loses the rest
    max_queue_size: int = 100_000  # changes that wait to be sent
