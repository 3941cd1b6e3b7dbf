"""A model's rule for choosing a token's experts: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Score(Enum):
    """The function of a router's logits."""

    SOFTMAX = auto()  # over all experts
    SIGMOID = auto()  # each logit's own
    SOFTMAX_OF_CHOSEN = auto()  # top-k of the logits, then softmax over them
    NEAR_OF_CHOSEN = auto()  # each of the highest weighs against what is left, near it


class GroupScore(Enum):
    """The score of a group of experts."""

    BEST = auto()
    TWO_BEST = auto()  # their sum


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """Top-k experts by score, within the top-k groups."""

    chosen: int  # experts a token
    score: Score = Score.SOFTMAX
    num_groups: int = 1
    groups_kept: int = 1
    group_score: GroupScore = GroupScore.BEST
    renormalised: bool = False  # the weights sum to `scale`
    scale: float = 1.0
    near: float = 0.0  # maximum difference of two logits, relative to the larger one
    smallest_sum: float = 1e-20  # lower bound of the weights' divisor
