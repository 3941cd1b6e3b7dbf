"""The file tier: what host memory is about to give up is written to files, and read back for a prompt that begins with it.

    host blocks ──used longest ago──▶ queue ──write──▶ files ──read──▶ host blocks

A block is written once it was found again, or leaves host memory for the second time. Writes and reads have a thread each: no
pass waits for a disk, and no read for a write. See docs/kv.md.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from common.messages import HostTierTotals
from engine.groups import Entry
from worker.tier.copier import Copies, Copy
from worker.tier.file_blocks import FileBlocks
from worker.tier.host_blocks import HostBlock, HostBlocks, SecondSight
from worker.tier.host_memory import HostMemory
from worker.tier.host_store import Write
from worker.tier.kv_files import KVFiles, Stored, TornFileError
from worker.tier.ranks.asking import FurtherFiles
from worker.tier.shares import Owner

log = logging.getLogger("baton.tier")

# Share of the host's slots. With fewer of them free, what goes next is written.
WATERMARK = 0.5
WRITTEN_AT_ONCE = 32  # slots of a write, which nobody else gets meanwhile
READ_SHARE = 0.5  # share of the host's slots that one prompt's read takes
PAUSE_S = 30.0  # after a write that failed: the disk may be full
BYTES_OF_HEADER = 4_096


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefix on its way into host memory."""

    writes: dict[bytes, Write] = field(default_factory=dict)
    is_hit: bool = True  # the prompt is computed here
    is_over: bool = False

    def brings(self, digest: bytes) -> bool:
        return not self.is_over and digest in self.writes


class FileTier:
    """Owned by the event loop, below `host`."""

    def __init__(
        self,
        host: HostBlocks,
        memory: HostMemory,
        files: KVFiles,
        blocks: FileBlocks,
        *,
        writes: Copies,
        reads: Copies,
        clock: Callable[[], float] = time.monotonic,
        further: FurtherFiles | None = None,
    ) -> None:
        self._host, self._memory, self._files, self._further = host, memory, files, further
        self._writes, self._reads = writes, reads
        self._clock = clock
        self.blocks = blocks
        self._second_sight = SecondSight(host.num_slots)
        self._queue: dict[bytes, None] = {}  # host blocks, the one used longest ago first
        self._writing: list[HostBlock] = []
        self.fetches: list[Fetch] = []
        self._resumes_at = 0.0
        self._written = self._read = self._lost = self._torn = self._hit_blocks = 0
        host.below = self

    # -- what host memory tells ----------------------------------------------------------------------------------------

    def used(self, digest: bytes) -> None:
        self.blocks.touch(digest)
        self._queue.pop(digest, None)
        self._queue[digest] = None

    def common(self, digest: bytes) -> None:
        self.blocks.common(digest)

    def left(self, block: HostBlock) -> None:
        if block.digest in self._queue:
            del self._queue[block.digest]
            self._lost += self._is_wanted(block)
        self._second_sight.left(block.digest)

    def wrong(self, digest: bytes) -> None:
        self._queue.pop(digest, None)
        for fetch in self.fetches:
            if digest in fetch.writes:  # its tokens proved wrong
                fetch.writes[digest].is_void = True
        if (stored := self.blocks.forget(digest)) is not None:
            self._remove_at_once(digest, stored)

    # -- writing -------------------------------------------------------------------------------------------------------

    def write_ahead(self) -> None:
        """Write what host memory gives up next while few of its slots are free. One write is on its way at a time."""
        if (
            self._writing
            or self._writes.are_late
            or not self._queue
            or self._host.num_used < (1 - WATERMARK) * self._host.num_slots
            or self._clock() < self._resumes_at
        ):
            return
        self._take_writes()
        if self._writing:
            blocks = [*self._writing]
            charged = Counter[Owner | None]()
            for block in blocks:
                charged[block.owner] += len(block.all_slots) * self._memory.block_bytes + BYTES_OF_HEADER
            size = charged.total()
            before = [(block.digest, stored) for block in blocks if (stored := self.blocks.forget(block.digest))]
            gone = before + self.blocks.make_room(size, charged)
            entries = [
                {number: (block.sums[number], slots) for number, slots in block.slots.items()} for block in blocks
            ]
            digests = [block.digest for block in blocks]
            self._writes.submit(
                partial(self._write, gone, digests, entries), partial(self._were_written, blocks), num_bytes=size
            )

    def _take_writes(self) -> None:
        num_slots = 0
        while self._queue and num_slots < WRITTEN_AT_ONCE:
            digest = next(iter(self._queue))
            del self._queue[digest]
            block = self._host.get(digest)
            if block is not None and self._is_wanted(block):
                self._host.begin_use(block)
                self._writing.append(block)
                num_slots += len(block.all_slots)

    def _is_wanted(self, block: HostBlock) -> bool:
        stored = self.blocks.get(block.digest)
        if stored is not None and stored.numbers >= block.slots.keys():
            return False
        return block.was_found or stored is not None or self._second_sight.admits(block.digest)

    def _write(
        self,
        gone: Sequence[tuple[bytes, Stored]],
        digests: Sequence[bytes],
        entries: Sequence[Mapping[int, tuple[bytes, Entry]]],
    ) -> list[Stored]:
        """Remove and write files, as far as the disks of all ranks take them; on the thread of writes."""
        further = None
        if self._further is not None:
            slots = [{number: slots for number, (_, slots) in groups.items()} for groups in entries]
            further = self._further.write(gone, digests, slots)
        self._files.remove(gone)
        written = list[Stored]()
        for digest, groups in zip(digests, entries, strict=True):
            views = {number: (sums, self._views(slots)) for number, (sums, slots) in groups.items()}
            try:
                written.append(self._files.write(digest, views))
            except OSError as error:
                log.warning("tier.file_not_written", extra={"error": str(error)})
                break
        count = len(written) if further is None else min(len(written), further())
        if count < len(digests):  # no rank keeps what another lacks
            tried = [(digest, Stored(frozenset(groups), 0)) for digest, groups in zip(digests, entries, strict=True)]
            self._remove_everywhere(tried[count:])
        return written[:count]

    def _remove_everywhere(self, gone: Sequence[tuple[bytes, Stored]]) -> None:
        self._files.remove(gone)
        if self._further is not None:
            self._further.remove(gone)

    def _were_written(self, blocks: Sequence[HostBlock], result: list[Stored] | Exception) -> None:
        written = [] if isinstance(result, Exception) else result
        if len(written) < len(blocks):
            self._resumes_at = self._clock() + PAUSE_S
            self._writes.failed += not isinstance(result, Exception)
        for block, stored in zip(blocks, written, strict=False):
            if block.is_gone:  # its tokens proved wrong meanwhile
                self._remove_at_once(block.digest, stored)
            else:
                self.blocks.add(block.digest, stored, block.owner)
                self._written += sum(map(len, block.slots.values()))
        for block in blocks:
            self._host.end_use(block)
        self._writing.clear()
        self._remove(self.blocks.make_room(0))
        self.write_ahead()

    def _remove_at_once(self, digest: bytes, stored: Stored) -> None:
        """Remove a wrong file now: `Copies.close` or a crash drops what is queued, and the next process would take it in."""
        self._remove_everywhere([(digest, stored)])
        self._remove([(digest, stored)])

    def _remove(self, gone: Sequence[tuple[bytes, Stored]]) -> None:
        if gone:
            self._writes.submit(partial(self._remove_everywhere, gone), lambda _: None, num_bytes=0)

    # -- reading -------------------------------------------------------------------------------------------------------

    def fetch(
        self, wanted: Sequence[tuple[bytes, Mapping[int, int]]], *, wake: Callable[[], object], is_hit: bool = True
    ) -> Fetch | None:
        """Read blocks' entries into host memory: so many slots of each group. None if that can't begin now."""
        if not wanted or self._reads.are_late:
            return None
        fetch, files, num_slots = Fetch(is_hit=is_hit), dict[bytes, Stored](), 0
        for digest, sizes in wanted:
            stored, num_slots = self.blocks.get(digest), num_slots + sum(sizes.values())
            if stored is None or num_slots > READ_SHARE * self._host.num_slots:
                break
            write = self._host.reserve(digest, sizes, self.blocks.owner(digest))
            if write is None:
                break
            fetch.writes[digest], files[digest] = write, stored
        if not fetch.writes:
            return None
        for digest in reversed(files):
            self.blocks.touch(digest)

        def over(result: bytes | Exception | None) -> None:
            self._were_read(fetch, files, result)
            fetch.is_over = True
            wake()

        def given_up() -> None:
            fetch.is_over = True
            wake()

        self.fetches.append(fetch)
        read: Copy[bytes | None] = partial(self._read_files, files, fetch.writes)
        self._reads.submit(read, over, num_bytes=num_slots * self._memory.all_bytes, given_up=given_up)
        return fetch

    def _read_files(self, files: Mapping[bytes, Stored], writes: Mapping[bytes, Write]) -> bytes | None:
        """Read up to the first file that is not what was written, and name it; on the thread of reads."""
        further = None
        if self._further is not None:
            further = self._further.read([*files], [writes[digest].slots for digest in files])
        torn = self._read_own(files, writes)
        if further is None:
            return torn
        missing = [*files][further() :]
        for digest in missing:
            writes[digest].sums = {}
        return torn if torn is not None and torn not in missing else next(iter(missing), None)

    def _read_own(self, files: Mapping[bytes, Stored], writes: Mapping[bytes, Write]) -> bytes | None:
        with self._memory.store.filling([*writes.values()]):
            for digest, stored in files.items():
                try:
                    into = {number: self._views(entry) for number, entry in writes[digest].slots.items()}
                    if not into:
                        break
                    writes[digest].sums = self._files.read(digest, stored, into)
                except (OSError, TornFileError) as error:
                    log.warning("tier.file_not_read", extra={"error": str(error)})
                    return digest
        return None

    def _were_read(self, fetch: Fetch, files: Mapping[bytes, Stored], result: bytes | Exception | None) -> None:
        self.fetches.remove(fetch)
        for digest, write in fetch.writes.items():
            if write.sums and write.slots and not write.is_void and not isinstance(result, Exception):
                self._host.add(write, was_found=True)
                self._read += sum(map(len, write.slots.values()))
                self._hit_blocks += fetch.is_hit and 0 in write.slots
                continue
            self._host.drop(write)
            if digest == result and self.blocks.get(digest) is files[digest]:
                self._torn += 1
                self.blocks.forget(digest)
                self._remove([(digest, files[digest])])

    def _views(self, slots: Entry) -> list[memoryview]:
        return [self._memory.slot(slot).numpy().data for slot in slots]

    # -- what others hear ----------------------------------------------------------------------------------------------

    def totals(self, block_size: int) -> HostTierTotals:
        ranks = self._memory.num_ranks
        return HostTierTotals(
            capacity_bytes=self.blocks.max_bytes * ranks,
            used_bytes=self.blocks.num_bytes * ranks,
            stored_blocks=self._written,
            loaded_blocks=self._read,
            evicted_blocks=self.blocks.evicted,
            surplus_blocks=self.blocks.evicted_surplus,
            lost_blocks=self._lost,
            bad_digests=self._torn,
            failed_copies=self._writes.failed + self._reads.failed,
            hit_tokens=self._hit_blocks * block_size,
            load_bytes_per_s=self._reads.bytes_per_s,
        )

    def close(self) -> bool:
        """End; False if a copy hangs."""
        self._queue = {}
        have_ended = [self._writes.close(), self._reads.close()]
        if all(have_ended):  # else the folder stays this process's
            self._files.close()
        return all(have_ended)
