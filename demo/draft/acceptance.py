"""How many tokens of a draft a greedy target accepts, counted on texts that the target wrote greedily."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Acceptance:
    """Counts over the steps of a server that drafts chains of one length."""

    steps: int
    accepted: tuple[int, ...]  # steps in which the draft at each position, and all before it, was accepted

    @property
    def by_position(self) -> tuple[float, ...]:
        """The share of steps in which each position was accepted."""
        return tuple(count / max(1, self.steps) for count in self.accepted)

    @property
    def mean_length(self) -> float:
        """Tokens a step: those accepted and the target's own."""
        return 1 + sum(self.by_position)


def acceptance(chains: torch.Tensor, ids: torch.Tensor, greedy: torch.Tensor, length: int) -> Acceptance:
    """Walk through each text as a server would, `length` drafts a step.

    `chains` [B, R, K]: what the draft says from row i on of tokens i + 2 to i + 1 + K. `greedy` [B, T]: True where the token is
    the target's greedy choice. A step counts where all its tokens are; elsewhere the walk goes on by one token.
    """
    rows = chains.shape[1]
    texts = ids.unfold(1, length, 1)[:, 2 : 2 + rows]
    counted = greedy.unfold(1, length, 1)[:, 2 : 2 + rows].all(-1).tolist()
    depths = (chains[..., :length] == texts).long().cumprod(-1).sum(-1).tolist()
    steps, by_depth = 0, [0] * (length + 1)
    for row_counted, row_depths in zip(counted, depths, strict=True):
        at = 0
        while at < rows:
            if not row_counted[at]:
                at += 1
                continue
            steps += 1
            by_depth[row_depths[at]] += 1
            at += row_depths[at] + 1
    return Acceptance(steps, tuple(sum(by_depth[position:]) for position in range(1, length + 1)))
