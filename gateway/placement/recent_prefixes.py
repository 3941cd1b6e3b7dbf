"""Recently computed prompt prefixes, to estimate a waiting request's cache hits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

MAX_BLOCKS = 100_000  # about 15 MB


class RecentPrefixes:
    """An LRU set of block hashes of placed prompts."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def remember(self, digests: Sequence[bytes]) -> None:
        """Add a prompt with these full blocks, which is about to be computed."""
        for digest in reversed(digests):  # the first block is evicted last
            if digest in self._known:
                self._known.move_to_end(digest)
            else:
                self._known[digest] = None
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)

    def matched(self, digests: Iterable[bytes]) -> int:
        """The number of known leading blocks."""
        return sum(1 for _ in takewhile(self._known.__contains__, digests))
