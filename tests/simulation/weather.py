"""What goes wrong in a run, drawn from its seed; and the book of what did go wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

FAIR = 0.12  # of the seeds have no faults but full receivers and clients that leave


@dataclass(kw_only=True)
class Weather:
    """Probabilities of faults. `calm()` ends them all; what is on its way still arrives."""

    dice: random.Random
    loss: float = 0.0
    repeats: float = 0.0
    late: float = 0.0
    latest_s: float = 0.0
    slow_push: float = 0.0
    failed_push: float = 0.0
    flipped_bit: float = 0.0
    failed_pass: float = 0.0
    no_logits: float = 0.0
    is_calm: bool = True
    store_down: tuple[float, float] = (0.0, 0.0)  # from, until
    _drawn: dict[str, float] = field(default_factory=dict)

    @classmethod
    def draw(cls, dice: random.Random) -> Weather:
        """Some seeds have one kind of fault, some many."""
        weather = cls(dice=dice)
        if dice.random() < FAIR:
            return weather
        weather.loss = dice.choice([0.0, 0.0, 0.03, 0.15])
        weather.repeats = dice.choice([0.0, 0.05, 0.3])
        weather.late, weather.latest_s = dice.choice([0.0, 0.05, 0.3]), dice.choice([0.05, 0.4, 2.5])
        weather.slow_push = dice.choice([0.0, 0.0, 0.2, 0.6])
        weather.failed_push = dice.choice([0.0, 0.0, 0.1])
        weather.flipped_bit = dice.choice([0.0, 0.0, 0.1])
        weather.failed_pass = dice.choice([0.0, 0.0, 0.0, 0.05])
        weather.no_logits = dice.choice([0.0, 0.0, 0.0, 0.02])
        return weather

    @property
    def is_fair(self) -> bool:
        """Whether nothing at all is drawn to go wrong."""
        return not any(
            (self.loss, self.repeats, self.late, self.slow_push, self.failed_push, self.flipped_bit, self.failed_pass)
        )

    def happens(self, probability: float) -> bool:
        """Draw; never in calm."""
        return not self.is_calm and probability > 0 and self.dice.random() < probability

    def way_s(self) -> float:
        """How long a message is on its way."""
        if self.happens(self.late):
            return self.dice.uniform(0.01, self.latest_s)
        return self.dice.uniform(0.0002, 0.003)
