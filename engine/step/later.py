"""A follower's passes that are in later stages, until their logits and hidden states come."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from engine.arrays import Ints
from engine.batch.layout import Packed, PassSize
from engine.step.runner import Runner


class Arrived(Protocol):
    """The last stage's message about a pass, see `engine.staged`."""

    @property
    def logits(self) -> torch.Tensor | None: ...

    def states_here(self) -> torch.Tensor: ...


class Arriving(Protocol):
    """The same on its way, as a future."""

    def result(self) -> Arrived: ...


class Staged(Protocol):
    """The passes of a rank of the first stage, see `engine.staged`."""

    def arriving(self, size: PassSize) -> Arriving: ...

    def sampling(self) -> AbstractContextManager[object]: ...

    def follow_on(self) -> None: ...


class DraftingLater(Protocol):
    """A drafter behind passes that are over once later ones were launched, see `DraftChain`."""

    def repeat(self, runner: Runner, guessing: bytes, read: Any) -> None: ...

    def taken(self, runner: Runner, packed: Packed) -> Any: ...

    def read_taken(self, runner: Runner, taken: Any, arrived: torch.Tensor, after: Ints) -> Any: ...


class LaterPasses:
    """Those of a rank of the first stage. Each is sampled once and in order, and read and drafted behind if there is a drafter.

    Methods refuse another pass than the next one.
    """

    def __init__(self) -> None:
        self._unsampled = deque[tuple[int, Arriving]]()
        self._unread = deque[tuple[int, Arriving, Any]]()
        self._read: tuple[int, Any] | None = None  # what is guessed from behind a pass

    @property
    def are_some(self) -> bool:
        return bool(self._unsampled or self._unread)

    @torch.inference_mode()
    def launched(
        self, number: int, packed: Packed, arriving: Arriving, runner: Runner, drafting: DraftingLater | None
    ) -> None:
        """Add the pass that was launched last."""
        if packed.size.num_sampled:
            self._unsampled.append((number, arriving))
        if drafting is not None:
            self._unread.append((number, arriving, drafting.taken(runner, packed)))

    def samples(self, number: int) -> bool:
        """True if that pass is the next one to be sampled."""
        return bool(self._unsampled) and self._unsampled[0][0] == number

    def logits(self) -> torch.Tensor:
        """Wait for the logits [R, V] of that pass."""
        logits = self._unsampled.popleft()[1].result().logits
        assert logits is not None, "some are sampled"
        return logits

    @torch.inference_mode()
    def read(self, number: int, after: Ints, runner: Runner, drafting: DraftingLater) -> bool:
        """Have the rows of a pass read, see `DraftChain.read_taken`; False: refused."""
        if not self._unread or self._unread[0][0] != number:
            return False
        _, arriving, taken = self._unread.popleft()
        self._read = number, drafting.read_taken(runner, taken, arriving.result().states_here(), after)
        return True

    @torch.inference_mode()
    def guess(self, number: int, guessing: bytes, runner: Runner, drafting: DraftingLater) -> bool:
        """Guess behind the pass that was read last, see `DraftChain.repeat`; False: refused."""
        if self._read is None or self._read[0] != number:
            return False
        (_, read), self._read = self._read, None
        drafting.repeat(runner, guessing, read)
        return True
