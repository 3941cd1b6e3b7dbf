"""The host tier: what eviction is about to take is copied to host memory, and copied back for a prompt that begins with it.

    pool ──released──▶ queue ──store──▶ host blocks ──load──▶ pool, published again

No allocation waits. Blocks are copied in the order of their release, while they are still cached; one that is
evicted before its copy landed is lost, and the copy dropped. A load fills fresh blocks and publishes them: admission then
finds them like all others. See docs/kv.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from functools import partial
from itertools import chain, islice

from common.messages import HostTierTotals
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.cache.changes import Chain
from engine.sequence import Sequence
from worker.serving.allocation import digests_of
from worker.tier.copier import Copier, Copies
from worker.tier.file_tier import Fetch, FileTier
from worker.tier.host_blocks import HostBlocks
from worker.tier.host_memory import HostMemory, sums_of
from worker.tier.in_flight import Lent, Load, Piece, Store
from worker.tier.prefixes import LowerPrefixes, count_resumable
from worker.tier.shares import Owner

log = logging.getLogger("baton.tier")

# Share of the pool. With fewer blocks empty, what eviction takes next is stored: a long prompt evicts much at once.
WATERMARK = 0.5
STORED_AT_ONCE = 32  # blocks of a copy, for whose end a load waits
SECOND_SIGHT_POOLS = 12  # nothing gives way to what is seen once in a smaller tier


class HostTier:
    """Owned by the event loop; `copier` copies elsewhere. `wake()` is called when a prompt may be admitted."""

    def __init__(self, pool: BlockPool, memory: HostMemory, *, copier: Copier, wake: Callable[[], object]) -> None:
        num_slots = memory.store.num_slots
        self._pool, self._memory = pool, memory
        self._copies, self._wakes = Copies(copier), [wake]
        self.blocks = HostBlocks(memory.store, second_sight=num_slots < SECOND_SIGHT_POOLS * pool.num_blocks)
        self.files: FileTier | None = None  # below it
        self.prefixes = LowerPrefixes(pool, self._is_below)
        self.blocks.listener = self.prefixes.gate(self.blocks)
        self._queue: dict[bytes, None] = {}  # cached and not yet stored, in the order of release
        self._storing: dict[bytes, Store] = {}
        self._loads: dict[Sequence | Lent, Load | Fetch] = {}
        self._loading: list[Load] = []  # also of prompts that left
        self._sharing: set[Sequence | Lent] = set()  # wait for another prompt's load
        self._is_off = False  # there is no memory
        self._is_settling = False
        self.is_asked = False  # prompts are computed here, or peers pull what is cached
        self._stored = self._loaded = self._lost = self._bad = self._hit_tokens = 0
        pool.watcher = self

    # -- what the pool tells -------------------------------------------------------------------------------------------

    def cached(self, digest: bytes) -> None:
        self.blocks.released(digest, self._owner_of(digest), was_found=self._pool.was_found(digest))
        if not self._is_off:
            self._queue.pop(digest, None)
            self._queue[digest] = None

    def _owner_of(self, digest: bytes) -> Owner | None:
        return Owner.of(self._pool.charged(digest))

    def forgotten(self, digest: bytes) -> None:
        if (store := self._storing.get(digest)) is not None:
            store.write.is_void = True  # the pool may write to the blocks
        self.prefixes.forgotten(digest)
        if self._pool.entries_of(digest):
            return
        if digest in self._queue:
            del self._queue[digest]
            self._lost += digest not in self.blocks
        self.blocks.left(digest)

    def withdrawn(self, digest: bytes) -> None:
        self.blocks.forget(digest)
        self._queue.pop(digest, None)
        if (store := self._storing.get(digest)) is not None:
            store.write.is_void = True
        self._settle()

    def _settle(self) -> None:
        """Free shared slots whose content is wrong."""
        if self._memory.store.owes and not self._is_settling and not self._copies.are_late:
            self._is_settling = True
            self._copies.submit(self._memory.store.settle, self._were_settled, num_bytes=0)

    def _were_settled(self, _: Exception | None) -> None:
        self._is_settling = False

    # -- storing -------------------------------------------------------------------------------------------------------

    def store_ahead(self) -> None:
        """Store what eviction takes next while few blocks are empty, if prompts are computed here.

        One copy is on its way at a time.
        """
        self._settle()
        if self.files is not None:
            self.files.write_ahead()
        if (
            self._storing
            or self._copies.are_late
            or not self._queue
            or not self.is_asked
            or self._pool.num_empty > WATERMARK * self._pool.num_blocks
        ):
            return
        self.blocks.catch_up()
        num_blocks = 0
        while self._queue and num_blocks < STORED_AT_ONCE:
            digest = next(iter(self._queue))
            del self._queue[digest]
            store = self._reserved(digest)
            if store is not None:
                self._storing[digest] = store
                num_blocks += sum(map(len, store.entries.values()))
        if self._storing:
            stores = [*self._storing.values()]
            writes, entries = [store.write for store in stores], [store.entries for store in stores]
            self._copies.submit(
                partial(self._memory.fill, writes, entries),
                partial(self._were_stored, stores),
                num_bytes=num_blocks * self._memory.all_bytes,
            )

    def _reserved(self, digest: bytes) -> Store | None:
        """Slots for the groups' entries of a block that the tier lacks."""
        entries, known, was_found = self._pool.entries_of(digest), self.blocks.get(digest), self._pool.was_found(digest)
        lacking = {number: entry for number, entry in entries.items() if not self.blocks.has(number, digest)}
        sizes = {number: len(entry) for number, entry in lacking.items()}
        claimed_late = self._storing.values() if self._memory.store.is_shared else ()  # by the thread that copies
        num_slots = sum(sizes.values()) + sum(store.write.num_slots for store in claimed_late)
        if 0 not in entries or not self.blocks.admits(digest, was_found=was_found, num_slots=num_slots) or not lacking:
            return None
        if known is not None:
            self.blocks.begin_use(known)
        write = self.blocks.reserve(digest, sizes, self._owner_of(digest))
        if write is None:
            if known is not None:
                self.blocks.end_use(known)
            return None
        return Store(write, lacking, known, was_found)

    def _were_stored(self, stores: ListOf[Store], result: Exception | None) -> None:
        if result is not None:
            log.warning("tier.stores_no_more", extra={"error": str(result)})
            self._is_off = True
            self._queue.clear()
        for store in stores:
            write, known = store.write, store.known
            if result is not None or write.is_void or not write.slots or (known is not None and known.is_gone):
                self.blocks.drop(write)
                self._lost += 1
            else:
                self.blocks.add(write, was_found=store.was_found)
                self.prefixes.stored(write.digest)
                self._stored += sum(map(len, write.slots.values()))
            if store.known is not None:
                self.blocks.end_use(store.known)
        self._storing.clear()
        self.store_ahead()

    # -- loading -------------------------------------------------------------------------------------------------------

    def is_loading(
        self, sequence: Sequence | Lent, *, has_room: Callable[[], bool], is_hit: bool = True, reads: bool = True
    ) -> bool:
        """True while a prompt's prefix is copied back, which begins if host memory has more of it than the pool.

        It begins once for a prompt, and only when `has_room()`: when all of the prompt could be admitted. It waits for another's
        that brings what it lacks. Not `is_hit`: for one that is computed elsewhere; not `reads`: without what files have.
        """
        self.is_asked = True
        load = self._loads.get(sequence)
        if load is not None and load.is_over and sequence in self._sharing:
            self._sharing.remove(sequence)
            load = None
        if load is None:
            self.blocks.catch_up()
        if load is None and (len(self.blocks) or self._has_files) and has_room():
            load = (reads and self._begin_fetch(sequence, is_hit)) or self._begin(sequence, is_hit)
        elif isinstance(load, Fetch) and load.is_over:
            if not has_room():
                return False
            load = self._begin(sequence, is_hit) or Load(is_over=True)
        if load is None:
            return False
        self._loads[sequence] = load
        return not load.is_over

    def also_wake(self, wake: Callable[[], object]) -> None:
        self._wakes.append(wake)

    def _wake(self) -> None:
        for wake in self._wakes:
            wake()

    @property
    def _has_files(self) -> bool:
        return self.files is not None and len(self.files.blocks) > 0

    def loads(self, sequence: Sequence) -> bool:
        """True while a prompt's prefix is copied back."""
        load = self._loads.get(sequence)
        return load is not None and not load.is_over

    @property
    def held(self) -> list[int]:
        """Blocks with a reference of a load in flight."""
        return [*chain(*(load.blocks for load in self._loading))]

    def left(self, sequence: Sequence | Lent) -> None:
        """Forget a prompt that was admitted, or is wanted no more; what is still copied becomes cached."""
        self._loads.pop(sequence, None)
        self._sharing.discard(sequence)

    def _digests_of(self, sequence: Sequence | Lent) -> list[bytes]:
        """Digests of the blocks that a prompt may find."""
        if isinstance(sequence, Lent):
            return sequence.digests
        return [] if sequence.scores_prompt else digests_of(self._pool, sequence)

    def _is_here(self, number: int, digest: bytes) -> bool:
        return self._pool.has(number, digest) or self.blocks.has(number, digest)

    def _is_below(self, number: int, digest: bytes) -> bool:
        return self.blocks.has(number, digest) or (self.files is not None and self.files.blocks.has(number, digest))

    def _begin_fetch(self, sequence: Sequence | Lent, is_hit: bool) -> Fetch | None:
        """Read what files have of a prompt beyond the pool and host memory, into the latter."""
        files, pool, size = self.files, self._pool, self._pool.block_size
        if files is None or not len(files.blocks):
            return None
        digests = self._digests_of(sequence)
        here = count_resumable(pool, digests, self._is_here)
        count = count_resumable(
            pool, digests, lambda number, digest: pool.has(number, digest) or self._is_below(number, digest)
        )
        if count <= here:
            return None
        if (fetch := next((fetch for fetch in files.fetches if fetch.brings(digests[here])), None)) is not None:
            self._sharing.add(sequence)
            return fetch
        self.prefixes.asked(Chain(sequence.hash_root, digests[:count], sequence.token_ids, size))
        lacking = dict[bytes, dict[int, int]]()
        for at in range(count):
            for number, group in enumerate(pool.groups):
                if at >= group.first_seen(count * size) and not self._is_here(number, digests[at]):
                    lacking.setdefault(digests[at], {})[number] = group.blocks
        for digest in reversed(digests[:count]):
            self.blocks.touch(digest)  # it is needed, too
        return files.fetch([*lacking.items()], wake=self._wake, is_hit=is_hit)

    def _begin(self, sequence: Sequence | Lent, is_hit: bool) -> Load | None:
        if not len(self.blocks) or self._copies.are_late:
            return None
        pool, size, digests = self._pool, self._pool.block_size, self._digests_of(sequence)
        here, count = count_resumable(pool, digests, pool.has), count_resumable(pool, digests, self._is_here)
        if count <= here:
            return None
        if (load := next((load for load in self._loading if load.brings(digests[here])), None)) is not None:
            self._sharing.add(sequence)
            return load
        self.prefixes.asked(Chain(sequence.hash_root, digests[:count], sequence.token_ids, size))
        load, lacking = Load([*digests[:count]], hold=sequence.hold, is_hit=is_hit), list[tuple[int, int]]()
        for number, group in enumerate(pool.groups):
            for at in range(group.first_seen(count * size), count):
                if pool.has(number, digests[at]):
                    load.held.append(pool.hold(number, digests[at]))
                else:
                    lacking.append((at, number))
        wanted = sum(pool.groups[number].blocks for _, number in lacking)
        try:
            fresh = iter(pool.allocate(wanted))
        except OutOfBlocksError:
            pool.release([*chain(*load.held)])
            return None
        for at, number in sorted(lacking):
            source = self.blocks.get(digests[at])
            assert source is not None, "it has the entry"
            self.blocks.begin_use(source)
            load.pieces.append(Piece(number, at, tuple(islice(fresh, pool.groups[number].blocks)), source))
        for digest in reversed(load.digests):
            self.blocks.touch(digest, was_found=True)
        slots = [*chain(*(piece.source.slots[piece.number] for piece in load.pieces))]
        blocks = [*chain(*(piece.entry for piece in load.pieces))]
        self._loading.append(load)
        self._copies.submit(
            partial(self._memory.load, slots, blocks),
            partial(self._were_loaded, load),
            num_bytes=len(blocks) * self._memory.all_bytes,
            given_up=partial(self._give_up, load),
        )
        return load

    def _give_up(self, load: Load) -> None:
        """Let the prompt compute its tokens."""
        load.is_over = True
        self._wake()

    def _were_loaded(self, load: Load, result: bytes | Exception) -> None:
        """Publish the entries whose bytes are those that were stored, and let go of all: nobody who waits holds blocks."""
        if isinstance(result, Exception):
            log.warning("tier.not_loaded", extra={"error": str(result)})
        self.blocks.catch_up()
        sums = sums_of(result)
        for piece in load.pieces:
            found = b"".join(islice(sums, len(piece.entry)))
            if piece.source.is_gone:
                pass  # its tokens proved wrong meanwhile, or another worker has the slots
            elif found == piece.source.sums[piece.number]:
                self._pool.publish_entry(piece.number, piece.entry, load.digests, piece.at + 1)
                self._loaded += len(piece.entry)
                self._hit_tokens += self._pool.block_size if load.is_hit and piece.number == 0 else 0
            elif not self._memory.store.is_kept(slots := piece.source.slots[piece.number]):
                self.blocks.went(piece.source.digest, slots)  # `catch_up` is bounded: it did not tell yet
            elif isinstance(result, Exception):
                self.blocks.unread(piece.source.digest)
            else:
                self._bad += 1
                self.blocks.forget(piece.source.digest)
            self.blocks.end_use(piece.source)
        blocks = load.blocks
        self._loading.remove(load)
        self._pool.count_as_hit(blocks)  # somebody asks for them now
        self._pool.release(blocks, load.hold)
        load.is_over = True
        self._settle()
        self._wake()

    # -- what others hear ----------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Tiers below the pool."""
        return 1 if self.files is None else 2

    def tier_of(self, digest: bytes) -> int | None:
        """1 for a block in host memory, 2 for one in a file alone, None for others."""
        if digest in self.blocks:
            return 1
        return 2 if self.files is not None and digest in self.files.blocks else None

    def __iter__(self) -> Iterator[bytes]:
        below = () if self.files is None else (digest for digest in self.files.blocks if digest not in self.blocks)
        return chain(self.blocks, below, self.prefixes)

    def resumes(self, digest: bytes) -> bool:
        """True if a block of these tiers, or of the pool with what they have, is a prefix's that can be resumed."""
        return digest in self.prefixes

    def drain_changed(self) -> list[bytes]:
        """Digests that came to a tier or left it since the last call, each once."""
        self.blocks.catch_up()
        files = [] if self.files is None else self.files.blocks.drain_removed()
        changed = chain(self.blocks.drain_changed(), files, self.prefixes.drain_changed())
        return [*dict.fromkeys(changed)]

    def totals(self) -> HostTierTotals:
        size = self._memory.all_bytes
        return HostTierTotals(
            capacity_bytes=self.blocks.num_slots * size,
            used_bytes=self.blocks.num_used * size,
            stored_blocks=self._stored,
            loaded_blocks=self._loaded,
            evicted_blocks=self.blocks.evicted,
            surplus_blocks=self.blocks.evicted_surplus,
            lost_blocks=self._lost,
            bad_digests=self._bad,
            failed_copies=self._copies.failed,
            hit_tokens=self._hit_tokens,
            load_bytes_per_s=self._copies.bytes_per_s,
        )

    def file_totals(self) -> HostTierTotals | None:
        return None if self.files is None else self.files.totals(self._pool.block_size)

    def close(self) -> None:
        self._is_off = True
        self._queue = {}
        self._memory.leave()
        have_ended = [self._copies.close(), self.files is None or self.files.close()]
        if all(have_ended):  # else this process may still write
            self._memory.store.close()
