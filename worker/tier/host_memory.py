"""The memory of the host tier, and copies between it and the device's pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from threading import Lock
from typing import Protocol

import torch

from common.pages import KVLayout
from engine.groups import Entry
from kvtransfer.digest import block_digests
from kvtransfer.host import added
from worker.tier.host_store import HostStore, Write

# Pinning takes tenths of a second a GiB: memory comes in pieces, once a block is stored there.
CHUNK_BYTES = 1 << 30
DIGEST_BYTES = 8


Answers = Callable[[], list[bytes]]


class Further(Protocol):
    """The further ranks' shares. Each call begins at once; what it returns waits for the digests, a rank's each."""

    num_ranks: int

    def store(self, slots: Sequence[int], blocks: Sequence[int]) -> Answers: ...

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Answers: ...

    def close(self) -> None:
        """Let go of who waits for them."""


class HostMemory:
    """Slots of one block each, pinned where the pool is on a GPU. One thread at a time copies; others may use slots.

    The digest is always that of the bytes on the device: what either copy or the memory in between changes is found. Digests
    of several ranks' shares are added.
    """

    def __init__(self, kv: torch.Tensor, layout: KVLayout, store: HostStore, further: Further | None = None) -> None:
        self._kv, self._layout, self.store = kv, layout, store
        self._further = further
        self._blocks = kv.view(len(kv), -1).view(torch.uint8)
        self._slots_a_chunk = max(1, CHUNK_BYTES // self.block_bytes)
        self._chunks: dict[int, torch.Tensor] = {}
        self._taking = Lock()  # held while a chunk comes
        self._stream = torch.cuda.Stream(kv.device) if kv.is_cuda else None

    @property
    def block_bytes(self) -> int:
        return self._blocks.shape[1]

    @property
    def num_ranks(self) -> int:
        return 1 if self._further is None else 1 + self._further.num_ranks

    @property
    def all_bytes(self) -> int:
        """Bytes of a block on all ranks: each has as many."""
        return self.num_ranks * self.block_bytes

    def leave(self) -> None:
        """Wait for further ranks no more: the worker ends."""
        if self._further is not None:
            self._further.close()

    def fill(self, writes: Sequence[Write], entries: Sequence[Mapping[int, Entry]]) -> None:
        """Copy entries of the pool into the slots of writes, by group, as far as there are slots.

        Raises MemoryError, or the device's RuntimeError.
        """
        with self.store.filling(writes):
            there = [(write, blocks) for write, blocks in zip(writes, entries, strict=True) if write.slots]
            slots = [*chain(*(chain(*write.slots.values()) for write, _ in there))]
            blocks = [*chain(*(chain(*(blocks[number] for number in write.slots)) for write, blocks in there))]
            sums = sums_of(self.store_blocks(slots, blocks))
            for write, _ in there:
                write.sums = {number: b"".join(islice(sums, len(entry))) for number, entry in write.slots.items()}

    def store_blocks(self, slots: Sequence[int], blocks: Sequence[int]) -> bytes:
        """Copy blocks of the pool into slots; return these blocks' digests. Raises as `fill`."""
        theirs = None if self._further is None else self._further.store(slots, blocks)
        pairs = ((self.slot(slot), self._blocks[block]) for block, slot in zip(blocks, slots, strict=True))
        return self._copied(pairs, blocks, theirs)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> bytes:
        """Copy slots into blocks of the pool, which are nobody else's; return these blocks' digests. Raises as `fill`."""
        theirs = None if self._further is None else self._further.load(slots, blocks)
        pairs = ((self._blocks[block], self.slot(slot)) for block, slot in zip(blocks, slots, strict=True))
        return self._copied(pairs, blocks, theirs)

    def _copied(
        self, pairs: Iterator[tuple[torch.Tensor, torch.Tensor]], blocks: Sequence[int], theirs: Answers | None
    ) -> bytes:
        """Copy, and return the blocks' digests with those of further ranks. No copy is in flight at the end."""
        try:
            self._copy([*pairs])
            own = block_digests(self._kv, blocks, self._layout)
        finally:
            further = [] if theirs is None else theirs()
        return added([own, *further]) if further else own

    def slot(self, number: int) -> torch.Tensor:
        """The bytes of a slot."""
        at, place = divmod(number, self._slots_a_chunk)
        if at not in self._chunks:
            with self._taking:
                if at not in self._chunks:
                    count = min(self._slots_a_chunk, self.store.num_slots - at * self._slots_a_chunk)
                    shape = count, self.block_bytes
                    first, is_pinned = at * self._slots_a_chunk, self._stream is not None
                    self._chunks[at] = self.store.chunk(first, shape, is_pinned=is_pinned)
        return self._chunks[at][place]

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.device(self._kv.device), torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._stream.synchronize()


def sums_of(result: bytes | Exception) -> Iterator[bytes]:
    """The digest of each block that was copied; none without a result."""
    packed = b"" if isinstance(result, Exception) else result
    return (packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES))
