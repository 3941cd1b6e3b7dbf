"""Heartbeats of workers, for tests that need no engine."""

from __future__ import annotations

from typing import Any

from common.messages import KVLayout, Region, WorkerState
from common.words import WorkerStatus

LAYOUT = KVLayout(num_blocks=100, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")


def a_worker(worker: str, *roles: str, **changes: Any) -> WorkerState:
    """A ready worker that computes 1,000 prompt tokens a second and has room for 8 sequences in 100 blocks."""
    values: dict[str, Any] = {
        "worker": worker,
        "incarnation": 1,
        "roles": list(roles),
        "status": WorkerStatus.READY,
        "model": "model",
        "model_fingerprint": "model",
        "tokenizer_fingerprint": "tokenizer",
        "vocab_size": 100,
        "max_model_len": 2048,
        "region": Region(transport="shm", incarnation=1, layout=LAYOUT, address={}),
        "free_blocks": 100,
        "max_sequences": 8,
        "prefill_tokens_per_s": 1000.0,
    }
    return WorkerState(**(values | changes))
