"""Locally typical sampling (Meister et al. 2022): drop tokens much more, or much less, surprising than the entropy.

R rows, V vocabulary. A token's surprise is `-log p`, its mean the entropy of the row. With scores below the row's best one,
`x = log p + constant`, so a token's distance from the entropy is that of its score from the mean score.
"""

import torch


def leave_typical(scores: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """`scores` [R, V] with -infinity for all but the tokens nearest to the entropy that together have `typical_p` [R, 1].

    Of equally near ones the smaller ids stay. At least one does; a row with 1 stays as it is.
    """
    below = scores - scores.amax(dim=-1, keepdim=True)
    weights = below.exp().double()
    total = weights.sum(dim=-1, keepdim=True)
    mean = torch.where(weights > 0, weights * below, 0.0).sum(dim=-1, keepdim=True) / total
    _, order = (below - mean.float()).abs().sort(dim=-1, stable=True)
    nearest = weights.gather(1, order)
    before = nearest.cumsum(dim=-1) - nearest
    excluded = (before >= typical_p * total) & (typical_p < 1)
    excluded[:, 0] = False
    return scores.masked_fill(torch.zeros_like(excluded).scatter_(1, order, excluded), float("-inf"))
