"""Block allocation of sequences: take blocks, publish finished ones, return all.

A sequence has a table of entries for each of the pool's groups (`engine.groups`), and all here are loops over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from itertools import chain, islice

from common.blocks import hash_block, hash_blocks, unpack_tokens
from common.messages import Job
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.cache.changes import Chain
from engine.groups import Entry, Group, Table, entries_of, extend, held_at_most, lacking_entries, longest_entries
from engine.sequence import Hold, Sequence
from kvtransfer.plan import Cargo, CargoGroup
from worker.serving.checkpoints import branches_of, drop_older_ends
from worker.serving.turns import Turns


def sequence_of(job: Job) -> Sequence:
    """The sequence of a job, without blocks."""
    work = job.work
    return Sequence(
        request_id=job.request_id,
        attempt=job.attempt,
        token_ids=unpack_tokens(job.token_ids),
        num_prompt_tokens=job.num_prompt_tokens,
        sampling=work.sampling,
        hash_root=job.hash_root,
        suspect_until=job.suspect_until,
        grammar=work.grammar,
        speculation=job.speculation,
        prediction=unpack_tokens(job.prediction),
        hold=Hold.of(job.keep, job.priority, job.request_id),
    )


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def longest_sequence(pool: BlockPool) -> int:
    """Tokens of the longest sequence that fits into the pool alone."""
    return longest_entries(pool.groups, pool.num_blocks) * pool.block_size


def blocks_of(sequence: Sequence) -> list[int]:
    """All blocks of a sequence, by blocks of tokens: released from the end, a beginning with all of its groups stays."""
    if len(sequence.tables) == 1:
        return [*chain(*sequence.tables[0].entries)]
    placed = [(at, entry) for table in sequence.tables for at, entry in table.own()]
    placed.sort(key=lambda each: each[0])  # stable: the first group's come first
    return [block for _, entry in placed for block in entry]


# -- admission -----------------------------------------------------------------------------------------------------------


def admit(pool: BlockPool, sequence: Sequence, *, num_tokens: int, spare: int = 0, ahead: int | None = None) -> None:
    """Give an empty sequence its cached prefix, and fresh blocks for `num_tokens` positions in all.

    At least the last known token is left to compute, for its logits; a scored prompt is computed whole. Windows' groups get
    entries for `ahead` positions (None: all). `spare` blocks stay free or cached. Raises OutOfBlocksError and takes nothing.
    """
    size, digests = pool.block_size, digests_of(pool, sequence)
    found = pool.match_resumable([] if sequence.scores_prompt else digests)
    num_entries = blocks_for(num_tokens, size)
    if found[0] and _slack(pool, num_entries, found) < 0:
        pool.release(_blocks(found))
        found = [[] for _ in pool.groups]
    counts = _fresh_entries(pool, num_entries, found, ahead=ahead, spare=spare)
    taken = _go_on_in_found(pool, found, counts, spare=spare)
    try:
        fresh = iter(pool.allocate(_num_blocks(pool.groups, counts), spare=spare))
    except OutOfBlocksError:
        # From zero it would need as many: what it let go of, others hold, or it needs anew.
        pool.release([*_blocks(found), *chain(*taken.values())])
        raise
    num_cached, tables = len(found[0]), list[Table]()
    for number, (group, known, count) in enumerate(zip(pool.groups, found, counts, strict=True)):
        is_taken = number in taken
        gone, begin = num_cached - len(known) - is_taken, num_cached * size - is_taken
        table = Table([()] * gone + known, num_shared=num_cached - is_taken, num_gone=gone, begin=begin)
        own = [taken[number]] if is_taken else [_entry(fresh, group) for _ in range(count)]
        extend(group, table, own, num_entries)
        tables.append(table)
    sequence.tables = tables
    sequence.digests = digests[:num_cached]
    cached = pool.count_prefix(digests) if pool.fixed and not sequence.scores_prompt else num_cached
    sequence.found(num_cached * size, stateless=(cached - num_cached) * size)
    sequence.restart(sequence.num_cached)
    if pool.fixed:
        sequence.branches = branches_of(pool, sequence, cached=cached * size, end=len(digests) * size)


def expected_cached(pool: BlockPool, sequence: Sequence) -> int:
    """Leading tokens that `admit` would find cached now, at most; takes nothing."""
    return 0 if sequence.scores_prompt else pool.count_prefix(digests_of(pool, sequence)) * pool.block_size


def digests_of(pool: BlockPool, sequence: Sequence) -> list[bytes]:
    """The hashes of the full blocks before the last known token, made once for so many."""
    size = pool.block_size
    reusable = (len(sequence.token_ids) - 1) // size
    if len(sequence.known_digests) != reusable:
        sequence.known_digests = hash_blocks(sequence.hash_root, sequence.token_ids[: reusable * size], size)
    return sequence.known_digests


def _slack(pool: BlockPool, num_entries: int, found: ListOf[ListOf[Entry]]) -> int:
    """Blocks that the pool has beyond those that a sequence holds at most at a time; below 0: they don't fit.

    Others may hold what it found for longer than it needs that. An entry that goes on in place may do so in the found one.
    """
    cached = len(found[0])
    held = held_at_most(pool.groups, num_entries - cached)
    held += sum(group.blocks * len(known) for group, known in zip(pool.groups, found, strict=True) if group.grows)
    return pool.num_blocks - held


def _fresh_entries(
    pool: BlockPool, num_entries: int, found: ListOf[ListOf[Entry]], *, ahead: int | None, spare: int
) -> list[int]:
    """Numbers of fresh entries that a sequence takes of each group: the least that it waits for, and more while there is room."""
    lacking, slack = num_entries - len(found[0]), _slack(pool, num_entries, found)
    asked = [group.asked(lacking, ahead, slack // group.blocks) for group in pool.groups]
    counts = [least for least, _ in asked]
    room = pool.num_free - spare - _num_blocks(pool.groups, counts)
    for number, (group, (least, most)) in enumerate(zip(pool.groups, asked, strict=True)):
        more = max(0, min(most - least, room // group.blocks))
        counts[number] += more
        room -= more * group.blocks
    return counts


def _go_on_in_found(pool: BlockPool, found: list[list[Entry]], counts: list[int], *, spare: int) -> dict[int, Entry]:
    """Without room for another entry a sequence goes on in the found one itself, if nobody else holds it.

    Return these by their groups' numbers. They are found no more.
    """
    taken = dict[int, Entry]()
    for number, group in enumerate(pool.groups):
        wanted = _num_blocks(pool.groups, counts) + spare
        if group.grows or not found[number] or not pool.num_free < wanted <= pool.num_free + group.blocks:
            continue
        if pool.make_private(found[number][-1]):
            taken[number], found[number], counts[number] = found[number][-1], [], 0
    return taken


def _num_blocks(groups: ListOf[Group], counts: ListOf[int]) -> int:
    return sum(group.blocks * count for group, count in zip(groups, counts, strict=True))


def _blocks(entries: ListOf[ListOf[Entry]]) -> list[int]:
    return [*chain(*chain(*entries))]


def _entry(blocks: Iterator[int], group: Group) -> Entry:
    return tuple(islice(blocks, group.blocks))


def admit_in_turn(
    pool: BlockPool, turns: Turns, sequence: Sequence, *, num_tokens: int, spare: int, ahead: int
) -> bool:
    """Admit the sequence without touching blocks kept for requests that are due; without room it waits, and return False."""
    try:
        admit(pool, sequence, num_tokens=num_tokens, spare=spare + turns.kept_from(sequence), ahead=ahead)
    except OutOfBlocksError:
        needed = needs(pool, num_tokens=num_tokens, ahead=ahead, spare=spare)
        turns.waits(sequence, blocks=max(needed + spare, pool.num_free + 1))
        return False
    turns.admitted(sequence)
    return True


def needs(pool: BlockPool, *, num_tokens: int, ahead: int, spare: int) -> int:
    """Free blocks, besides `spare` ones, with which `admit` takes a sequence that finds nothing cached."""
    nothing = list[list[Entry]]([] for _ in pool.groups)
    num_entries = blocks_for(num_tokens, pool.block_size)
    return _num_blocks(pool.groups, _fresh_entries(pool, num_entries, nothing, ahead=ahead, spare=spare))


# -- on the way ----------------------------------------------------------------------------------------------------------


def cover(pool: BlockPool, sequence: Sequence, num_tokens: int, *, spare: int = 0) -> int:
    """Take entries for the next `num_tokens` positions, but `spare` blocks; return how many of these positions have theirs."""
    if len(pool.groups) == 1:
        return num_tokens
    num_entries, covered = blocks_for(sequence.num_scheduled + num_tokens, pool.block_size), num_tokens
    for group, table in zip(pool.groups, sequence.tables, strict=True):
        _fill(pool, group, table, num_entries, room=pool.num_free - spare)
        covered = min(covered, len(table.entries) * pool.block_size - sequence.num_scheduled)
    return max(0, covered)


def _fill(pool: BlockPool, group: Group, table: Table, num_entries: int, *, room: int) -> None:
    """Take fresh entries to cover so many blocks of tokens, as far as `room` blocks go."""
    count = min(lacking_entries(group, table, num_entries), max(0, room) // group.blocks)
    if count:
        extend(group, table, entries_of(pool.allocate(count * group.blocks), group.blocks), num_entries)


def grow(pool: BlockPool, sequence: Sequence, *, num_tokens: int) -> None:
    """Extend the tables to cover `num_tokens` positions. Raises OutOfBlocksError and takes nothing."""
    if covers(pool, sequence, num_tokens=num_tokens):
        return
    num_entries = blocks_for(num_tokens, pool.block_size)
    fresh = iter(pool.allocate(lacks(pool, sequence, num_tokens=num_tokens)))
    for group, table in zip(pool.groups, sequence.tables, strict=True):
        extend(
            group, table, [_entry(fresh, group) for _ in range(lacking_entries(group, table, num_entries))], num_entries
        )


def covers(pool: BlockPool, sequence: Sequence, *, num_tokens: int) -> bool:
    """True if the tables cover `num_tokens` positions."""
    num_entries, is_short = blocks_for(num_tokens, pool.block_size), False
    for table in sequence.tables:  # no generator: each sequence is asked before each pass
        is_short |= len(table.entries) < num_entries
    return not is_short


def lacks(pool: BlockPool, sequence: Sequence, *, num_tokens: int) -> int:
    """Blocks that a sequence must take to cover `num_tokens` positions."""
    if covers(pool, sequence, num_tokens=num_tokens):
        return 0
    num_entries = blocks_for(num_tokens, pool.block_size)
    return sum(
        group.blocks * lacking_entries(group, table, num_entries)
        for group, table in zip(pool.groups, sequence.tables, strict=True)
    )


def num_held(pool: BlockPool, sequence: Sequence) -> int:
    """Blocks that a sequence holds, those that it found included, without checkpoints."""
    held = zip(pool.groups, sequence.tables, strict=True)
    return sum(group.blocks * (len(table.entries) - table.num_gone if group.grows else 1) for group, table in held)


# -- sharing -------------------------------------------------------------------------------------------------------------


def publish_computed(pool: BlockPool, sequence: Sequence) -> None:
    """Share every entry that finished passes made final and whose tokens are known, and let go of what no token reads."""
    has_more = _hash_final(pool, sequence)
    if not has_more and len(sequence.tables) == 1:
        return
    num_entries = len(sequence.tables[0].entries)
    for number, (group, table) in enumerate(zip(pool.groups, sequence.tables, strict=True)):
        let_go(pool, sequence, number)
        if group.shares_all(table, num_entries):
            _share(pool, sequence, number, len(sequence.digests))


def _hash_final(pool: BlockPool, sequence: Sequence) -> bool:
    """Hash the blocks that became final; return whether some did."""
    size, before = pool.block_size, len(sequence.digests)
    num_final = min(sequence.num_computed, len(sequence.token_ids))
    while (len(sequence.digests) + 1) * size <= num_final:
        index = len(sequence.digests)
        if index < len(sequence.known_digests):
            digest = sequence.known_digests[index]
        else:
            parent = sequence.digests[-1] if sequence.digests else sequence.hash_root
            digest = hash_block(parent, sequence.token_ids[index * size : (index + 1) * size])
        sequence.digests.append(digest)
    if len(sequence.digests) == before:
        return False
    pool.changes.learn(Chain(sequence.hash_root, sequence.digests, sequence.token_ids, size), first=before)
    return True


def let_go(pool: BlockPool, sequence: Sequence, number: int) -> None:
    """Share and give back a group's entries that no token reads any more; take as many where blocks of tokens lack theirs."""
    group, table = pool.groups[number], sequence.tables[number]
    first = table.num_gone
    # Tokens of a draft that was accepted are known a moment later.
    end = group.passed(table, min(sequence.num_computed, len(sequence.token_ids)))
    if end <= first:
        return
    _share(pool, sequence, number, end)
    gone, before = dict.fromkeys(table.entries[first:end]), pool.num_free  # equal neighbours once
    # The newest end of a generation replaces them soon: a lower tier hears of the last one, with its block of tokens.
    passing = {table.entries[at // pool.block_size - 1] for at in table.ends if first < at // pool.block_size <= end}
    table.entries[first:end] = [()] * (end - first)
    table.num_gone = end
    pool.release([*chain(*(entry for entry in gone if entry not in passing))], sequence.hold)
    pool.release([*chain(*passing)], sequence.hold, is_told=False)
    if len(table.ends) > 1:
        drop_older_ends(pool, table, number, sequence, before=end)
    num_entries = len(sequence.tables[0].entries)
    _fill(pool, group, table, num_entries, room=pool.num_free - before)


def _share(pool: BlockPool, sequence: Sequence, number: int, end: int) -> None:
    """Publish a group's entries before this one; one that goes on in place where it ends."""
    table = sequence.tables[number]
    for at in range(max(table.num_shared, table.num_gone), end):
        entry = table.entries[at]
        if at + 1 == len(table.entries) or table.entries[at + 1] != entry:
            pool.publish_entry(number, entry, sequence.digests, at + 1)
    table.num_shared = max(table.num_shared, end)


def withdraw(pool: BlockPool, sequence: Sequence) -> None:
    """Stop sharing what a sequence computed, which proved wrong: else everybody with its prefix would fail."""
    pool.withdraw(blocks_of(sequence), sequence.digests)


# -- handoff -------------------------------------------------------------------------------------------------------------


def cargo_of(pool: BlockPool, num_tokens: int) -> Cargo:
    """Return the cargo of a prompt of so many tokens: what the token behind it reads."""
    full = num_tokens // pool.block_size * pool.block_size
    groups = [
        # A sequence that gives way goes on from its last full block. What goes on in place is needed where it is now.
        CargoGroup(blocks=group.blocks, first=group.first_seen(full if group.grows else num_tokens))
        for group in pool.groups
    ]
    return Cargo(num_tokens=num_tokens, block_size=pool.block_size, groups=groups)


def received(pool: BlockPool, cargo: Cargo, entries: ListOf[ListOf[Entry]], num_found: ListOf[int]) -> list[Table]:
    """The tables of a prompt whose entries from each `CargoGroup.first` on are here, so many of them found in the cache."""
    tables = []
    for group, part, own, found in zip(pool.groups, cargo.groups, entries, num_found, strict=True):
        table = Table([()] * part.first, num_shared=part.first + found, num_gone=part.first, begin=cargo.num_tokens - 1)
        extend(group, table, own, len(entries[0]))
        tables.append(table)
    return tables


class HeldBlocks:
    """Deferred release of blocks: never while a pass in flight may write to them.

    The planner reports a sequence's passes (`launched`, `landed`). Blocks given back in between go to the pool with the last
    of these passes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._passes: Counter[Sequence] = Counter()  # passes in flight by sequence
        self._leaving: set[Sequence] = set()

    @property
    def awaited(self) -> int:
        """Sequences whose blocks are released when their passes end."""
        return len(self._leaving)

    @property
    def leaving(self) -> list[Sequence]:
        return list(self._leaving)

    def in_use(self, sequence: Sequence) -> bool:
        return sequence in self._passes

    def launched(self, sequence: Sequence) -> None:
        """Count a pass that includes the sequence."""
        self._passes[sequence] += 1

    def landed(self, sequence: Sequence) -> None:
        """Record the end of a pass of the sequence, with or without a result."""
        self._passes[sequence] -= 1
        if not self._passes[sequence]:
            del self._passes[sequence]
            if sequence in self._leaving:
                self._leaving.remove(sequence)
                self._release(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Drop every reference of the sequence, now or when its passes end. Published blocks stay cached."""
        if self.in_use(sequence):
            self._leaving.add(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(blocks_of(sequence), sequence.hold)
        sequence.tables, sequence.digests = [], []
        sequence.restart(0)
