"""Which prompts' beginnings were computed lately: what a request that has to wait will likely find in a cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

MAX_BLOCKS = 100_000  # about 15 MB


class RecentPrefixes:
    """Hashes of the blocks of placed prompts, the least recently used forgotten first.

    Only an estimate: whether the chosen worker still has them, its placement says.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def remember(self, digests: Sequence[bytes]) -> None:
        """A prompt with these full blocks is about to be computed."""
        for digest in reversed(digests):  # a beginning is forgotten after what follows it
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)

    def matched(self, digests: Iterable[bytes]) -> int:
        """How many leading blocks are known; none is asked for behind the first unknown one."""
        return sum(1 for _ in takewhile(self._known.__contains__, digests))
