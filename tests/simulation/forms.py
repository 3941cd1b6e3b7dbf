"""What a world looks like before its weather: how many workers with which roles and pools, and what clients ask for.

Most seeds are drawn freely. A narrower form forces what those bring seldom; the seed draws the rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.messages import PagePart
from engine import groups

BLOCK = 4
VOCAB = 64
KEYS = PagePart(layers=1, planes=2, heads=1, dim=4, dtype="float32")
STATES = PagePart(layers=2, planes=1, heads=1, dim=24, dtype="float32", per_token=False)  # a block for each layer
WINDOWED = PagePart(layers=2, planes=2, heads=1, dim=4, dtype="float32", window=7)  # the same
CROWDED = 7  # one of so many free seeds has many clients: pools are full, and requests wait for each other's blocks
LEAST_CONTEXT = 32  # tokens that fit into the smallest pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """`states`: one of so many worlds has layers that keep states. `windows`: one of so many has windows."""

    states: int
    windows: int
    is_crowded: bool | None = None  # None: as the seed says
    is_fair: bool | None = None  # likewise
    is_mixed: bool = False  # workers with both roles, and few others
    pool: tuple[int, int] = (0, 0)  # blocks for tokens, of mixed workers: the least and the most
    prompt: tuple[int, int] = (0, 0)  # tokens; (0, 0): as drawn
    answer: tuple[int, int] = (0, 0)  # likewise, of what the prompt leaves of `LEAST_CONTEXT`
    checkpoint_every: float = groups.CHECKPOINT_EVERY
    stream: int = (
        0  # so many small requests at most follow each other until the first one, which is large, has its answer
    )
    abreast: int = 0  # so many of them at once
    places: int = 0  # of a batch; 0: as drawn elsewhere
    pass_s: tuple[float, float] = (0.001, 0.03)  # how long a device computes, the least and the most
    deadline_s: float = 0.0  # of each request; 0: as drawn elsewhere
    token_s: float = 0.0  # what a pass takes besides, for each of its tokens
    batch_tokens: int = 8  # a pass's tokens
    context: int = 64  # the longest
    prompts: int = 4  # that a prefill worker has at once

    def crowds(self, seed: int) -> bool:
        return seed % CROWDED == 0 if self.is_crowded is None else self.is_crowded

    def parts(self, seed: int) -> list[PagePart]:
        """What a block holds."""
        states = [STATES] if seed % self.states == 1 % self.states else []
        # Every fifth world with states has windows, too.
        has_windows = seed // self.states % 5 == 4 if states else -seed % self.windows == 1 % self.windows
        return [KEYS, *([WINDOWED] if has_windows else []), *states]

    def drawn_workers(self, dice: random.Random) -> list[tuple[str, list[str], int]]:
        """Names, roles and blocks."""
        return _mixed(dice, *self.pool) if self.is_mixed else _apart(dice)

    def lengths(self, dice: random.Random, number: int) -> tuple[int, int]:
        """Tokens of a prompt and of its answer; 0: as drawn elsewhere."""
        if not self.prompt[1]:
            return 0, 0
        if self.stream and number:
            return dice.randint(1, 4), dice.randint(8, 16)
        prompt = dice.randint(*self.prompt)
        return prompt, min(dice.randint(*self.answer), LEAST_CONTEXT - prompt)

    @contextmanager
    def checkpoints(self) -> Iterator[None]:
        """Checkpoints have this form's distance meanwhile."""
        kept, groups.CHECKPOINT_EVERY = groups.CHECKPOINT_EVERY, self.checkpoint_every
        try:
            yield
        finally:
            groups.CHECKPOINT_EVERY = kept


def _apart(dice: random.Random) -> list[tuple[str, list[str], int]]:
    drawn = []
    for role, number in (("prefill", dice.choice([1, 2, 2])), ("decode", dice.choice([1, 2, 2]))):
        for index in range(number):
            both = role == "decode" and dice.random() < 0.1
            roles = ["decode", "prefill"] if both else [role]
            blocks = dice.randint(8, 12) if role == "decode" else dice.randint(9, 20)
            drawn.append((f"{role[0]}{index}", roles, blocks))
    return drawn


def _mixed(dice: random.Random, least: int, most: int) -> list[tuple[str, list[str], int]]:
    drawn = []
    for index in range(dice.choice([1, 2, 2, 3])):
        alone = index > 0 and dice.random() < 0.25
        roles = [dice.choice(["decode", "prefill"])] if alone else ["decode", "prefill"]
        drawn.append((f"{roles[0][0]}{index}", roles, dice.randint(least, most)))
    return drawn


FREE = Form(states=4, windows=4)
# Pools that one prompt fills, in workers whose roles share them. Nothing goes wrong, so nothing excuses who waits.
CRAMPED = Form(
    states=3,
    windows=3,
    is_crowded=True,
    is_fair=True,
    is_mixed=True,
    pool=(8, 9),
    prompt=(22, 30),
    answer=(2, 8),
    checkpoint_every=0.5,
)
# Short prompts with long answers: who would give way holds a checkpoint. A quarter of the length between two is enough.
RESUMING = Form(
    states=2,
    windows=1,
    is_crowded=True,
    is_mixed=True,
    pool=(9, 14),
    prompt=(2, 10),
    answer=(16, 30),
    checkpoint_every=0.5,
)
# One request that needs most of a pool, and a stream of small ones that always find room beside each other.
STREAMING = Form(
    states=3,
    windows=3,
    is_crowded=True,
    is_fair=True,
    prompt=(22, 28),
    answer=(2, 4),
    stream=120,
    abreast=12,
    places=8,
)
# Four passes for each prompt, 10 s or more each: longer than a lease lasts that is not renewed.
SLOW = Form(
    states=4,
    windows=4,
    is_crowded=False,
    is_fair=True,
    prompt=(25, 30),
    answer=(2, 2),
    pass_s=(10.0, 14.0),
    deadline_s=600.0,
)
# A prefill and a decode worker of 500 prompt tokens a second each, as the fake device of tests/chaos/overload.py.
SURGE = Form(
    states=2**30,
    windows=2**30,
    is_crowded=False,
    is_fair=True,
    places=64,
    pass_s=(0.002, 0.002),
    token_s=0.002,
    batch_tokens=512,
    context=256,
    prompts=64,
)
FORMS = {"free": FREE, "cramped": CRAMPED, "resuming": RESUMING, "streaming": STREAMING, "slow": SLOW}
