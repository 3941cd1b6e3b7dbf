"""Triton version of `gathering`: a program copies a part of a few rows. R kept rows, T computed ones, S of all texts."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel

ROWS, COLUMNS = 4, 512


def keep_rows(rows: torch.Tensor, stored: torch.Tensor, kept: torch.Tensor) -> None:
    width = rows[0].numel()
    fixed = (rows.stride(0), stored.stride(0), width, ROWS, COLUMNS)
    aligned = tuple(one.data_ptr() % 16 == 0 for one in (rows, stored, kept))
    _KEEP.launch(
        (triton.cdiv(len(kept), ROWS), triton.cdiv(width, COLUMNS)), (rows.dtype, aligned, *fixed),
        rows, stored, kept, len(kept), *fixed,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _keep(
    rows_TW, stored_RW, kept_T, num_rows, ROW: tl.constexpr, STORED_ROW: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = tl.load(kept_T + at, mask=at < num_rows, other=-1).to(tl.int64)
    inside = (kept >= 0)[:, None] & (column < W)[None, :]
    own = tl.load(rows_TW + at.to(tl.int64)[:, None] * ROW + column[None, :], mask=inside, other=0.0)
    tl.store(stored_RW + kept[:, None] * STORED_ROW + column[None, :], own, mask=inside)


def whole_texts(rows: torch.Tensor, stored: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    out = torch.empty((len(sources), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    width = rows[0].numel()
    fixed = (rows.stride(0), stored.stride(0), width, ROWS, COLUMNS)
    aligned = tuple(one.data_ptr() % 16 == 0 for one in (rows, stored, sources))
    _GATHER.launch(
        (triton.cdiv(len(sources), ROWS), triton.cdiv(width, COLUMNS)), (rows.dtype, aligned, *fixed),
        rows, stored, sources, out, len(sources), *fixed,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gather(
    rows_TW, stored_RW, sources_S, out_SW, num_rows, ROW: tl.constexpr, STORED_ROW: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(sources_S + at, mask=at < num_rows, other=0).to(tl.int64)
    inside = (at < num_rows)[:, None] & (column < W)[None, :]
    is_kept = (source < 0)[:, None]
    kept = tl.load(stored_RW + (-1 - source)[:, None] * STORED_ROW + column[None, :], mask=inside & is_kept, other=0.0)
    own = tl.load(rows_TW + source[:, None] * ROW + column[None, :], mask=inside & (source >= 0)[:, None], other=0.0)
    tl.store(out_SW + at.to(tl.int64)[:, None] * W + column[None, :], tl.where(is_kept, kept, own), mask=inside)


_GATHER, _KEEP = Kernel(_gather), Kernel(_keep)
