"""The parts of a worker that a role uses."""

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
    # The model, and the memory that holds its KV.
    layout: KVLayout
    kv: torch.Tensor
    vocab_size: int
    max_model_len: int  # the longest sequence that fits this worker
    max_sequences: int
    pool: BlockPool
    turns: Turns
    grammars: Grammars
    # The device.
    wake: Callable[[], None]  # a role may have work now
    budget: PromptBudget
    trials: Trials
    # Gateways, other workers, and where their blocks are.
    jobs: JobIntake
    outbox: FrameOutbox
    bus: Bus
    peers: Peers
    transport: Transport
    region: Region  # this worker's own
    # The process.
    roles: Roles
    background: Background
    totals: Totals
    tracer: Tracer

    def to_peer(self, worker: str) -> str:
        return self.peers.to(worker, self.identity.worker, subjects.peer)
