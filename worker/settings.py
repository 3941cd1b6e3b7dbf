"""Settings that may differ between workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.device.step_policy import StepTargets
from worker.events.settings import EventsSettings
from worker.tier.disk import Disk
from worker.tier.host_store import HostStore


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The name of a worker's model, and the fingerprints of its files."""

    name: str
    tokenizer_fingerprint: str
    files_fingerprint: str = ""  # config and weights as stored


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings that may differ between two sane deployments of a worker."""

    served: ModelIdentity
    max_batch_tokens: int = 512
    max_sequences: int = 64
    stages: int = 1
    step_targets: StepTargets = field(default_factory=StepTargets)
    step_timeout_s: float = 120.0  # longer passes count as hung
    drain_s: float = 30.0
    kv_host: HostStore | None = None  # host memory for blocks that the pool evicts
    kv_disk: Disk | None = None  # files for what that memory gives up
    kv_retention: str = "combined"  # a name of `engine.cache.retention.POLICIES`
    kv_events: EventsSettings | None = None  # None: nobody hears of its blocks but the index
    drafter: str = ""  # the method of its drafts; "": none
    pulls: bool = True  # asks peers for cached blocks, and lends its own
    ready_file: str = ""  # exists while the worker takes work
