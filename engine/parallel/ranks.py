"""The ranks or stages that share an engine's model, as the engine on one of them sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.parallel.group import ALONE, Group, RankLostError
from engine.parallel.stage import ONLY_STAGE, Stage


class Led(Protocol):
    """The leader's followers: they hold the other shares, and repeat its passes."""

    def send(self, *frames: bytes) -> None:
        """Send the frames to each. Raises RankLostError."""
        ...

    def wait(self) -> None:
        """Wait until each has loaded its share. Raises RankLostError with the reason, if one can't."""
        ...

    def problem(self) -> str:
        """Return which one ended, and how; "" while all live."""
        ...


class _Nobody:
    """The followers of a rank that leads none."""

    def send(self, *frames: bytes) -> None: ...

    def wait(self) -> None: ...

    def problem(self) -> str:
        return ""


NOBODY = _Nobody()


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank's group or a stage's place, and whom it leads: the first one the others, and these nobody.

    `held_back()` waits for all ranks; it returns the bytes that another one's device has less free than this one's.
    `fewest(blocks)` waits for all stages; it returns how many blocks the one with the least room has. None: the leader's number.
    `exchange(own)` waits for all of them, too, and returns each one's bytes, of which all have as many. It raises RankLostError.
    `missed()` says which process, of whichever stage, did not come to another one's sum in time; "" if all did.
    """

    group: Group = ALONE
    followers: Led = NOBODY
    stage: Stage = ONLY_STAGE
    held_back: Callable[[], int] = int
    fewest: Callable[[int], int] | None = None
    exchange: Callable[[bytes], list[bytes]] = lambda own: [own]
    missed: Callable[[], str] = str

    @property
    def number(self) -> int:
        """This process's among all of its worker."""
        return self.stage.number * self.group.size + self.group.rank

    def check(self) -> None:
        """Raise RankLostError, naming the rank, if what was computed since is wrong: of one's own sums, or of another stage's."""
        if missed := self.missed():
            raise RankLostError(missed)
        self.group.check()

    @property
    def leads(self) -> bool:
        return self.followers is not NOBODY


ONE_RANK = Ranks()
