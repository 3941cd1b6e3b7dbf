"""Where a request goes: the fleet as this gateway hears it, one call to Redis, and a choice of its own without Redis."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable

from common.blocks import hash_blocks, hash_root, iter_hashes
from common.errors import UnavailableError
from common.messages import WorkerState
from common.peers import Peers
from common.store import Placement, PlacementRequest, Store
from gateway.generation import GenerationSpec
from gateway.owner import Phase, RequestState
from gateway.placement import Candidate, Prompt, choose, compatible
from gateway.prefixes import RecentPrefixes

log = logging.getLogger("baton.placement")


class Placer:
    """Chooses workers for attempts, and gives back what was charged for them."""

    def __init__(self, *, store: Store, peers: Peers, cut_over_tokens: int) -> None:
        self._store = store
        self._peers = peers
        self._cut_over_tokens = cut_over_tokens
        self._recent = RecentPrefixes()

    def workers(self, role: str) -> list[WorkerState]:
        """The ready workers of a role that hash blocks as this gateway does."""
        return [state for state in self._peers.ready(role) if compatible(state)]

    def root(self, spec: GenerationSpec) -> bytes:
        """The root of the request's block hashes. There must be a decode worker."""
        state = self.workers("decode")[0]
        layout = state.region.layout
        return hash_root(
            model=state.model_fingerprint, kv_dtype=layout.dtype, block_size=layout.block_size, salt=spec.salt
        )

    def uncached_tokens(self, spec: GenerationSpec) -> int:
        """Prompt tokens that will likely have to be computed, going by what was placed lately; at least 1."""
        if not self.workers("decode"):
            return len(spec.token_ids)
        block_size = self.workers("decode")[0].region.layout.block_size
        hashes = iter_hashes(self.root(spec), spec.token_ids, block_size)
        return max(1, len(spec.token_ids) - self._recent.matched(hashes) * block_size)

    async def place(self, state: RequestState, others: Iterable[RequestState]) -> Placement:
        """Where the attempt goes. `others` are this gateway's requests in flight.

        Raises UnavailableError without a decode worker.
        """
        prefill, decode = self.workers("prefill"), self.workers("decode")
        if not decode:
            raise UnavailableError("no decode worker is ready")
        reference = decode[0]
        token_ids = state.token_ids
        layout = reference.region.layout
        request = PlacementRequest(
            request_id=state.spec.request_id,
            attempt=state.attempt,
            digests=hash_blocks(self.root(state.spec), token_ids, layout.block_size),
            num_tokens=len(token_ids),
            block_size=layout.block_size,
            reserve_tokens=len(state.spec.token_ids) + state.spec.sampling.max_tokens,
            deadline_ms=int((state.deadline_at - time.monotonic()) * 1000),
            model_fingerprint=reference.model_fingerprint,
            cut_over_tokens=self._cut_over_tokens,
            exclude=state.excluded,
        )
        state.cached_tokens = 0
        self._recent.remember(request.digests)
        placement = None
        with contextlib.suppress(UnavailableError):
            placement = await self._store.place(request)
        prefill, decode = self.workers("prefill"), self.workers("decode")  # as they are after the call
        if placement is not None:
            known = _is_possible(placement, prefill, decode)
            log.debug("placement.chosen", extra={"request_id": request.request_id, "is_known": known} | placement.costs)
            if known:
                usable = min(placement.matched_blocks_prefill, (len(token_ids) - 1) // layout.block_size)
                state.cached_tokens = usable * layout.block_size  # the last token is computed in any case
                return placement
        if not decode:
            raise UnavailableError("no decode worker is ready")
        prefiller, candidates, reason = choose_locally(prefill, decode, request, others=others)
        return Placement(prefill=prefiller, decode=candidates, reason=f"without redis: {reason}")

    async def release(self, request_id: str, attempt: int, *, stage: str, workers: list[str]) -> None:
        """Give back what an attempt was charged at a stage, "prefill" or "decode"."""
        with contextlib.suppress(UnavailableError):
            await self._store.release(request_id, attempt, stage=stage, workers=workers)


def _is_possible(placement: Placement, prefill: Iterable[WorkerState], decode: Iterable[WorkerState]) -> bool:
    """Whether the workers still have the roles that they were chosen for."""
    decoders = {worker.worker for worker in decode}
    if not placement.decode:
        return placement.prefill in decoders
    return placement.prefill in {worker.worker for worker in prefill} and not decoders.isdisjoint(placement.decode)


def choose_locally(
    prefill: Iterable[WorkerState],
    decode: Iterable[WorkerState],
    request: PlacementRequest,
    *,
    others: Iterable[RequestState],
) -> tuple[str, list[str], str]:
    """The same choice from the heartbeats alone; charged is what this gateway sent. There must be a decode worker.

    Excluded workers are chosen only when nobody else decodes.
    """
    known = {state.worker: Candidate(state=state) for state in (*prefill, *decode)}
    for other in others:
        if other.is_over or not other.assigned:
            continue
        prefiller = known.get(other.assigned)
        if prefiller is not None and other.phase in (Phase.QUEUED, Phase.CLAIMED):
            prefiller.prefill_tokens += len(other.token_ids)
            prefiller.prefill_count += 1
        decoder = known.get(other.decoder[0] if other.decoder else (other.candidates or [other.assigned])[0])
        if decoder is not None:
            decoder.decode_tokens += len(other.spec.token_ids) + other.spec.sampling.max_tokens
            decoder.decode_count += 1
    allowed = [candidate for candidate in known.values() if candidate.state.worker not in request.exclude]
    if not any("decode" in candidate.state.roles for candidate in allowed):
        allowed = list(known.values())
    prompt = Prompt(
        num_tokens=request.num_tokens,
        block_size=request.block_size,
        reserve_tokens=request.reserve_tokens,
        cut_over_tokens=request.cut_over_tokens,
    )
    return choose(allowed, prompt)
