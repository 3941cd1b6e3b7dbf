"""Steps that all ranks take, or none: each says whether it could, and learns of the others before it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

# Context managers for such a step.
Together = Callable[[], AbstractContextManager[None]]
PROBLEM_BYTES = 256  # a rank's word about a step; blank: it went well


class LackingError(MemoryError):
    """A step that no rank took, since one of them lacks memory. They are still in step."""


@contextmanager
def together(exchange: Callable[[bytes], list[bytes]]) -> Iterator[None]:
    """Context manager for a step of all ranks. Raises LackingError on all after a MemoryError of one; RankLostError.

    `exchange`: see `Ranks`.
    """
    lack = None
    try:
        yield
    except MemoryError as error:
        lack = error
    own = b"" if lack is None else (str(lack) or "no memory").encode()
    said = exchange(own[:PROBLEM_BYTES].ljust(PROBLEM_BYTES))
    lacking = [(rank, word.decode(errors="replace").strip()) for rank, word in enumerate(said) if word.strip()]
    if lack is not None and len(said) == 1:
        raise lack
    if lacking:
        raise LackingError("; ".join(f"rank {rank}: {word}" for rank, word in lacking)) from lack
