"""Triton version of `pooling`: a program sums up some features of a text's rows. T rows of B texts, E features."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel
from engine.kernels.texts.pooling import KINDS

# A loop step's.
ROWS, COLUMNS = 32, 64


def pool_texts(x: torch.Tensor, spans: torch.Tensor, kind: str) -> torch.Tensor:
    x, spans = x.contiguous(), spans.contiguous()
    num_texts, size = spans.shape[1], x.shape[1]
    out = torch.empty((num_texts, size), dtype=torch.float32, device=x.device)
    fixed = (size, ROWS, COLUMNS, KINDS.index(kind))
    _POOL.launch(
        (num_texts, triton.cdiv(size, COLUMNS)), (x.dtype, x.data_ptr() % 16, spans.data_ptr() % 16, *fixed),
        x, spans, num_texts, out, *fixed,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_texts"])
def _pool(
    x_TE, spans_3B, num_texts, out_BE, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    text = tl.program_id(0)
    begin, count = tl.load(spans_3B + text).to(tl.int64), tl.load(spans_3B + num_texts + text)
    before = tl.load(spans_3B + 2 * num_texts + text)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    most = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in tl.range(0, count, ROWS):
        row = at + tl.arange(0, ROWS)
        there = (row < count)[:, None] & (column < E)[None, :]
        values = tl.load(x_TE + (begin + row)[:, None] * E + column[None, :], mask=there, other=0.0).to(tl.float32)
        if KIND == 3:
            most = tl.maximum(most, tl.where(there, values, float("-inf")))
        elif KIND == 2:
            total += values * (1 + before + row).to(tl.float32)[:, None]
        else:
            total += values
    if KIND == 3:
        found = tl.max(most, axis=0)
    else:
        rows = count.to(tl.float32)
        if KIND == 2:
            rows = rows * (rows + 1.0 + 2.0 * before.to(tl.float32)) / 2.0
        elif KIND == 1:
            rows = tl.sqrt(rows)
        found = tl.sum(total, axis=0) / rows
    tl.store(out_BE + text.to(tl.int64) * E + column, found, mask=column < E)


_POOL = Kernel(_pool)
