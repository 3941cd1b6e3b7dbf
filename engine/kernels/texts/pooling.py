"""One vector of each text from its tokens'. T tokens of B texts, E features."""

from __future__ import annotations

import torch

from engine.kernels.device import twin
from engine.kernels.native import floats

KINDS = ("mean", "mean_sqrt_len_tokens", "weightedmean", "max")


@twin("engine.kernels.texts.triton_pooling")
def pool_texts(x: torch.Tensor, spans: torch.Tensor, kind: str) -> torch.Tensor:
    """Return [B, E] float32 for `x` [T, E]; `kind`: one of KINDS, see `modelfiles.pooling.MODES`.

    `spans` [3, B] int32: a text's first row of `x`, its rows, at least one, and how many tokens are before them. A weight is a
    token's number in its text.
    """
    if kind == "mean" and floats.takes(x):
        return floats.means(x, *spans[:2])
    return torch.stack([_pooled(x[begin : begin + rows], before, kind) for begin, rows, before in spans.T.tolist()])


def _pooled(rows: torch.Tensor, before: int, kind: str) -> torch.Tensor:
    if kind == "max":
        return rows.amax(0).float()
    if kind == "weightedmean":
        weights = torch.arange(1 + before, 1 + before + len(rows), device=rows.device).float()
        return weights @ rows.float() / weights.sum()
    total = rows.sum(0, dtype=torch.float32)
    return total / (float(len(rows)) ** 0.5 if kind == "mean_sqrt_len_tokens" else float(len(rows)))
