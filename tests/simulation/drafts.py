"""Drafts in a simulated world: right up to a random place, as long as it happens, and of whoever it happens to be.

All that `decode.drafts.drafting` decides by cost is drawn here, so that every order of passes comes up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from decode.drafts.speculation import NO_SPECULATION, Speculation
from engine.sequence import Sequence
from gateway.request.spec import DraftRules
from tests.simulation.forms import VOCAB

if TYPE_CHECKING:
    from tests.simulation.world import World

LONGEST = 6


def has_drafts(seed: int) -> bool:
    """Half of the seeds, of worlds with states and with windows as of all others."""
    return seed // 4 % 2 == 1


def bound_drafts(world: World) -> None:
    """Let some requests say how many tokens are drafted at most."""
    dice = random.Random(world.seed)
    for client in world.by_name.values() if has_drafts(world.seed) else ():
        client.spec = replace(client.spec, drafts=DraftRules(most=dice.choice([-1, -1, 0, 2])))


def speculation_of(world: World, worker: str) -> Speculation:
    """The drafts of a worker that starts now: they are others after each start."""
    if not has_drafts(world.seed):
        return NO_SPECULATION
    return RandomDrafts(world, random.Random(f"{world.seed} {worker} {world.loop.now}"))


class RandomDrafts:
    """The drafts of one life of a worker, with dice of its own: other seeds stay as they were."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self._world, self._dice = world, dice
        self._most = dice.choice([1, 3, LONGEST])
        self._rightness = dice.choice([0.0, 0.3, 0.7, 0.95])  # the probability that a drafted token is right
        self.ahead = dice.choice([0, 0, self._most])

    def awaits(self, sequence: Sequence, *, rows: int) -> bool:
        return self._dice.random() < 0.5

    def stops_the_others(self, num_drafting: int, num_running: int) -> bool:
        return num_drafting > 0 and self._dice.random() < 0.3

    def drafts(
        self, wanted: Mapping[Sequence, int], *, rows: int, most_rows: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        found, room = dict[Sequence, tuple[int, ...]](), most_rows - rows
        for sequence, most in wanted.items():
            asked = self._asked(sequence)
            draft = self._guess(sequence, self._dice.randint(0, min(most, room, self._most if asked < 0 else asked)))
            if draft:
                found[sequence] = draft
                room -= len(draft)
        return found

    def _asked(self, sequence: Sequence) -> int:
        """The request's bound of drafts, which must be what its client said."""
        asked = self._world.by_name[sequence.request_id].spec.drafts.most
        if sequence.speculation != asked:
            self._world.violate(f"{sequence.request_id} drafts {sequence.speculation} tokens of {asked} asked for")
        return asked

    def _guess(self, sequence: Sequence, length: int) -> tuple[int, ...]:
        spec = self._world.by_name[sequence.request_id].spec
        place = len(sequence.token_ids) - len(spec.token_ids)
        right = self._world.answers.of(spec)[place : place + length]
        dice = self._dice
        return tuple(token if dice.random() < self._rightness else dice.randrange(VOCAB) for token in right)

    def verified(self, sequence: Sequence, *, drafted: int, accepted: int) -> None:
        self._world.faults["accepted draft"] += accepted
        self._world.faults["refused draft"] += drafted - accepted

    def ended(self, sequence: Sequence) -> None:
        """No-op: the world knows all answers."""
