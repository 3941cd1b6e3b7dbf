"""The memory of the host tier, and copies between it and the device's pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from threading import Lock

import torch

from common.pages import KVLayout
from engine.groups import Entry
from kvtransfer.digest import block_digests
from worker.tier.host_store import HostStore, Write

# Pinning takes tenths of a second a GiB: memory comes in pieces, once a block is stored there.
CHUNK_BYTES = 1 << 30
DIGEST_BYTES = 8


class HostMemory:
    """Slots of one block each, pinned where the pool is on a GPU. One thread at a time copies; others may use slots.

    The digest is always that of the bytes on the device: what either copy or the memory in between changes is found.
    """

    def __init__(self, kv: torch.Tensor, layout: KVLayout, store: HostStore) -> None:
        self._kv, self._layout, self.store = kv, layout, store
        self._blocks = kv.view(len(kv), -1).view(torch.uint8)
        self._slots_a_chunk = max(1, CHUNK_BYTES // self.block_bytes)
        self._chunks: dict[int, torch.Tensor] = {}
        self._taking = Lock()  # held while a chunk comes
        self._stream = torch.cuda.Stream(kv.device) if kv.is_cuda else None

    @property
    def block_bytes(self) -> int:
        return self._blocks.shape[1]

    def fill(self, writes: Sequence[Write], entries: Sequence[Mapping[int, Entry]]) -> None:
        """Copy entries of the pool into the slots of writes, by group, as far as there are slots.

        Raises MemoryError, or the device's RuntimeError.
        """
        with self.store.filling(writes):
            there = [(write, blocks) for write, blocks in zip(writes, entries, strict=True) if write.slots]
            slots = [*chain(*(chain(*write.slots.values()) for write, _ in there))]
            blocks = [*chain(*(chain(*(blocks[number] for number in write.slots)) for write, blocks in there))]
            self._copy([(self.slot(slot), self._blocks[block]) for block, slot in zip(blocks, slots, strict=True)])
            sums = sums_of(block_digests(self._kv, blocks, self._layout))
            for write, _ in there:
                write.sums = {number: b"".join(islice(sums, len(entry))) for number, entry in write.slots.items()}

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> bytes:
        """Copy slots into blocks of the pool, which are nobody else's; return these blocks' digests. Raises as `fill`."""
        self._copy([(self._blocks[block], self.slot(slot)) for block, slot in zip(blocks, slots, strict=True)])
        return block_digests(self._kv, blocks, self._layout)

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
