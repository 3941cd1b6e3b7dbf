"""Routing of a token to its experts with weights. T tokens, E experts, K experts a token, P partial sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import linear

from engine.kernels.device import twin
from engine.kernels.experts.rule import GroupScore, RoutingRule, Score


class Choice(NamedTuple):
    """Each token's experts, the best one first."""

    ids: torch.Tensor  # [T, K] int32
    weights: torch.Tensor  # [T, K] float32


class Held(NamedTuple):
    """The experts that one rank has, whole. A choice has its own numbers of them; of others it has -1 and no weight."""

    first: int
    number: int


@twin("engine.kernels.experts.triton_routing")
def route(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    rule: RoutingRule,
    *,
    scales: torch.Tensor | None = None,
    held: Held | None = None,
) -> Choice:
    """Choose experts for `x` [T, H] by the logits x @ router.T + bias, `router` [E, H], in float32.

    `correction` [E] float32 is added to the scores that are compared, not to the weights; `scales` [E] float32 multiply the
    weights in the end. Where scores are equal, the first expert wins. Numbers that are none count as 0, so ids are always
    valid. `held`: choose among all experts, and call those of this rank by its own numbers.
    """
    logits = linear(x.float(), router.float(), None if bias is None else bias.float())
    scores = logits if rule.score in (Score.SOFTMAX_OF_CHOSEN, Score.NEAR_OF_CHOSEN) else _scores(logits, rule.score)
    scores = scores.nan_to_num(nan=0.0)
    compared = scores if correction is None else scores + correction
    compared = _within_groups(compared, rule)
    ids = compared.sort(dim=-1, descending=True, stable=True).indices[:, : rule.chosen]
    weights = scores.gather(-1, ids)
    if rule.score is Score.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(dim=-1)
    if rule.score is Score.NEAR_OF_CHOSEN:
        weights = _among_near(compared, scores, ids, rule.near)
    if rule.renormalised:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=rule.smallest_sum)
    weights = weights * rule.scale
    choice = Choice(ids.to(torch.int32), weights if scales is None else weights * scales[ids])
    return choice if held is None else _here(choice, held)


def _here(choice: Choice, held: Held) -> Choice:
    own = choice.ids - held.first
    is_elsewhere = (own < 0) | (own >= held.number)
    return Choice(own.masked_fill(is_elsewhere, -1), choice.weights.masked_fill(is_elsewhere, 0.0))


def _among_near(compared: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, near: float) -> torch.Tensor:
    """Softmax weight [T, K] of each selected expert over the not-yet-selected experts whose logits are within `near`."""
    weights, is_left = [], compared > float("-inf")
    for chosen in ids.split(1, dim=-1):
        own = scores.gather(-1, chosen)
        is_near = is_left & (own - scores <= near * torch.maximum(scores.abs(), own))
        weights.append(1 / (scores - own).exp().masked_fill(~is_near, 0.0).sum(dim=-1, keepdim=True))
        is_left = is_left.scatter(-1, chosen, False)
    return torch.cat(weights, dim=-1)


def _scores(logits: torch.Tensor, score: Score) -> torch.Tensor:
    return logits.softmax(dim=-1) if score is Score.SOFTMAX else logits.sigmoid()


def _within_groups(scores: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """The scores [T, E], -inf outside the best groups."""
    if rule.groups_kept == rule.num_groups:
        return scores
    grouped = scores.unflatten(-1, (rule.num_groups, -1))
    worth = grouped.topk(1 if rule.group_score is GroupScore.BEST else 2, dim=-1).values.sum(dim=-1)
    kept = worth.sort(dim=-1, descending=True, stable=True).indices[:, : rule.groups_kept]
    dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(-2)
