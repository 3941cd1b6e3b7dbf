"""The shared parts of a worker, as its roles see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common import subjects
from common.bus import Bus
from common.messages import KVLayout, Region, ToGateway, ToWorker, WorkerReply, worker_reply_decoder
from common.peers import Peers
from common.tracing import Tracer
from engine.cache.block_pool import BlockPool
from engine.grammars.grammars import Grammars
from engine.sequence import Sequence
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
class ServedModel:
    """The model's bounds and grammars, as this worker serves it."""

    vocab_size: int
    max_model_len: int  # the longest sequence that fits into the pool
    max_sequences: int
    grammars: Grammars

    async def built(self, sequence: Sequence) -> None:
        """Return once the sequence's grammar is built or has failed, which its first pass reports; at once without one."""
        building = self.grammars.prepare(sequence)
        if building is not None:
            await asyncio.wait([asyncio.wrap_future(building)])


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The KV cache: its memory, who holds its blocks, and whose turn it is to take some."""

    layout: KVLayout
    kv: torch.Tensor
    pool: BlockPool
    turns: Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The pipeline's passes, as roles influence them."""

    wake: Callable[[], None]  # tells the pipeline that a role may have work
    budget: PromptBudget
    trials: Trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Messenger:
    """The bus to gateways and other workers, each under the subject that it listens on."""

    identity: Identity
    bus: Bus
    peers: Peers

    async def ask(self, worker: str, message: ToWorker, *, timeout_s: float) -> WorkerReply:
        """Raises UnavailableError."""
        return await self.bus.request(self._subject(worker), message, worker_reply_decoder, timeout_s=timeout_s)

    async def tell(self, worker: str, message: ToWorker) -> None:
        """Raises UnavailableError."""
        await self.bus.publish(self._subject(worker), message)

    async def tell_gateway(self, gateway: str, message: ToGateway) -> None:
        """Raises UnavailableError."""
        await self.bus.publish(self.identity.to_gateway(gateway), message)

    def _subject(self, worker: str) -> str:
        return self.peers.to(worker, self.identity.worker, subjects.peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """This worker's end of KV transfers."""

    transport: Transport
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """The parts of a worker that its roles share."""

    identity: Identity
    model: ServedModel
    cache: KVCache
    passes: Passes
    jobs: JobIntake
    outbox: FrameOutbox
    messenger: Messenger
    transfers: Transfers
    roles: Roles
    background: Background
    totals: Totals
    tracer: Tracer
