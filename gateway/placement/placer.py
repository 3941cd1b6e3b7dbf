"""Where a request goes: one call to Redis, or this gateway's own rule while Redis is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Protocol

from common.blocks import BlockKind, hash_blocks, iter_hashes
from common.errors import UnavailableError
from common.messages import WorkerState
from common.peers import Peers
from common.store import kind_of
from common.words import Role
from gateway.placement.ledger import PlacementRequest
from gateway.placement.recent_prefixes import RecentPrefixes
from gateway.placement.without_redis import choose, loads_of
from gateway.request.placement import Placement
from gateway.request.spec import GenerationSpec
from gateway.request.state import RequestState

log = logging.getLogger("baton.placement")

BLOCKS_A_TURN = 1_024  # hashed at once: a millisecond


class PlacementStore(Protocol):
    """The load ledger that gateways share: `gateway.placement.ledger.Ledger`, or the simulation's."""

    async def place(self, request: PlacementRequest) -> Placement:
        """Raises UnavailableError."""
        ...

    async def release(self, request_id: str, attempt: int, *, stage: str, workers: Sequence[str] = ()) -> None:
        """Raises UnavailableError."""
        ...


def usable_workers(peers: Peers, role: Role) -> list[WorkerState]:
    """The ready workers of a role that hash blocks as this gateway does."""
    return [state for state in peers.ready(role) if compatible(state)]


class Placer:
    """Chooses workers for attempts, and gives their charges back."""

    def __init__(self, *, store: PlacementStore, peers: Peers, cut_over_tokens: int) -> None:
        self._store = store
        self._peers = peers
        self._cut_over_tokens = cut_over_tokens
        self._recent = RecentPrefixes()

    def workers(self, role: Role, model: str = "") -> list[WorkerState]:
        """See `usable_workers`; with `model` only those of that fingerprint."""
        return [state for state in usable_workers(self._peers, role) if model in ("", state.model_fingerprint)]

    def kind(self, model: str = "") -> BlockKind | None:
        """The blocks that most decode workers of a model have, or None without one.

        They differ only while its KV dtype or block size is being changed.
        """
        kinds = Counter(kind_of(state) for state in self.workers(Role.DECODE, model))
        return min(kinds, key=lambda kind: (-kinds[kind], str(kind)), default=None)

    def root(self, spec: GenerationSpec) -> bytes:
        """The root of the request's block hashes. There must be a decode worker."""
        return _root(self._kind_for(spec), spec)

    def uncached_tokens(self, spec: GenerationSpec) -> int:
        """An estimate of the uncached prompt tokens, by what was placed lately; at least 1."""
        kind = self.kind(spec.model_fingerprint)
        if kind is None:
            return len(spec.token_ids)
        hashes = iter_hashes(_root(kind, spec), spec.token_ids, kind.block_size)
        return max(1, len(spec.token_ids) - self._recent.matched(hashes) * kind.block_size)

    async def place(self, state: RequestState, others: Iterable[RequestState]) -> Placement:
        """Where the attempt goes. `others` are this gateway's requests in flight.

        Raises UnavailableError without a decode worker.
        """
        kind = self._kind_for(state.spec)
        token_ids = state.token_ids
        digests = await _digests(iter_hashes(_root(kind, state.spec), token_ids, kind.block_size))
        request = PlacementRequest(
            request_id=state.spec.request_id,
            attempt=state.attempt,
            digests=digests,
            num_tokens=len(token_ids),
            kind=kind,
            reserve_tokens=len(state.spec.token_ids) + state.spec.sampling.max_tokens,
            deadline_ms=int((state.deadline_at - time.monotonic()) * 1000),
            cut_over_tokens=self._cut_over_tokens,
            exclude=state.excluded,
        )
        state.cached_tokens = 0
        self._recent.remember(request.digests)
        placement = None
        with contextlib.suppress(UnavailableError):
            placement = await self._store.place(request)
        prefill, decode = self._with_blocks(Role.PREFILL, kind), self._with_blocks(Role.DECODE, kind)  # after the call
        if placement is not None:
            known = _is_possible(placement, prefill, decode)
            log.debug("placement.chosen", extra={"request_id": request.request_id, "is_known": known} | placement.costs)
            if known:
                usable = min(placement.matched_blocks_prefill, (len(token_ids) - 1) // kind.block_size)
                state.cached_tokens = usable * kind.block_size  # the last token is always computed
                return placement
        if not decode:
            raise UnavailableError("no decode worker is ready")
        return choose(
            loads_of((*prefill, *decode), others),
            num_tokens=request.num_tokens,
            reserve_tokens=request.reserve_tokens,
            cut_over_tokens=request.cut_over_tokens,
            exclude=request.exclude,
        )

    def _kind_for(self, spec: GenerationSpec) -> BlockKind:
        kind = self.kind(spec.model_fingerprint)
        if kind is None:
            raise UnavailableError("no decode worker is ready")
        return kind

    def _with_blocks(self, role: Role, kind: BlockKind) -> list[WorkerState]:
        return [state for state in self.workers(role, kind.model) if kind_of(state) == kind]

    async def release(self, request_id: str, attempt: int, *, stage: str, workers: list[str]) -> None:
        """`stage`: "prefill" or "decode"."""
        with contextlib.suppress(UnavailableError):
            await self._store.release(request_id, attempt, stage=stage, workers=workers)


async def _digests(hashes: Iterator[bytes]) -> list[bytes]:
    """All of them; a long prompt's let other requests have their turns."""
    digests: list[bytes] = []
    while part := list(islice(hashes, BLOCKS_A_TURN)):
        digests += part
        if len(part) == BLOCKS_A_TURN:
            await asyncio.sleep(0)
    return digests


def _root(kind: BlockKind, spec: GenerationSpec) -> bytes:
    return kind.root(adapter=spec.adapter, salt=spec.salt)


def _is_possible(placement: Placement, prefill: Iterable[WorkerState], decode: Iterable[WorkerState]) -> bool:
    """Whether the workers still have the chosen roles."""
    decoders = {worker.worker for worker in decode}
    if not placement.decode:
        return placement.prefill in decoders
    return placement.prefill in {worker.worker for worker in prefill} and not decoders.isdisjoint(placement.decode)


@lru_cache(maxsize=64)
def _probe_hash(kind: BlockKind) -> bytes:
    return hash_blocks(kind.root(), range(2 * kind.block_size), kind.block_size)[-1]


def compatible(state: WorkerState) -> bool:
    """Whether the worker hashes blocks as this gateway does (parity probe). Older workers send ""."""
    return not state.parity_hash or state.parity_hash == _probe_hash(kind_of(state))
