"""The block pool: reference counts, and cached contents to share. No tensors, no locks: one owner thread.

A block is in exactly one of three states:

    free     no references, no meaningful content
    used     referenced; published (its digest is known) or not
    cached   published, without references; can be matched again, or evicted when room is needed

Every operation costs O(1) a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from typing import Protocol

from common.messages import Keep
from common.pages import KVLayout
from engine.cache.changes import Changes
from engine.cache.resumable import ResumablePrefixes
from engine.cache.retention import COMBINED, Policy, Retention
from engine.cache.returning import Returning
from engine.groups import LEAST_CHECKPOINT, Entry, Full, Group, groups_of, resumable
from engine.sequence import Hold


class OutOfBlocksError(Exception):
    """Fewer blocks are free or evictable than requested. Nothing was taken."""


class Watcher(Protocol):
    """A lower tier's view of a pool: called as contents come to where eviction takes them, and as they go."""

    def cached(self, digest: bytes) -> None:
        """A block of this digest lost its last reference and may be evicted."""

    def forgotten(self, digest: bytes) -> None:
        """An entry of this digest is published no more, and its blocks may be written to from now on."""

    def withdrawn(self, digest: bytes) -> None:
        """Contents published under this digest proved wrong."""


class BlockPool:
    """Reference counts, prefix reuse and eviction of `num_blocks` blocks.

    `Retention` says which cached block is evicted. `release` goes through a block table from its end, so of what one says alike a
    sequence's last blocks are evicted first, and what stays cached is always a prefix.

    Contents are published by group, as entries of `Group.blocks` blocks, under the digest of their block of tokens. An entry is
    forgotten whole. A prefix can be resumed where each group has the entries that the next token reads. Events and
    `cached_digests` name a prefix's blocks while all groups that need one have an entry at one of them, or at one behind them.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, groups: Sequence[Group] = (), retention: Retention | None = None
    ) -> None:
        """`groups`: the first keeps all tokens; none: it is alone."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens can hold nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = tuple(groups) or (Full(block_size=block_size),)
        # Blocks that a sequence takes for its next block of tokens, and those that it has however long it is.
        self.growth = sum(group.blocks for group in self.groups if group.grows)
        self.fixed = sum(group.blocks for group in self.groups if not group.grows)
        # Tokens at least from one checkpoint to the next, without which none pays; 0: each full block can be resumed.
        self.checkpoint_distance = LEAST_CHECKPOINT * self.fixed * block_size
        self._is_single = all(group.blocks == 1 for group in self.groups)
        # Numbers of the further groups without whose entries no prefix is resumed. A window of one position sees its own alone.
        self.needed = [at for at, group in enumerate(self.groups) if at and not group.first_seen(block_size)]
        self._entries: list[dict[bytes, Entry]] = [{} for _ in self.groups]
        self.prefixes = ResumablePrefixes(self._now_resumable, self._no_longer_resumable)
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks  # None: not published
        self._group_of = [0] * num_blocks  # number of the group that a published block's entry is in
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 first
        self.retention = retention or Retention(num_blocks)  # it has the cached blocks
        self.returning = Returning(self.retention)
        self.changes = Changes()
        self.watcher: Watcher | None = None

    @classmethod
    def of(cls, layout: KVLayout, policy: Policy = COMBINED) -> BlockPool:
        """The pool of a layout's blocks."""
        retention = Retention(layout.num_blocks, policy)
        return cls(
            num_blocks=layout.num_blocks, block_size=layout.block_size, groups=groups_of(layout), retention=retention
        )

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: free or cached."""
        return len(self._free) + self.retention.count

    @property
    def num_empty(self) -> int:
        """Blocks without content, which are taken before any is evicted."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Published blocks without a reference."""
        return self.retention.count

    @property
    def num_used(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - self.num_free

    def match_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `digests`, with one reference taken on each."""
        return [*chain(*self.match_entries(0, digests))]

    def match_resumable(self, digests: Sequence[bytes], *, is_hit: bool = True) -> list[list[Entry]]:
        """Return the entries that the token behind the longest resumable prefix reads, by group: the first has its blocks.

        References are taken on all of them. Not `is_hit`: for a sequence that holds what is its own. Eviction spares nothing for
        that.
        """
        entries = self._entries[1:]
        most = self.count_prefix(digests)
        count = resumable(self.groups[1:], self.block_size, most, lambda number, at: digests[at] in entries[number])
        firsts = [group.first_seen(count * self.block_size) for group in self.groups]
        found = [
            [known[digest] for digest in digests[first:count]]
            for first, known in zip(firsts, self._entries, strict=True)
        ]
        self._take([*chain(*chain(*found))], is_hit=is_hit)
        return found

    def match_entries(self, number: int, digests: Sequence[bytes]) -> list[Entry]:
        """Return a group's entries for these digests, up to the first that has none; references on all of them."""
        known = self._entries[number]
        found = [known[digest] for digest in takewhile(known.__contains__, digests)]
        self._take([*chain(*found)])
        return found

    def entries_of(self, digest: bytes) -> dict[int, Entry]:
        """The entries published under this digest, by their group's number."""
        return {number: known[digest] for number, known in enumerate(self._entries) if digest in known}

    def has(self, number: int, digest: bytes) -> bool:
        """True if the group has an entry for this digest."""
        return digest in self._entries[number]

    def was_found(self, digest: bytes) -> bool:
        """True if a prefix with this block was matched, and eviction spares it."""
        entry = self._entries[0].get(digest)
        return entry is not None and self.retention.was_found(entry[0])

    def charged(self, digest: bytes) -> Keep | None:
        """The wish whose tenant is charged with a block of tokens, see `Retention.charged`."""
        entry = self._entries[0].get(digest)
        return None if entry is None else self.retention.charged(entry[0])

    def hold(self, number: int, digest: bytes) -> Entry:
        """Take a reference on a group's entry, which is no use of it."""
        entry = self._entries[number][digest]
        self._take(entry, is_hit=False)
        return entry

    def _take(self, blocks: Sequence[int], *, is_hit: bool = True) -> None:
        idle, references = [], self._references
        for block in blocks:
            if references[block] == 0:
                idle.append(block)
            references[block] += 1
        self.retention.take(idle)
        if is_hit:
            self.retention.found(blocks)

    def count_as_hit(self, blocks: Sequence[int]) -> None:
        """Protect these held blocks from early eviction once they are released, as if they had been matched."""
        for block in blocks:
            self._check_used(block)
        self.retention.found([block for block in blocks if self._digests[block] is not None])

    def count_prefix(self, digests: Sequence[bytes]) -> int:
        """Number of blocks that `match_prefix` would return; takes none and counts as no use."""
        known = self._entries[0]
        return next((at for at, digest in enumerate(digests) if digest not in known), len(digests))

    def allocate(self, count: int, *, spare: int = 0) -> list[int]:
        """Return `count` blocks with one reference each and unknown content, evicting cached ones if need be.

        Raises OutOfBlocksError, and takes and evicts nothing, unless `spare` more are free or evictable after that.
        """
        if count < 0:
            raise ValueError(f"can't allocate {count} blocks")
        if count + spare > self.num_free:
            usable = f"{self.num_free} of {self.num_blocks} free or evictable"
            raise OutOfBlocksError(f"{count} blocks wanted, {usable}, {spare} to be left")
        free, references, blocks = self._free, self._references, list[int]()
        while lacking := count - len(blocks):
            if free:
                blocks += reversed(free[-lacking:])
                del free[-lacking:]
            else:
                blocks += self._evict(lacking)
        for block in blocks:
            references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int], hold: Hold | None = None, *, is_told: bool = True) -> None:
        """Drop one reference on each, in reverse order. Unreferenced blocks become cached if published, else free.

        `hold`: what their sequence says about keeping them. Not `is_told`: the watcher hears of them with a later release. Raises
        ValueError for an unheld block: a double release is the caller's bug.
        """
        if hold is not None and hold.keep.call_ttl_s:
            self.returning.releasing(hold)
        references, digests, cached, shared = self._references, self._digests, list[int](), list[int]()
        try:
            for block in reversed(blocks):
                if not 0 <= block < self.num_blocks or not references[block]:
                    self._check_used(block)
                references[block] -= 1
                if not references[block]:
                    (self._free if digests[block] is None else cached).append(block)
                elif hold is not None and digests[block] is not None:
                    shared.append(block)
        finally:
            self.retention.add(cached, hold)
            if hold is not None and shared:
                self.retention.release_shared(shared, hold)
        if self.watcher is not None and is_told:
            for block in cached:
                digest = self._digests[block]
                assert digest is not None  # it was published
                self.watcher.cached(digest)

    def publish(self, block: int, digest: bytes) -> None:
        """Declare the content of a held block of tokens final and shareable under `digest`, see `publish_entry`."""
        if self._publish(0, (block,), digest) and self.is_resumable(digest):
            self.changes.came(digest)

    def publish_entry(self, number: int, entry: Entry, digests: Sequence[bytes], count: int) -> None:
        """Declare a group's entry for the last of the first `count` digests final and shareable.

        The first publisher of a digest wins while its blocks are held: a later entry of the same content stays private and is
        freed on release. A cached entry gives way: it would be evicted before the rest of the later sequence, whose prefix would
        then have a gap. Raises ValueError for an unheld block, or one that is published already as something else.
        """
        digest = digests[count - 1]
        if not number:
            self.publish(entry[0], digest)
        elif self._publish(number, entry, digest) and number in self.needed and self._is_end(digest):
            self.prefixes.add(digests, count)

    def _publish(self, number: int, entry: Entry, digest: bytes) -> bool:
        """Return whether the group had none for this digest."""
        for block in entry:
            self._check_used(block)
        known = self._entries[number].get(digest)
        if known == entry:
            return False
        if any(self._digests[block] is not None for block in entry):
            raise ValueError(f"one of the blocks {list(entry)} is published under another digest already")
        if known is not None:
            if any(self._references[block] for block in known):
                return False
            for block, before in zip(entry, known, strict=True):
                self.retention.inherit(block, before)
                self._free_cached(before)
            self._tell_forgotten(digest)
        self._entries[number][digest] = entry
        for block in entry:
            self._digests[block], self._group_of[block] = digest, number
        return known is None

    def withdraw(self, blocks: Iterable[int], digests: Sequence[bytes] = ()) -> None:
        """Stop sharing the contents of these held blocks, which proved wrong. Unpublished blocks stay as they are.

        The same for further groups' entries with these digests, held or not. Raises ValueError for an unheld block.
        """
        held = [*blocks]
        if self.watcher is not None:
            for digest in dict.fromkeys([*digests, *filter(None, (self._digests[block] for block in held))]):
                self.watcher.withdrawn(digest)
        self._unpublish(held)
        for number, known in enumerate(self._entries):
            for digest in digests if number else ():
                if digest in known:
                    self._forget_entry(number, digest)

    def drop_entry(self, number: int, digest: bytes) -> bool:
        """Free a cached entry that another replaced, unless a prompt found it; return False if somebody holds it."""
        entry = self._entries[number].get(digest)
        if entry is None:
            return True
        if any(self._references[block] for block in entry):
            return False
        if not self.retention.was_found(entry[0]):
            self._forget_entry(number, digest)
        return True

    def _unpublish(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._check_used(block)
            self._forget(block)

    def make_private(self, blocks: Sequence[int]) -> bool:
        """Unpublish these held blocks, unless others hold them, too; return True if nobody does."""
        if any(self._references[block] > 1 for block in blocks):
            return False
        self._unpublish(blocks)
        return True

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return (digests added, digests removed) since the last call, without those that came and went."""
        return self.changes.drain()

    def cached_digests(self) -> list[bytes]:
        """Return every digest that `match_prefix` would find now, and use, oldest publication first."""
        return [digest for digest in self._entries[0] if self.is_resumable(digest)]

    def clear(self) -> None:
        """Forget all that is cached. Raises ValueError while a block is held."""
        if self.num_used:
            raise ValueError(f"{self.num_used} blocks are held")
        for number, known in enumerate(self._entries):
            for digest in list(known):
                self._forget_entry(number, digest)

    def _is_end(self, digest: bytes) -> bool:
        """True if each group that needs one has an entry there."""
        return all(digest in self._entries[number] for number in self.needed)

    def is_resumable(self, digest: bytes) -> bool:
        """True if the block, while it is here, is a prefix's that can be resumed."""
        return not self.needed or digest in self.prefixes

    def _now_resumable(self, digest: bytes) -> None:
        if digest in self._entries[0]:
            self.changes.came(digest)

    def _no_longer_resumable(self, digest: bytes) -> None:
        if digest in self._entries[0]:
            self.changes.went(digest)

    def _evict(self, most: int) -> list[int]:
        """Forget so many victims; with one of an entry the rest of it is free."""
        victims = self.retention.evict(most if self._is_single else 1)
        for block in victims:
            digest = self._digests[block]
            assert digest is not None  # it was published
            self._forget_entry(self._group_of[block], digest, but=block)
        return victims

    def _forget(self, block: int) -> None:
        """Make a block's contents nobody's, and with it the rest of its entry."""
        digest = self._digests[block]
        if digest is not None:
            self._forget_entry(self._group_of[block], digest)

    def _forget_entry(self, number: int, digest: bytes, *, but: int = -1) -> None:
        """Make an entry's contents nobody's; the caller takes `but`, which retention forgot."""
        was_end = number in self.needed and self._is_end(digest)
        for block in self._entries[number].pop(digest):
            if self._references[block] == 0 and block != but:
                self._free_cached(block)
            self._digests[block] = None
            if block != but:
                self.retention.forget(block)
        self._tell_forgotten(digest)
        if was_end:
            self.prefixes.remove(digest)
        if number == 0 and self.is_resumable(digest):
            self.changes.went(digest)

    def _tell_forgotten(self, digest: bytes) -> None:
        if self.watcher is not None:
            self.watcher.forgotten(digest)

    def _free_cached(self, block: int) -> None:
        self.retention.take((block,))
        self._digests[block] = None
        self.retention.forget(block)
        self._free.append(block)

    def _check_used(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not in a pool of {self.num_blocks}")
        if self._references[block] == 0:
            raise ValueError(f"nobody holds block {block}")
