"""Placement in Redis: one atomic call chooses workers and charges them.

The choice is Lua (`candidates.lua`, `place.lua`), so no other gateway comes between looking and booking.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from common.blocks import BlockKind
from common.errors import UnavailableError
from common.messages import PROTOCOL_VERSION, WorkerState
from common.pages import KVLayout
from common.policy import placement_policy
from common.store import Store, entry_of
from gateway.request.placement import Charged, Placement, Reason
from gateway.tenants.budgets import budgets_library, with_safe_reads

log = logging.getLogger("baton.placement")

PLACE_TIMEOUT_S = 0.25  # then the gateway chooses without Redis
TIMEOUT_S = 2.0  # no request waits for a release
ENTRY_TTL_MS = 3_000
ENTERED_A_CALL = int(placement_policy()["registry"]["max_entered"])
LISTENED_A_CALL = int(placement_policy()["registry"]["max_listened"])
RELEASED_A_CALL = 100  # attempts; about 2 ms during which Redis serves nobody else
MAX_DIGESTS = 4_096  # blocks of a longer prompt beyond it count as uncached
PULL_FROM = "pull_from:"  # before the name of a worker that has more of the prompt
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The facts of a request that placement needs."""

    request_id: str
    attempt: int
    digests: list[bytes]  # one hash for each full block of the prompt
    num_tokens: int
    kind: BlockKind  # only workers with such blocks are candidates
    reserve_tokens: int  # maximum length of prompt and answer, see `room_for`
    deadline_ms: int  # charges expire after this
    cut_over_tokens: int = 0  # longest uncached rest that is prefilled where it decodes; -1: by costs
    exclude: list[str] = field(default_factory=list)
    now_ms: int = 0  # a virtual clock's time; 0: Redis's own


def policy_as_lua() -> str:
    """The policy as a Lua table: `POLICY.section.name`."""
    sections = (
        f"{section} = {{ {', '.join(f'{name} = {value!r}' for name, value in values.items())} }}"
        for section, values in placement_policy().items()
    )
    return f"local POLICY = {{ {', '.join(sections)} }}"


def placement_library() -> str:
    """The policy's constants, then safe reads, ledger, registry, index and placement."""
    parts = ("ledger.lua", "registry.lua", "index.lua", "candidates.lua", "place.lua")
    return with_safe_reads("baton4", *(_HERE / part for part in parts), before=policy_as_lua())


def function_libraries() -> tuple[str, ...]:
    """The source texts of this release's libraries, which gateways and `baton up` install in Redis."""
    return placement_library(), budgets_library()


def place_arguments(request: PlacementRequest) -> list[Any]:
    return [*_about(request), *request.digests[:MAX_DIGESTS]]


def release_arguments(charges: Sequence[Charged], *, now_ms: int = 0) -> list[Any]:
    """Arguments that give charges back. `now_ms`: a virtual clock's time; 0: Redis's own."""
    words = ((f"{one.request_id}:{one.attempt}", _listed(one.stages), _listed(one.workers)) for one in charges)
    return [now_ms, *chain.from_iterable(words)]


def _listed(words: Iterable[str]) -> str:
    return f",{','.join(words)},"


def _about(request: PlacementRequest) -> list[Any]:
    return [
        f"{request.request_id}:{request.attempt}",
        request.num_tokens,
        request.kind.block_size,
        request.reserve_tokens,
        max(1, request.deadline_ms),
        request.cut_over_tokens,
        str(request.kind),
        _listed(request.exclude),
        request.now_ms,
        PROTOCOL_VERSION,
    ]


def parse_placement(answer: Sequence[Any]) -> Placement:
    """Parse the reply of `baton4_place`. Raises UnavailableError if nobody decodes, and ValueError or the like for nonsense."""
    prefill, incarnation, matched_prefill, matched_decode, reason, told, *decode_workers = answer
    if not prefill:
        raise UnavailableError(reason.decode())
    costs = {name: float(value) for name, value in (cost.split("=") for cost in told.decode().split())}
    holder = next((name.removeprefix(PULL_FROM) for name in costs if name.startswith(PULL_FROM)), "")
    return Placement(
        prefill=prefill.decode(),
        prefill_incarnation=int(incarnation),
        decode=[worker.decode() for worker in decode_workers],
        matched_blocks_prefill=int(matched_prefill),
        matched_blocks_decode=int(matched_decode),
        reason=Reason(reason.decode()),
        holder=holder,
        holder_blocks=int(costs.pop(PULL_FROM + holder, 0)),
        costs=costs,
    )


class Ledger:
    """Places requests and releases their charges. One a gateway; safe for concurrent use."""

    def __init__(self, store: Store, *, place_timeout_s: float = PLACE_TIMEOUT_S, timeout_s: float = TIMEOUT_S) -> None:
        self._store = store
        self._place_timeout_s = place_timeout_s
        self._timeout_s = timeout_s
        self._told_of_nonsense = False

    async def place(self, request: PlacementRequest) -> Placement:
        """Choose workers and charge them, atomically. Raises UnavailableError if none decodes or Redis is down.

        No decode worker gets more than it has room for, unless all are full: then the reason is FULL, and the least
        loaded comes first.
        """
        words = [*_about(request), request.digests[:MAX_DIGESTS]]
        answer = await self._store.call("baton4_place", *words, timeout_s=self._place_timeout_s)
        try:
            return parse_placement(answer)
        except (TypeError, ValueError, AttributeError) as error:
            if not self._told_of_nonsense:
                log.warning("placement.unreadable_answer", extra={"answer": repr(answer)[:200]})
            self._told_of_nonsense = True  # logged once, not for each request
            raise UnavailableError("Redis answers nonsense") from error

    async def release(self, charges: Sequence[Charged]) -> int:
        """Release charges of `place`; return how many Redis processed. Idempotent, and in any order."""
        part = charges[:RELEASED_A_CALL]
        done = await self._store.call("baton4_release", *release_arguments(part), timeout_s=self._timeout_s)
        return min(max(done, 1), len(part)) if isinstance(done, int) else len(part)

    async def enter(self, states: Sequence[WorkerState], *, gateway: str, ttl_ms: int = ENTRY_TTL_MS) -> list[str]:
        """Register workers that were just heard, for `ttl_ms`. Returns those with invalid figures."""
        entries, refused = [], []
        for state in states:
            try:
                entries.append(entry_of(state))
            except (ArithmeticError, LookupError, ValueError):  # an unknown dtype, or a number out of range
                refused.append(state.worker)
        for start in range(0, len(entries), ENTERED_A_CALL):
            parts = [part for entry in entries[start : start + ENTERED_A_CALL] for part in entry]
            answer = await self._store.call("baton4_enter", gateway, ttl_ms, 0, *parts, timeout_s=self._timeout_s)
            refused += [worker.decode(errors="replace") for worker in answer]
        return refused

    async def leave(self, worker: str, incarnation: int) -> None:
        """Remove a worker that is gone, unless a newer incarnation was registered."""
        await self._store.call("baton4_leave", worker, str(incarnation), timeout_s=self._timeout_s)

    async def take_news(self, workers: Sequence[str]) -> bool:
        """Apply workers' news to the index. Returns True if there was any: then call again."""
        taken = [
            await self._store.call("baton4_news", *workers[start : start + LISTENED_A_CALL], timeout_s=self._timeout_s)
            for start in range(0, len(workers), LISTENED_A_CALL)
        ]
        return any(taken)

    async def charged(self, worker: str, stage: Literal["prefill", "decode"]) -> int:
        """Tokens charged to a worker now."""
        return int(await self._store.call("baton4_charged", stage, worker, timeout_s=self._timeout_s))


def room_for(layout: KVLayout, num_tokens: int) -> int:
    """Return what a sequence of so many tokens holds at most while it is decoded, in all KV groups."""
    return num_tokens + layout.block_size * layout.blocks_beside(num_tokens)
