"""The prefill worker's side of one handoff, without I/O: what to push next, and the manifest.

    COMPUTING ──reserved──▶ STREAMING ──all blocks pushed──▶ COMPLETE ──handed_off──▶ HANDED_OFF
        └───────────────────────┴──────────── abort ────────────┴──▶ ABORTED

Full blocks can be pushed as soon as they are computed, the last partial one and the state's after the last chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.blocks import unpack_tokens
from common.errors import HandoffRefusedError
from common.messages import ReserveReply
from common.words import Refusal


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
    """Blocks to push in one go: `indices` into the prompt's blocks, and their places in the receiver's pool.

    The blocks are those of its tokens, then those of the state behind them.
    """

    indices: list[int]
    destination_blocks: list[int]


class Sender:
    """State of one (request, attempt). At most one run is in flight."""

    def __init__(self, *, num_tokens: int, block_size: int, state_blocks: int = 0) -> None:
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._num_blocks = -(-num_tokens // block_size) + state_blocks
        self._num_computed_blocks = 0
        self._first_block = 0
        self._destinations: list[int] = []
        self._num_pushed = 0  # blocks, counted from `first_block`
        self._digests = bytearray()
        self._in_flight: Run | None = None
        self.state = SenderState.COMPUTING

    def reserved(self, reply: ReserveReply) -> None:
        """A lease was granted. Raises HandoffRefusedError when it doesn't fit this prompt."""
        destinations = unpack_tokens(reply.destination_blocks)
        if reply.first_block + len(destinations) != self._num_blocks:
            what = f"the lease has {reply.first_block} + {len(destinations)} blocks, the prompt {self._num_blocks}"
            raise HandoffRefusedError(Refusal.INVALID, what)
        self._first_block = reply.first_block
        self._destinations = destinations
        self._move(SenderState.STREAMING)
        self._complete_if_done()

    def computed(self, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is final."""
        full = num_tokens // self._block_size
        blocks = self._num_blocks if num_tokens >= self._num_tokens else full
        self._num_computed_blocks = max(self._num_computed_blocks, blocks)

    def next_run(self) -> Run | None:
        """Take all blocks that are computed, have a destination and were not pushed; None if there are none."""
        if self.state is not SenderState.STREAMING or self._in_flight is not None:
            return None
        start, end = self._first_block + self._num_pushed, self._num_computed_blocks
        if start >= end:
            return None
        self._in_flight = Run(
            indices=list(range(start, end)),
            destination_blocks=self._destinations[start - self._first_block : end - self._first_block],
        )
        return self._in_flight

    def pushed(self, run: Run, digests: bytes) -> None:
        """A run arrived. `digests`: packed u64, one a block. Raises HandoffRefusedError when their number is wrong."""
        if run is not self._in_flight:
            raise RuntimeError("this run is not in flight")
        self._in_flight = None
        if len(digests) != 8 * len(run.indices):
            raise HandoffRefusedError(Refusal.INCOMPLETE, "the transport returned a wrong number of digests")
        self._digests += digests
        self._num_pushed += len(run.indices)
        self._complete_if_done()

    def failed(self) -> None:
        """The run in flight raised, and none of its writes will land."""
        self._in_flight = None

    def manifest(self) -> bytes | None:
        """The digests of all pushed blocks, in order, once every block was pushed."""
        return bytes(self._digests) if self.state is SenderState.COMPLETE else None

    def handed_off(self) -> None:
        """The receiver accepted the manifest."""
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
