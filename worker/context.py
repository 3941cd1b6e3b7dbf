"""The shared parts of a worker, as its roles see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common import subjects
from common.bus import Bus
from common.messages import KVLayout, Region
from common.peers import Peers
from common.tracing import Tracer
from engine.cache.block_pool import BlockPool
from engine.grammars.grammars import Grammars
from kvtransfer.transport import Transport
from worker.background import Background
from worker.device.prompt_budget import PromptBudget
from worker.device.trials import Trials
from worker.identity import Identity
from worker.roles import Roles
from worker.serving.frames import FrameOutbox
from worker.serving.jobs import JobIntake
from worker.serving.turns import Turns
from worker.totals import Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """The parts of a worker that its roles share."""

    identity: Identity
    # The model and its KV cache.
    layout: KVLayout
    kv: torch.Tensor
    vocab_size: int
    max_model_len: int  # the longest sequence that fits into the pool
    max_sequences: int
    pool: BlockPool
    turns: Turns
    grammars: Grammars
    # The device's limits and trials.
    wake: Callable[[], None]  # tells the pipeline that a role may have work
    budget: PromptBudget
    trials: Trials
    # Gateways, other workers, and the prefix index.
    jobs: JobIntake
    outbox: FrameOutbox
    bus: Bus
    peers: Peers
    transport: Transport
    region: Region  # this worker's own
    # Process-wide services.
    roles: Roles
    background: Background
    totals: Totals
    tracer: Tracer

    def to_peer(self, worker: str) -> str:
        return self.peers.to(worker, self.identity.worker, subjects.peer)
