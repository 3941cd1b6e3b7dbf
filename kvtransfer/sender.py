"""The prefill worker's side of one handoff, without I/O: what to push next, and the manifest.

    COMPUTING ──reserved──▶ STREAMING ──all blocks pushed──▶ COMPLETE ──handed_off──▶ HANDED_OFF
        └───────────────────────┴──────────── abort ────────────┴──▶ ABORTED

Full blocks can be pushed as soon as they are computed, the last partial one and the state's after the last chunk.
`kvtransfer.plan` says which blocks go, and in which order.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum

from common.blocks import unpack_tokens
from common.errors import HandoffRefusedError
from common.messages import ReserveReply
from common.words import Refusal
from kvtransfer.plan import Cargo, Item, blocks_per_entry


class SenderState(Enum):
    COMPUTING = "computing"  # no reservation yet
    STREAMING = "streaming"
    COMPLETE = "complete"  # every block was pushed; the manifest may go
    HANDED_OFF = "handed_off"
    ABORTED = "aborted"


_NEXT = {
    SenderState.COMPUTING: {SenderState.STREAMING, SenderState.ABORTED},
    SenderState.STREAMING: {SenderState.COMPLETE, SenderState.ABORTED},
    SenderState.COMPLETE: {SenderState.HANDED_OFF, SenderState.ABORTED},
    SenderState.HANDED_OFF: set[SenderState](),
    SenderState.ABORTED: set[SenderState](),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Blocks to push in one go, and their places in the receiver's pool."""

    items: list[Item]
    destination_blocks: list[int]


class Sender:
    """The state of one (request, attempt). At most one run is in flight."""

    def __init__(self, cargo: Cargo) -> None:
        self._cargo = cargo
        self._num_computed = 0  # tokens
        self._items: list[Item] = []  # what the receiver lacks
        self._final_at: list[int] = []  # tokens to be computed first, for each
        self._destinations: list[int] = []
        self._num_pushed = 0  # blocks
        self._digests = bytearray()
        self._in_flight: Run | None = None
        self.state = SenderState.COMPUTING

    def reserved(self, reply: ReserveReply) -> None:
        """Record a granted lease. Raises HandoffRefusedError when it doesn't fit this prompt."""
        if reply.region is not None:
            self._cargo = self._cargo.of_blocks(blocks_per_entry(reply.region.layout))
        destinations = unpack_tokens(reply.destination_blocks)
        num_groups = len(self._cargo.groups)
        firsts = [reply.first_block, *reply.first_entries][:num_groups]
        wanted = self._cargo.lacking(firsts + [0] * (num_groups - len(firsts)))
        if len(destinations) != len(wanted) or not 0 <= reply.first_block <= self._cargo.num_blocks:
            of_all = len(self._cargo.lacking([0] * num_groups))
            what = f"the lease has {reply.first_block} + {len(destinations)} blocks, the prompt {of_all}"
            raise HandoffRefusedError(Refusal.INVALID, what)
        self._items, self._destinations = wanted, destinations
        self._final_at = [self._cargo.final_at(item) for item in wanted]
        self._move(SenderState.STREAMING)
        self._complete_if_done()

    def computed(self, num_tokens: int) -> None:
        """Record that the KV of the first `num_tokens` tokens is final."""
        self._num_computed = max(self._num_computed, num_tokens)

    def next_run(self) -> Run | None:
        """Take all blocks that are computed, have a destination and were not pushed; None if there are none."""
        if self.state is not SenderState.STREAMING or self._in_flight is not None:
            return None
        start, end = self._num_pushed, bisect_right(self._final_at, self._num_computed)
        if start >= end:
            return None
        self._in_flight = Run(items=self._items[start:end], destination_blocks=self._destinations[start:end])
        return self._in_flight

    def pushed(self, run: Run, digests: bytes) -> None:
        """Record a completed run. `digests`: packed u64, one a block. Raises HandoffRefusedError when their number is wrong."""
        if run is not self._in_flight:
            raise RuntimeError("this run is not in flight")
        self._in_flight = None
        if len(digests) != 8 * len(run.items):
            raise HandoffRefusedError(Refusal.INCOMPLETE, "the transport returned a wrong number of digests")
        self._digests += digests
        self._num_pushed += len(run.items)
        self._complete_if_done()

    def failed(self) -> None:
        """Record that the run in flight failed; none of its writes will land."""
        self._in_flight = None

    def manifest(self) -> bytes | None:
        """Digests of all pushed blocks, in order, once every block was pushed."""
        return bytes(self._digests) if self.state is SenderState.COMPLETE else None

    def handed_off(self) -> None:
        """Record that the receiver accepted the manifest."""
        self._move(SenderState.HANDED_OFF)

    def abort(self) -> None:
        """Give up and push nothing more."""
        if self.state not in (SenderState.HANDED_OFF, SenderState.ABORTED):
            self._move(SenderState.ABORTED)

    def _complete_if_done(self) -> None:
        if self.state is SenderState.STREAMING and self._num_pushed == len(self._destinations):
            self._move(SenderState.COMPLETE)

    def _move(self, state: SenderState) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"a sender can't go from {self.state.value} to {state.value}")
        self.state = state
