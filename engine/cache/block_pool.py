"""The block pool: reference counts, and cached contents to share. No tensors, no locks: one owner thread.

A block is in exactly one of three states:

    free     no references, no meaningful content
    used     referenced; published (its digest is known) or not
    cached   published, without references; can be matched again, or evicted when room is needed

Every operation costs O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, takewhile

from common.pages import KVLayout
from engine.cache.usable import UsablePrefixes

MAX_SPARED_SHARE = 0.5  # largest share of the pool that eviction spares


class OutOfBlocksError(Exception):
    """Fewer blocks are free or evictable than requested. Nothing was taken."""


class BlockPool:
    """Reference counts, prefix reuse and eviction of `num_blocks` blocks.

    Eviction takes the block released longest ago, but spares blocks that `match_prefix` found, up to `MAX_SPARED_SHARE` of the
    pool. Beyond that the spared block released longest ago counts as never found. `release` goes through a block table from its
    end, so a sequence's last blocks are evicted first, and what stays cached is always a prefix.

    Some models need more than a prefix's blocks to go on from it. Such blocks are published *beside* a block of tokens, and are
    forgotten whole. With `state_blocks` a checkpoint is so many blocks: the state behind the block. With `column_blocks` a
    column is: what layers with a window keep of the block's positions. A prefix is usable up to a block with a checkpoint, or
    with the columns of the last `window` positions. Events and `cached_digests` name a prefix's blocks while one of them, or one
    behind them, has something beside it.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, state_blocks: int = 0, column_blocks: int = 0, window: int = 0
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens can hold nothing")
        if state_blocks and column_blocks:
            raise ValueError("a pool keeps states apart or windows, not both")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.state_blocks = state_blocks
        self.column_blocks = column_blocks
        self.window = window
        self.window_columns = -(-(window - 1) // block_size) if column_blocks else 0  # seen by a block's first token
        # Blocks with contents beside them that a resumable prefix must end with.
        self._reach = 1 if state_blocks else self.window_columns
        self._beside: dict[bytes, tuple[int, ...]] = {}  # by digest of the block of tokens
        self._beside_of: dict[int, bytes] = {}  # the inverse: digest by block
        self._usable = UsablePrefixes(self._now_usable, self._no_longer_usable)
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks  # None: not published
        self._by_digest: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._spared: OrderedDict[int, None] = OrderedDict()  # cached blocks with hits; in the same order
        self._found = [False] * num_blocks  # published blocks that were matched
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    @classmethod
    def of(cls, layout: KVLayout) -> BlockPool:
        """The pool for a layout's blocks."""
        return cls(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            state_blocks=layout.state_blocks,
            column_blocks=layout.column_blocks,
            window=layout.window,
        )

    @property
    def growth(self) -> int:
        """Blocks that a sequence takes to continue after a full block of tokens."""
        return 1 + self.column_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: free or cached."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        """Published blocks without a reference."""
        return len(self._cached) + len(self._spared)

    @property
    def num_used(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - self.num_free

    def match_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `digests`, with one reference taken on each."""
        blocks = [self._by_digest[digest] for digest in digests[: self.count_prefix(digests)]]
        self._take(blocks)
        return blocks

    def match_usable(self, digests: Sequence[bytes], *, is_hit: bool = True) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return the blocks of the longest resumable prefix, and the contents beside its last blocks.

        That is a checkpoint, or the last columns. References are taken on all of them. Not `is_hit`: for a sequence that holds
        what is its own. Eviction spares nothing for that.
        """
        count = self._count_usable(digests)
        blocks = [self._by_digest[digest] for digest in digests[:count]]
        beside = [self._beside[digest] for digest in digests[max(0, count - self._reach) : count]]
        self._take([*chain(*beside), *blocks], is_hit=is_hit)
        return blocks, beside

    def match_beside(self, digests: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Return the contents beside the first of these blocks, up to the first gap; references on all of them."""
        found = [self._beside[digest] for digest in takewhile(self._beside.__contains__, digests)]
        self._take([*chain(*found)])
        return found

    def _count_usable(self, digests: Sequence[bytes]) -> int:
        usable = run = 0  # run: consecutive blocks so far with contents beside them
        for at, digest in enumerate(digests, start=1):
            if digest not in self._by_digest:
                break
            run = run + 1 if digest in self._beside else 0
            if run >= min(at, self._reach):
                usable = at
        return usable

    def _take(self, blocks: Sequence[int], *, is_hit: bool = True) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del (self._spared if self._found[block] else self._cached)[block]
            self._references[block] += 1
            self._found[block] |= is_hit

    def count_as_hit(self, blocks: Sequence[int]) -> None:
        """Protect these held blocks from early eviction once they are released, as if they had been matched."""
        for block in blocks:
            self._check_used(block)
            self._found[block] = self._digests[block] is not None

    def count_prefix(self, digests: Sequence[bytes]) -> int:
        """Number of blocks that `match_prefix` would return, without taking them or counting as a use."""
        return next((at for at, digest in enumerate(digests) if digest not in self._by_digest), len(digests))

    def allocate(self, count: int, *, spare: int = 0) -> list[int]:
        """Return `count` blocks with one reference each and unknown content, evicting cached ones if need be.

        Raises OutOfBlocksError, and takes and evicts nothing, unless `spare` more are free or evictable after that.
        """
        if count < 0:
            raise ValueError(f"can't allocate {count} blocks")
        if count + spare > self.num_free:
            usable = f"{self.num_free} of {self.num_blocks} free or evictable"
            raise OutOfBlocksError(f"{count} blocks wanted, {usable}, {spare} to be left")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each, in reverse order. Unreferenced blocks become cached if published, else free.

        Raises ValueError for an unheld block: a double release is the caller's bug.
        """
        for block in reversed(blocks):
            self._check_used(block)
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if self._digests[block] is None:
                self._free.append(block)
            elif self._found[block]:
                self._spare(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Publish the final content of a held block under `digest`.

        The first publisher of a digest wins while its block is held: a later block of the same content stays private and is
        freed on release. A cached block gives way: it would be evicted before the rest of the later sequence, whose prefix would
        then have a gap. Raises ValueError for an unheld block, or one published under another digest.
        """
        self._check_used(block)
        known = self._digests[block]
        if known is not None and known != digest:
            raise ValueError(f"block {block} is published under another digest already")
        first = self._by_digest.get(digest)
        if first is None:
            if self._is_usable(digest):
                _note(digest, happened=self._added, undone=self._removed)
        elif self._references[first]:
            return
        else:
            self._found[block] = self._found[first]
            self._free_cached(first)
        self._by_digest[digest] = block
        self._digests[block] = digest

    def publish_beside(self, blocks: Sequence[int], digests: Sequence[bytes], count: int) -> None:
        """Publish these held blocks beside the prefix with the first `count` digests: its state, or its last column.

        The first publisher wins while its blocks are held, as for blocks of tokens. Raises ValueError for an unheld block, or one
        that is published already as something else.
        """
        digest, blocks = digests[count - 1], tuple(blocks)
        for block in blocks:
            self._check_used(block)
        known = self._beside.get(digest)
        if known is not None and (known == blocks or any(self._references[block] for block in known)):
            return
        if any(self._digests[block] is not None for block in blocks):
            raise ValueError(f"one of the blocks {list(blocks)} is published already")
        if known is None:
            self._usable.add(digests, count)
        else:
            for block, before in zip(blocks, known, strict=True):
                self._found[block] = self._found[before]
                del self._beside_of[before]
                self._free_cached(before)
        self._beside[digest] = blocks
        for block in blocks:
            self._beside_of[block] = self._digests[block] = digest

    def withdraw(self, blocks: Sequence[int], digests: Sequence[bytes] = ()) -> None:
        """Unpublish these held blocks, whose contents proved wrong. Unpublished blocks stay as they are.

        The same for what is beside blocks with these digests, held or not. Raises ValueError for an unheld block.
        """
        for block in blocks:
            self._check_used(block)
            self._forget(block)
        for digest in digests:
            if digest in self._beside:
                self._forget_beside(digest)

    def make_private(self, blocks: Sequence[int]) -> bool:
        """Unpublish these held blocks, unless others hold them, too; return True if nobody does."""
        if any(self._references[block] > 1 for block in blocks):
            return False
        self.withdraw(blocks)
        return True

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return (digests added, digests removed) since the last call, without those that came and went."""
        events = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return events

    def cached_digests(self) -> list[bytes]:
        """Return every digest that `match_prefix` would find and use, oldest publication first."""
        return [digest for digest in self._by_digest if self._is_usable(digest)]

    def _is_usable(self, digest: bytes) -> bool:
        return not self._reach or digest in self._usable

    def _now_usable(self, digest: bytes) -> None:
        if self._reach and digest in self._by_digest:
            _note(digest, happened=self._added, undone=self._removed)

    def _no_longer_usable(self, digest: bytes) -> None:
        if self._reach and digest in self._by_digest:
            _note(digest, happened=self._removed, undone=self._added)

    def _spare(self, block: int) -> None:
        self._spared[block] = None
        if len(self._spared) > MAX_SPARED_SHARE * self.num_blocks:
            oldest, _ = self._spared.popitem(last=False)
            self._found[oldest] = False
            self._cached[oldest] = None

    def _evict(self) -> int:
        block, _ = (self._cached or self._spared).popitem(last=False)
        self._forget(block, but=block)
        return block

    def _forget(self, block: int, *, but: int = -1) -> None:
        """Drop a block's contents from the cache, with everything else beside its block of tokens, except `but`."""
        digest = self._digests[block]
        if digest is None:
            return
        if block in self._beside_of:
            self._forget_beside(digest, but=but)
            return
        self._digests[block] = None
        self._found[block] = False
        del self._by_digest[digest]
        if self._is_usable(digest):
            _note(digest, happened=self._removed, undone=self._added)

    def _forget_beside(self, digest: bytes, *, but: int = -1) -> None:
        for block in self._beside.pop(digest):
            del self._beside_of[block]
            if self._references[block] == 0 and block != but:
                self._free_cached(block)
            self._digests[block] = None
            self._found[block] = False
        self._usable.remove(digest)

    def _free_cached(self, block: int) -> None:
        del (self._spared if block in self._spared else self._cached)[block]
        self._digests[block] = None
        self._found[block] = False
        self._free.append(block)

    def _check_used(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not in a pool of {self.num_blocks}")
        if self._references[block] == 0:
            raise ValueError(f"nobody holds block {block}")


def _note(digest: bytes, *, happened: dict[bytes, None], undone: dict[bytes, None]) -> None:
    """Record an event, or cancel its unreported opposite."""
    if digest in undone:
        del undone[digest]
    else:
        happened[digest] = None
