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
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from common.blocks import hash_blocks
from common.messages import HostTierTotals
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.groups import Entry, resumable
from engine.sequence import Hold, Sequence
from worker.tier.copier import Copier, Copy, Over
from worker.tier.host_blocks import HostBlock, HostBlocks
from worker.tier.host_memory import HostMemory

log = logging.getLogger("baton.tier")

# Share of the pool. With fewer blocks empty, what eviction takes next is stored: a long prompt evicts much at once.
WATERMARK = 0.5
STORED_AT_ONCE = 32  # blocks of a copy, for whose end a load waits
SECOND_SIGHT_POOLS = 4  # a smaller tier lets in what is seen again
DIGEST_BYTES = 8
# Time for a copy and those before it in the queue: a prompt waits no longer for what it may as well compute.
COPY_S, COPY_BYTES_PER_S = 5.0, 256e6


@dataclass(slots=True, eq=False)
class _Store:
    """A block on its way into slots."""

    digest: bytes
    entries: dict[int, Entry]
    slots: dict[int, Entry]
    known: HostBlock | None  # has the other groups' entries
    is_void: bool = False  # the pool may have written to the blocks


@dataclass(frozen=True, slots=True)
class _Piece:
    """An entry on its way into the pool."""

    number: int
    at: int
    entry: Entry
    source: HostBlock


@dataclass(slots=True, eq=False)
class _Load:
    """A prefix on its way into the pool, with references on all of its blocks until then."""

    digests: list[bytes] = field(default_factory=list)
    held: list[Entry] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    hold: Hold | None = None  # the prompt's: its tenant is charged
    is_over: bool = False

    @property
    def blocks(self) -> list[int]:
        return [*chain(*self.held, *(piece.entry for piece in self.pieces))]


class HostTier:
    """Owned by the event loop; `copier` copies elsewhere. `wake()` is called when a prompt may be admitted."""

    def __init__(
        self, pool: BlockPool, memory: HostMemory, num_slots: int, *, copier: Copier, wake: Callable[[], object]
    ) -> None:
        self._pool, self._memory = pool, memory
        self._copier, self._wake = copier, wake
        self.blocks = HostBlocks(num_slots, second_sight=num_slots < SECOND_SIGHT_POOLS * pool.num_blocks)
        self._queue: dict[bytes, None] = {}  # cached and not yet stored, in the order of release
        self._storing: dict[bytes, _Store] = {}
        self._loads: dict[Sequence, _Load] = {}
        self._loading: list[_Load] = []  # also of prompts that left
        self._is_off = False  # there is no memory
        self._is_asked = False  # prompts are computed here
        self._late = 0  # copies that take too long: until they land none begins
        self._stored = self._loaded = self._lost = self._bad = self._hit_tokens = self._failed = 0
        pool.watcher = self

    # -- what the pool tells -------------------------------------------------------------------------------------------

    def cached(self, digest: bytes) -> None:
        self.blocks.touch(digest)
        if not self._is_off:
            self._queue.pop(digest, None)
            self._queue[digest] = None

    def forgotten(self, digest: bytes) -> None:
        if (store := self._storing.get(digest)) is not None:
            store.is_void = True
        if digest in self._queue and not self._pool.entries_of(digest):
            del self._queue[digest]
            self._lost += digest not in self.blocks
        self.blocks.left(digest)

    def withdrawn(self, digest: bytes) -> None:
        self.blocks.forget(digest)
        self._queue.pop(digest, None)
        if (store := self._storing.get(digest)) is not None:
            store.is_void = True

    # -- storing -------------------------------------------------------------------------------------------------------

    def store_ahead(self) -> None:
        """Store what eviction takes next while few blocks are empty, if prompts are computed here.

        One copy is on its way at a time.
        """
        if (
            self._storing
            or self._late
            or not self._queue
            or not self._is_asked
            or self._pool.num_empty > WATERMARK * self._pool.num_blocks
        ):
            return
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
            blocks = [*chain(*(chain(*store.entries.values()) for store in stores))]
            slots = [*chain(*(chain(*store.slots.values()) for store in stores))]
            self._copy(
                partial(self._memory.store, blocks, slots), partial(self._were_stored, stores), num_blocks=len(blocks)
            )

    def _reserved(self, digest: bytes) -> _Store | None:
        """Slots for the groups' entries of a block that the tier lacks."""
        entries, known = self._pool.entries_of(digest), self.blocks.get(digest)
        if 0 not in entries or not self.blocks.admits(digest, was_found=self._pool.was_found(digest)):
            return None
        lacking = {number: entry for number, entry in entries.items() if not self.blocks.has(number, digest)}
        if not lacking:
            return None
        if known is not None:
            self.blocks.begin_use(known)
        slots = self.blocks.reserve({number: len(entry) for number, entry in lacking.items()})
        if slots is None:
            if known is not None:
                self.blocks.end_use(known)
            return None
        return _Store(digest, lacking, slots, known)

    def _copy(self, copy: Copy, over: Over, *, num_blocks: int, given_up: Callable[[], None] = lambda: None) -> None:
        """Submit a copy. Nobody waits for one that is late, but what it reads and writes stays its own until it lands."""
        is_late = False

        def late() -> None:
            nonlocal is_late
            is_late = True
            self._late += 1
            self._failed += 1
            log.warning("tier.copy_late", extra={"blocks": num_blocks})
            given_up()

        def landed(result: bytes | Exception) -> None:
            self._late -= is_late
            self._failed += isinstance(result, Exception) and not is_late
            over(result)

        within_s = COPY_S + num_blocks * self._memory.block_bytes / COPY_BYTES_PER_S
        self._copier.submit(copy, landed, late=late, within_s=within_s)

    def _were_stored(self, stores: ListOf[_Store], result: bytes | Exception) -> None:
        if isinstance(result, Exception):
            log.warning("tier.stores_no_more", extra={"error": str(result)})
            self._is_off = True
            self._queue.clear()
        sums = _sums_of(result)
        for store in stores:
            parts = {number: b"".join(islice(sums, len(entry))) for number, entry in store.slots.items()}
            is_bad = isinstance(result, Exception) or store.is_void or (store.known is not None and store.known.is_gone)
            if is_bad:
                self.blocks.give_back(store.slots)
                self._lost += 1
            else:
                self.blocks.add(store.digest, store.slots, parts)
                self._stored += sum(map(len, store.slots.values()))
            if store.known is not None:
                self.blocks.end_use(store.known)
        self._storing.clear()
        self.store_ahead()

    # -- loading -------------------------------------------------------------------------------------------------------

    def is_loading(self, sequence: Sequence, *, has_room: Callable[[], bool]) -> bool:
        """True while a prompt's prefix is copied back, which begins if host memory has more of it than the pool.

        It begins once for a prompt, and only when `has_room()`: when all of the prompt could be admitted.
        """
        self._is_asked = True
        load = self._loads.get(sequence)
        if load is None:
            load = self._begin(sequence) if len(self.blocks) and not self._late and has_room() else None
            if load is None:
                return False
            self._loads[sequence] = load
        return not load.is_over

    def loads(self, sequence: Sequence) -> bool:
        """True while a prompt's prefix is copied back."""
        load = self._loads.get(sequence)
        return load is not None and not load.is_over

    @property
    def held(self) -> list[int]:
        """Blocks with a reference of a load in flight."""
        return [*chain(*(load.blocks for load in self._loading))]

    def left(self, sequence: Sequence) -> None:
        """Forget a prompt that was admitted, or is wanted no more; what is still copied becomes cached."""
        self._loads.pop(sequence, None)

    def _begin(self, sequence: Sequence) -> _Load | None:
        pool, size = self._pool, self._pool.block_size
        if sequence.scores_prompt:
            return None
        digests = hash_blocks(
            sequence.hash_root, sequence.token_ids[: (len(sequence.token_ids) - 1) // size * size], size
        )
        here = self._resumable(digests, pool.has)
        count = self._resumable(
            digests, lambda number, digest: pool.has(number, digest) or self.blocks.has(number, digest)
        )
        if count <= here:
            return None
        load, lacking = _Load(digests[:count], hold=sequence.hold), list[tuple[int, int]]()
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
            load.pieces.append(_Piece(number, at, tuple(islice(fresh, pool.groups[number].blocks)), source))
        for digest in reversed(load.digests):
            self.blocks.touch(digest)
        slots = [*chain(*(piece.source.slots[piece.number] for piece in load.pieces))]
        blocks = [*chain(*(piece.entry for piece in load.pieces))]
        self._loading.append(load)
        self._copy(
            partial(self._memory.load, slots, blocks),
            partial(self._were_loaded, load),
            num_blocks=len(blocks),
            given_up=partial(self._give_up, load),
        )
        return load

    def _give_up(self, load: _Load) -> None:
        """Let the prompt compute its tokens."""
        load.is_over = True
        self._wake()

    def _resumable(self, digests: ListOf[bytes], has: Callable[[int, bytes], bool]) -> int:
        most = next((at for at, digest in enumerate(digests) if not has(0, digest)), len(digests))
        groups = self._pool.groups[1:]
        return resumable(groups, self._pool.block_size, most, lambda number, at: has(number + 1, digests[at]))

    def _were_loaded(self, load: _Load, result: bytes | Exception) -> None:
        """Publish the entries whose bytes are those that were stored, and let go of all: nobody who waits holds blocks."""
        if isinstance(result, Exception):
            log.warning("tier.not_loaded", extra={"error": str(result)})
        sums = _sums_of(result)
        for piece in load.pieces:
            found = b"".join(islice(sums, len(piece.entry)))
            if piece.source.is_gone:
                pass  # its tokens proved wrong meanwhile
            elif found == piece.source.sums[piece.number]:
                self._pool.publish_entry(piece.number, piece.entry, load.digests, piece.at + 1)
                self._loaded += len(piece.entry)
                self._hit_tokens += self._pool.block_size if piece.number == 0 else 0
            else:
                self._bad += not isinstance(result, Exception)
                self.blocks.forget(piece.source.digest)
            self.blocks.end_use(piece.source)
        blocks = load.blocks
        self._loading.remove(load)
        self._pool.count_as_hit(blocks)  # somebody asks for them now
        self._pool.release(blocks, load.hold)
        load.is_over = True
        self._wake()

    # -- what others hear ----------------------------------------------------------------------------------------------

    def totals(self) -> HostTierTotals:
        size = self._memory.block_bytes
        return HostTierTotals(
            capacity_bytes=self.blocks.num_slots * size,
            used_bytes=self.blocks.num_used * size,
            stored_blocks=self._stored,
            loaded_blocks=self._loaded,
            evicted_blocks=self.blocks.evicted,
            lost_blocks=self._lost,
            bad_digests=self._bad,
            failed_copies=self._failed,
            hit_tokens=self._hit_tokens,
        )

    def close(self) -> None:
        self._is_off = True
        self._queue = {}
        self._copier.close()


def _sums_of(result: bytes | Exception) -> Iterator[bytes]:
    """The digest of each block; empty without a result."""
    packed = b"" if isinstance(result, Exception) else result
    return (packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES))
