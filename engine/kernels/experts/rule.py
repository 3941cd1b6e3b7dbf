"""How a model chooses a token's experts: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Score(Enum):
    """The function of a router's logits."""

    SOFTMAX = auto()  # over all experts
    SIGMOID = auto()  # each alone
    SOFTMAX_OF_CHOSEN = auto()  # the highest logits are chosen, then weigh against each other
    NEAR_OF_CHOSEN = auto()  # each of the highest weighs against what is left, near it


class GroupScore(Enum):
    """The score of a group of experts."""

    BEST = auto()
    TWO_BEST = auto()  # their sum


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """A token's experts are those with the highest scores, among the groups with the highest ones."""

    chosen: int  # experts a token
    score: Score = Score.SOFTMAX
    num_groups: int = 1
    groups_kept: int = 1
    group_score: GroupScore = GroupScore.BEST
    renormalised: bool = False  # the chosen experts' weights add up to `scale`
    scale: float = 1.0
    near: float = 0.0  # share of the larger of two logits that they differ by
    smallest_sum: float = 1e-20  # weights are divided by no smaller one
