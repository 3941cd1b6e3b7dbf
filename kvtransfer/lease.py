"""The decode worker's side of the hand-over, apart from its I/O: who may write into which blocks, until when.

    RESERVED ──begin_verify──▶ VERIFYING ──accept──▶ ACCEPTED      blocks are the sequence's
       │                          └────────reject──▶ RELEASED      blocks are the pool's again
       ├──writer_done / fence─────────────────────▶ RELEASED
       └──cancel / expire / give_up──▶ QUARANTINED ──writer_done / fence──▶ RELEASED

Blocks of a lease that is RESERVED, VERIFYING or QUARANTINED belong to the transfer: a write may still land in them.
Time alone never frees them. The clock is passed in (seconds, monotonic).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from common.errors import HandoffRefusedError


class LeaseState(Enum):
    RESERVED = "reserved"  # writes may land
    VERIFYING = "verifying"  # the writer sent its manifest: it writes no more
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
HOLDING = frozenset({LeaseState.RESERVED, LeaseState.VERIFYING, LeaseState.QUARANTINED})
MAX_TOMBSTONES = 10_000
TOMBSTONE_S = 3600.0  # longer than any message of a cancelled attempt is on its way


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A right to write into `blocks`. Only `LeaseTable` changes it."""

    lease_id: int
    generation: int
    request_id: str
    attempt: int
    writer: str
    writer_incarnation: int
    blocks: list[int]
    expires_at: float
    state: LeaseState = LeaseState.RESERVED
    cancelled: bool = False  # while it was being verified: reject it then

    def move(self, state: LeaseState) -> None:
        """Change the state; raises RuntimeError for a change that the table above doesn't have."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"lease {self.lease_id} can't go from {self.state.value} to {state.value}")
        self.state = state


class LeaseTable:
    """All leases of one decode worker that may still be written under. `generation` makes a lease unique for ever."""

    def __init__(self, *, incarnation: int) -> None:
        self._incarnation = incarnation
        self._leases: dict[int, Lease] = {}
        self._next_id = 1
        self._tombstones: OrderedDict[str, tuple[int, float]] = OrderedDict()  # newest cancelled attempt, when

    @property
    def held_blocks(self) -> int:
        """Blocks that nobody else may have."""
        return sum(len(lease.blocks) for lease in self._leases.values())

    def counts(self) -> dict[str, int]:
        """Leases by state, of those that hold blocks."""
        counts = dict.fromkeys((state.value for state in HOLDING), 0)
        for lease in self._leases.values():
            counts[lease.state.value] += 1
        return counts

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
        """Open a lease on `blocks`, or return what this writer has for this attempt (then `blocks` are not taken).

        A lease of an older attempt, or of another writer of this one, is aborted. Raises
        HandoffRefusedError("cancelled") for an attempt that was cancelled, and HandoffRefusedError("stale") while a
        newer one holds a lease or an older one is verified.
        """
        if self._is_cancelled(request_id, attempt):
            raise HandoffRefusedError("cancelled")
        for lease in self._of_request(request_id):
            if lease.state is LeaseState.QUARANTINED:
                continue
            if lease.attempt > attempt or lease.state is LeaseState.VERIFYING:
                raise HandoffRefusedError("stale")
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
        """The writer says that everything is written. Raises HandoffRefusedError: `stale`, `expired` or `cancelled`."""
        if self._is_cancelled(request_id, attempt):
            raise HandoffRefusedError("cancelled")
        lease = self._leases.get(lease_id)
        if lease is None or (
            (lease.generation, lease.request_id, lease.attempt, lease.writer, lease.writer_incarnation)
            != (generation, request_id, attempt, writer, writer_incarnation)
        ):
            raise HandoffRefusedError("stale")
        if lease.state is not LeaseState.RESERVED:
            raise HandoffRefusedError("expired" if lease.state is LeaseState.QUARANTINED else "stale")
        if now >= lease.expires_at:
            lease.move(LeaseState.QUARANTINED)
            raise HandoffRefusedError("expired")
        lease.move(LeaseState.VERIFYING)
        return lease

    def accept(self, lease_id: int) -> list[int]:
        """The digests fit: the blocks are the sequence's now."""
        return self._end(lease_id, LeaseState.ACCEPTED)

    def reject(self, lease_id: int) -> list[int]:
        """The manifest was refused; its writer writes no more: the blocks may be used again."""
        return self._end(lease_id, LeaseState.RELEASED)

    def cancel(self, now: float, request_id: str, attempt: int) -> Lease | None:
        """Give up attempts up to `attempt`, and refuse them from now on; return the lease that was open, if any."""
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
        """Give up the leases whose time is over; return them, so that their writers can be told."""
        late = [
            lease for lease in self._leases.values() if lease.state is LeaseState.RESERVED and now >= lease.expires_at
        ]
        for lease in late:
            lease.move(LeaseState.QUARANTINED)
        return late

    def give_up(self, lease_id: int) -> bool:
        """Nobody will write under this lease, as far as its writer knows; return whether it was open."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.RESERVED:
            return False
        lease.move(LeaseState.QUARANTINED)
        return True

    def writer_done(self, *, lease_id: int, generation: int, writer_incarnation: int) -> list[int]:
        """The writer gave the lease up and no write of it is in flight: return the blocks that are free now."""
        lease = self._leases.get(lease_id)
        if lease is None or (lease.generation, lease.writer_incarnation) != (generation, writer_incarnation):
            return []
        if lease.state is LeaseState.VERIFYING:
            return []  # the verdict ends it
        return self._end(lease_id, LeaseState.RELEASED)

    def fence(self, writer: str, writer_incarnation: int) -> list[int]:
        """No write of this incarnation can land any more: free all that it could have written."""
        freed: list[int] = []
        for lease in list(self._leases.values()):
            its = (lease.writer, lease.writer_incarnation) == (writer, writer_incarnation)
            if its and lease.state is not LeaseState.VERIFYING:
                freed += self._end(lease.lease_id, LeaseState.RELEASED)
        return freed

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
