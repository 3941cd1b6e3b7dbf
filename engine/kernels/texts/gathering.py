"""Rows of whole texts, of which some were kept and others were just computed. R kept rows, T computed ones, S of all texts."""

from __future__ import annotations

import torch

from engine.kernels.device import twin


@twin("engine.kernels.texts.triton_gathering")
def keep_rows(rows: torch.Tensor, stored: torch.Tensor, kept: torch.Tensor) -> None:
    """Write `rows` [T, ...] to the rows `kept` [T] int32 of `stored` [R, ...], those below 0 nowhere."""
    own = torch.nonzero(kept >= 0)[:, 0]
    stored[kept[own].long()] = rows[own]


@twin("engine.kernels.texts.triton_gathering")
def whole_texts(rows: torch.Tensor, stored: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Return [S, ...] for `rows` [T, ...] and `stored` [R, ...], whose rows are contiguous each.

    `sources` [S] int32: a row of `rows`, or n below 0 for the row -1 - n of `stored`.
    """
    at = sources.long()
    kept = torch.nonzero(at < 0)[:, 0]
    found = rows[at.clamp(min=0)]
    found[kept] = stored[-1 - at[kept]]
    return found
