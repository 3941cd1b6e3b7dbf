"""Placement of an attempt: one call to Redis, or a local rule while Redis is down."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice, takewhile
from typing import Protocol

from common.blocks import BlockKind, iter_hashes
from common.errors import UnavailableError
from common.messages import WorkerState
from common.words import Role
from gateway.placement.agreement import Agreement, Blocks
from gateway.placement.islands import islands, least_busy
from gateway.placement.ledger import PlacementRequest, room_for
from gateway.placement.without_redis import choose, loads_of
from gateway.request.placement import Charged, Placement
from gateway.request.spec import GenerationSpec, long_enough
from gateway.request.state import RequestState

COLLECT_S = 0.005
AGAIN_S = 1.0
MAX_KEPT = 10_000  # attempts; older ones expire at their deadlines
CLOSE_S = 1.0
log = logging.getLogger("baton.placement")

BLOCKS_A_TURN = 1_024  # hashed at once: a millisecond
MAX_BLOCKS = 100_000  # about 15 MB


class ReleaseStore(Protocol):
    async def release(self, charges: Sequence[Charged]) -> int:
        """Release charges; return how many were processed, from the first on. Raises UnavailableError."""
        ...


class Releases:
    """The batcher: one call at a time; releases that come meanwhile go with the next."""

    def __init__(self, store: ReleaseStore) -> None:
        self._store = store
        self._kept: dict[tuple[str, int], Charged] = {}
        self._sending: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, charged: Charged) -> None:
        """Queue a release; does not wait."""
        key = charged.request_id, charged.attempt
        before = self._kept.get(key)
        if before is not None:
            stages = tuple(dict.fromkeys((*before.stages, *charged.stages)))
            charged = replace(charged, stages=stages, workers=(*before.workers, *charged.workers))
        elif len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = charged
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_often())

    async def close(self) -> None:
        """Send the rest, if Redis accepts it soon."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._kept:
                    await self._send()

    async def _send_often(self) -> None:
        try:
            await asyncio.sleep(COLLECT_S)
            while self._kept:
                try:
                    await self._send()
                except UnavailableError:
                    await asyncio.sleep(AGAIN_S)
                await asyncio.sleep(COLLECT_S)
        finally:
            self._sending = None

    async def _send(self) -> None:
        charges = list(self._kept.values())
        done = await self._store.release(charges)
        for one in charges[:done]:
            key = one.request_id, one.attempt
            if self._kept.get(key) is one:  # otherwise more was queued meanwhile
                del self._kept[key]


class PlacementStore(ReleaseStore, Protocol):
    """The load ledger that gateways share: `gateway.placement.ledger.Ledger`, or the simulation's."""

    async def place(self, request: PlacementRequest) -> Placement:
        """Raises UnavailableError."""
        ...


class Placer:
    """Chooses workers for attempts, and releases their charges."""

    def __init__(self, *, store: PlacementStore, agreement: Agreement, cut_over_tokens: int) -> None:
        self._store = store
        self._agreement = agreement
        self._cut_over_tokens = cut_over_tokens
        self._recent = RecentPrefixes()
        self.releases = Releases(store)

    def workers(self, role: Role, model: str = "") -> list[WorkerState]:
        """See `Agreement.ready`; with `model` only those of that fingerprint."""
        return [state for state in self._agreement.ready(role) if model in ("", state.model_fingerprint)]

    def decoders(self, spec: GenerationSpec) -> list[str]:
        """Decode workers allowed for the request, whatever their blocks."""
        needed = spec.features
        return [state.worker for state in self.workers(Role.DECODE, spec.model_fingerprint) if needed <= state.can]

    def root(self, spec: GenerationSpec) -> bytes:
        """Root of the request's block hashes. There must be a decode worker."""
        return _root(self._blocks_for(spec).kind, spec)

    def uncached_tokens(self, spec: GenerationSpec) -> int:
        """Estimated uncached prompt tokens, from recent placements; at least 1."""
        blocks = self._agreement.blocks(spec.model_fingerprint)
        if blocks is None:
            return len(spec.token_ids)
        kind = blocks.kind
        hashes = iter_hashes(_root(kind, spec), spec.token_ids, kind.block_size)
        return max(1, len(spec.token_ids) - self._recent.matched(hashes) * kind.block_size)

    async def place(self, state: RequestState, others: Iterable[RequestState]) -> Placement:
        """Place the attempt. `others` are this gateway's requests in flight.

        Raises UnavailableError without a decode worker that suits the request.
        """
        blocks, token_ids, others = self._blocks_for(state.spec), state.token_ids, list(others)
        kind = blocks.kind
        digests = await _digests(iter_hashes(_root(kind, state.spec), token_ids, kind.block_size))
        island = self._island(blocks, state, others)
        prefill, decode = self._members(blocks, state, island)
        request = PlacementRequest(
            request_id=state.spec.request_id,
            attempt=state.attempt,
            digests=digests,
            num_tokens=len(token_ids),
            kind=kind,
            reserve_tokens=room_for(blocks.layout, state.spec.num_tokens),
            deadline_ms=int((state.deadline_at - time.monotonic()) * 1000),
            cut_over_tokens=self._cut_over_tokens,
            exclude=[*state.excluded, *self._agreement.strangers(kind, (*prefill, *decode))],
        )
        state.cached_tokens = 0
        self._recent.remember(request.digests)
        placement = None
        with contextlib.suppress(UnavailableError):
            placement = await self._store.place(request)
        prefill, decode = self._members(blocks, state, island)  # again after the call
        if placement is not None:
            known = _is_possible(placement, prefill, decode)
            log.debug("placement.chosen", extra={"request_id": request.request_id, "is_known": known} | placement.costs)
            if known:
                usable = min(placement.matched_blocks_prefill, (len(token_ids) - 1) // kind.block_size)
                state.cached_tokens = usable * kind.block_size  # the last token is always computed
                return _among(placement, decode)
        if not decode:
            needed = sorted(state.spec.features)
            follows = f" that follows {' and '.join(needed)}" if needed else ""
            raise UnavailableError(f"no decode worker{follows} is ready")
        return choose(
            loads_of((*prefill, *decode), others),
            num_tokens=request.num_tokens,
            reserve_tokens=request.reserve_tokens,
            cut_over_tokens=request.cut_over_tokens,
            exclude=state.excluded,
        )

    def _blocks_for(self, spec: GenerationSpec) -> Blocks:
        blocks = self._agreement.blocks(spec.model_fingerprint)
        if blocks is None:
            raise UnavailableError("no decode worker is ready")
        return blocks

    def _members(
        self, blocks: Blocks, state: RequestState, island: set[str] | None = None
    ) -> tuple[list[WorkerState], list[WorkerState]]:
        """Suitable prefill and decode workers with these blocks, on one island or all.

        Without a decode worker for all of the answer, those that go on with it: it ends where their context does.
        """
        spec, needed, begun = state.spec, state.spec.features, len(state.token_ids) + 1
        prefill, decode = (
            [one for one in states if needed <= one.can and (island is None or one.worker in island)]
            for states in (self._agreement.with_blocks(role, blocks) for role in (Role.PREFILL, Role.DECODE))
        )
        decode = long_enough(decode, spec.num_tokens) or long_enough(decode, begun)
        decoders = {one.worker for one in decode}  # a worker with both roles may be chosen for both
        prefill = [one for one in long_enough(prefill, begun) if Role.DECODE not in one.roles or one.worker in decoders]
        return prefill, decode

    def _island(self, blocks: Blocks, state: RequestState, others: Sequence[RequestState]) -> set[str] | None:
        """The island of a request; None: all workers reach each other."""
        prefill, decode = self._members(blocks, state)
        reach = {one.worker: self._agreement.reach(one) for one in (*prefill, *decode)}
        if len(set(reach.values())) < 2 or not decode:
            return None
        return least_busy(islands(reach, decode), loads_of(decode, others), state.excluded)


async def _digests(hashes: Iterator[bytes]) -> list[bytes]:
    """All block hashes; a long prompt's yield to other requests in between."""
    digests: list[bytes] = []
    while part := list(islice(hashes, BLOCKS_A_TURN)):
        digests += part
        if len(part) == BLOCKS_A_TURN:
            await asyncio.sleep(0)
    return digests


def _root(kind: BlockKind, spec: GenerationSpec) -> bytes:
    return _root_of(kind, spec.sharing.adapter, spec.sharing.salt)


@lru_cache(maxsize=256)
def _root_of(kind: BlockKind, adapter: str, salt: str) -> bytes:
    return kind.root(adapter=adapter, salt=salt)


def _is_possible(placement: Placement, prefill: Iterable[WorkerState], decode: Iterable[WorkerState]) -> bool:
    """True if the workers still have the chosen roles."""
    decoders = {worker.worker for worker in decode}
    if not placement.decode:
        return placement.prefill in decoders
    return placement.prefill in {worker.worker for worker in prefill} and not decoders.isdisjoint(placement.decode)


def _among(placement: Placement, decode: Iterable[WorkerState]) -> Placement:
    """The placement without unsuitable candidates: one may have joined since the request was made."""
    names = {state.worker for state in decode}
    if names.issuperset(placement.decode):
        return placement
    return dataclasses.replace(placement, decode=[name for name in placement.decode if name in names])


class RecentPrefixes:
    """An LRU set of block hashes of placed prompts."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def remember(self, digests: Sequence[bytes]) -> None:
        """Add a prompt with these full blocks, which is about to be computed."""
        for digest in reversed(digests):  # the first block is evicted last
            if digest in self._known:
                self._known.move_to_end(digest)
            else:
                self._known[digest] = None
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)

    def matched(self, digests: Iterable[bytes]) -> int:
        """The number of known leading blocks."""
        return sum(1 for _ in takewhile(self._known.__contains__, digests))
