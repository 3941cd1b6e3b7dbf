"""The lease table of a receiver, without I/O: which writer may write into which blocks, until when.

    RESERVED ──begin_verify──▶ VERIFYING ──accept──▶ ACCEPTED      blocks are the sequence's
       │                          └────────reject──▶ RELEASED      blocks are the pool's again
       ├──writer_done─────────────────────────────▶ RELEASED
       └──cancel / expire / give_up──▶ QUARANTINED ──writer_done──▶ RELEASED

Blocks of a lease that is RESERVED, VERIFYING or QUARANTINED belong to the transfer: a write may still land in them.
Time alone never frees them: the writer must be done, or certainly unable to write. The clock is passed in (seconds,
monotonic).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from common.errors import HandoffRefusedError
from common.words import Refusal


class LeaseState(Enum):
    RESERVED = "reserved"  # writes may land
    VERIFYING = "verifying"  # the writer sent its manifest and writes no more
    ACCEPTED = "accepted"
    QUARANTINED = "quarantined"  # given up, but the writer may not know yet
    RELEASED = "released"


_NEXT = {
    LeaseState.RESERVED: {LeaseState.VERIFYING, LeaseState.QUARANTINED, LeaseState.RELEASED},
    LeaseState.VERIFYING: {LeaseState.ACCEPTED, LeaseState.RELEASED},
    LeaseState.QUARANTINED: {LeaseState.RELEASED},
    LeaseState.ACCEPTED: set[LeaseState](),
    LeaseState.RELEASED: set[LeaseState](),
}
MAX_TOMBSTONES = 10_000
TOMBSTONE_S = 3600.0  # longer than any message of a cancelled attempt travels


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A right to write into `blocks`, changed by `LeaseTable` alone."""

    lease_id: int
    generation: int
    request_id: str
    attempt: int
    writer: str
    writer_incarnation: int
    blocks: list[int]
    expires_at: float
    state: LeaseState = LeaseState.RESERVED
    cancelled: bool = False  # cancelled during verification: it will be rejected

    def move(self, state: LeaseState) -> None:
        """Change the state; raises RuntimeError for a transition that is not in the table above."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"lease {self.lease_id} can't go from {self.state.value} to {state.value}")
        self.state = state


class LeaseTable:
    """All leases of one receiver under which writes may still land. `generation` makes a lease unique for ever."""

    def __init__(self, *, incarnation: int, first_id: int = 1) -> None:
        """`first_id`: tables of one process number their leases from apart."""
        self._incarnation = incarnation
        self._leases: dict[int, Lease] = {}
        self._next_id = first_id
        self._tombstones: OrderedDict[str, tuple[int, float]] = OrderedDict()  # newest cancelled attempt, and when

    @property
    def held_blocks(self) -> int:
        return sum(len(lease.blocks) for lease in self._leases.values())

    def reserve(
        self,
        now: float,
        *,
        request_id: str,
        attempt: int,
        writer: str,
        writer_incarnation: int,
        blocks: list[int],
        expires_at: float,
    ) -> Lease:
        """Open a lease on `blocks`, or return this writer's lease for this attempt (then `blocks` are not taken).

        A lease of an older attempt, or of another writer of this one, is aborted. Raises HandoffRefusedError: `CANCELLED`,
        `STALE` if a newer attempt holds a lease, or `VERIFYING` during the check of an earlier manifest.
        """
        if self._is_cancelled(request_id, attempt):
            raise HandoffRefusedError(Refusal.CANCELLED)
        for lease in self._of_request(request_id):
            if lease.state is LeaseState.QUARANTINED:
                continue
            if lease.attempt > attempt:
                raise HandoffRefusedError(Refusal.STALE)
            if lease.state is LeaseState.VERIFYING:
                raise HandoffRefusedError(Refusal.VERIFYING)
            same_writer = (lease.writer, lease.writer_incarnation) == (writer, writer_incarnation)
            if lease.attempt == attempt and same_writer:
                return lease
            lease.move(LeaseState.QUARANTINED)
        lease_id = self._next_id
        self._next_id += 1
        lease = Lease(
            lease_id=lease_id,
            generation=(self._incarnation + lease_id) % 2**63,
            request_id=request_id,
            attempt=attempt,
            writer=writer,
            writer_incarnation=writer_incarnation,
            blocks=list(blocks),
            expires_at=expires_at,
        )
        self._leases[lease_id] = lease
        return lease

    def begin_verify(
        self,
        now: float,
        *,
        lease_id: int,
        generation: int,
        request_id: str,
        attempt: int,
        writer: str,
        writer_incarnation: int,
    ) -> Lease:
        """Begin to check a lease whose writer is done. Raises HandoffRefusedError: `STALE`, `EXPIRED` or `CANCELLED`."""
        if self._is_cancelled(request_id, attempt):
            raise HandoffRefusedError(Refusal.CANCELLED)
        lease = self._leases.get(lease_id)
        if lease is None or (
            (lease.generation, lease.request_id, lease.attempt, lease.writer, lease.writer_incarnation)
            != (generation, request_id, attempt, writer, writer_incarnation)
        ):
            raise HandoffRefusedError(Refusal.STALE)
        if lease.state is not LeaseState.RESERVED:
            raise HandoffRefusedError(Refusal.EXPIRED if lease.state is LeaseState.QUARANTINED else Refusal.STALE)
        if now >= lease.expires_at:
            lease.move(LeaseState.QUARANTINED)
            raise HandoffRefusedError(Refusal.EXPIRED)
        lease.move(LeaseState.VERIFYING)
        return lease

    def accept(self, lease_id: int) -> list[int]:
        """End the lease with valid digests; its blocks are now the sequence's."""
        return self._end(lease_id, LeaseState.ACCEPTED)

    def reject(self, lease_id: int) -> list[int]:
        """End the lease of a refused manifest, whose writer writes no more; its blocks may be used again."""
        return self._end(lease_id, LeaseState.RELEASED)

    def cancel(self, now: float, request_id: str, attempt: int) -> Lease | None:
        """Give up attempts up to `attempt`, and refuse them from now on; return the open lease, if any."""
        self._bury(now, request_id, attempt)
        found = None
        for lease in self._of_request(request_id):
            if lease.attempt > attempt:
                continue
            if lease.state is LeaseState.RESERVED:
                lease.move(LeaseState.QUARANTINED)
                found = lease
            elif lease.state is LeaseState.VERIFYING:
                lease.cancelled = True
                found = lease
        return found

    def expire(self, now: float) -> list[Lease]:
        """Give up overdue leases; return them, so that their writers can be told."""
        late = [
            lease for lease in self._leases.values() if lease.state is LeaseState.RESERVED and now >= lease.expires_at
        ]
        for lease in late:
            lease.move(LeaseState.QUARANTINED)
        return late

    def renew(self, lease_id: int, expires_at: float) -> None:
        """Extend an open lease to `expires_at`; one that ended meanwhile stays ended."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.RESERVED:
            lease.expires_at = max(lease.expires_at, expires_at)

    def give_up(self, lease_id: int) -> bool:
        """Quarantine a lease that its writer no longer knows; return True if it was open."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.RESERVED:
            return False
        lease.move(LeaseState.QUARANTINED)
        return True

    def writer_done(self, *, lease_id: int, generation: int, writer_incarnation: int) -> list[int]:
        """Record that no write under this lease is in flight or will follow; return the blocks that are free now."""
        lease = self._leases.get(lease_id)
        if lease is None or (lease.generation, lease.writer_incarnation) != (generation, writer_incarnation):
            return []
        if lease.state is LeaseState.VERIFYING:
            return []  # the end of verification frees them
        return self._end(lease_id, LeaseState.RELEASED)

    def _bury(self, now: float, request_id: str, attempt: int) -> None:
        newest, _ = self._tombstones.pop(request_id, (0, now))
        self._tombstones[request_id] = (max(attempt, newest), now)
        while len(self._tombstones) > MAX_TOMBSTONES or now - next(iter(self._tombstones.values()))[1] > TOMBSTONE_S:
            self._tombstones.popitem(last=False)

    def _is_cancelled(self, request_id: str, attempt: int) -> bool:
        return attempt <= self._tombstones.get(request_id, (0, 0.0))[0]

    def _end(self, lease_id: int, state: LeaseState) -> list[int]:
        lease = self._leases[lease_id]
        lease.move(state)
        del self._leases[lease_id]
        return lease.blocks

    def _of_request(self, request_id: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.request_id == request_id]
