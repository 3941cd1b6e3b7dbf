"""The places of checkpoints that later prompts go on from: ends of messages in prompts, and of what is generated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from engine.cache.block_pool import BlockPool
from engine.groups import Table
from engine.sequence import Sequence

# The last messages of a prompt, behind which the next one may go on: templates drop what was thought since then.
NEWEST_MESSAGES = 2


def branches_of(pool: BlockPool, sequence: Sequence, *, cached: int, end: int) -> tuple[int, ...]:
    """The places in a prompt behind which others may go on, in tokens, as far from each other as checkpoints are.

    First come the place where this prompt left what is `cached`, and the ends of the newest messages and of the first. `end`:
    of its full blocks before the last known token. What it found needs none.
    """
    size, least, found = pool.block_size, pool.checkpoint_distance, sequence.num_cached
    stops = {*sequence.sampling.stop_token_ids}
    behind = sequence.token_ids[found : sequence.num_prompt_tokens]
    ends = [at // size * size for at, token in enumerate(behind, start=found + 1) if token in stops] if stops else []
    newest, earlier = ends[-NEWEST_MESSAGES:], ends[:-NEWEST_MESSAGES]
    # A client names stop tokens, too: each of a long prompt may be one.
    places = [cached, *reversed(newest), end, *earlier[:1], *reversed(dict.fromkeys(earlier))]
    return _apart((at for at in places if found < at <= end), least, found)


def _apart(places: Iterable[int], least: float, found: int) -> tuple[int, ...]:
    """Those of the places that are far enough from `found` and from all before them, in ascending order."""
    chosen = [found]
    for at in places:
        index = bisect_left(chosen, at)
        if all(abs(at - other) >= least for other in chosen[max(0, index - 1) : index + 1]):
            chosen.insert(index, at)
    return tuple(chosen[1:])  # all are behind `found`


def drop_older_ends(pool: BlockPool, table: Table, number: int, sequence: Sequence, *, before: int) -> None:
    """Keep the newest checkpoint of a generation that is shared, of those before so many blocks; others free their blocks.

    A prompt that goes on behind the answer finds that one. Who holds an older one gives it back later.
    """
    shared = [at for at in table.ends if at <= before * pool.block_size]
    for at in shared[:-1]:
        if pool.drop_entry(number, sequence.digests[at // pool.block_size - 1]):
            table.ends.remove(at)
