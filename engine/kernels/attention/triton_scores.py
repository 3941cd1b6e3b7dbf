"""Scores and softmax sums, as shared by attention kernels."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LEAST = tl.constexpr(-1e30)  # the maximum of a row that sees none of an item's positions


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """As `plan.first_seen`; for chunked attention, `window` is the chunk size."""
    if CHUNKED:
        return position // window * window
    else:
        return position - window + 1


@triton.jit
def softcapped(scores_log2, CAP: tl.constexpr):
    """cap * tanh(score / cap) of scores in units of log2(e)."""
    CAP_LOG2: tl.constexpr = CAP * 1.4426950408889634
    x = tl.exp2(tl.abs(scores_log2) * (-2.0 / CAP))  # e^(-2 |score| / cap)
    return tl.where(scores_log2 < 0, -CAP_LOG2, CAP_LOG2) * ((1.0 - x) / (1.0 + x))


@triton.jit
def item_rows(items_I8, item, kv_at, Q: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr):
    """Return the query and head of each row of a decode program, whether there is one, and the end of its context.

    G heads of the first query, then those of the next one.
    """
    row = tl.arange(0, ROWS)
    query = row // G
    first_end = tl.load(items_I8 + item * 8 + 6)
    return query, kv_at * G + row % G, row < tl.load(items_I8 + item * 8 + 5) * G, first_end + query


@triton.jit
def write_sums(
    sums, total, top, query, head, mine, d, alone, sequence, item, out_SHD, partial_IQHD, stats_IQH2, sinks_H,
    Q: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write the sums of a decode program's rows, if they are `mine`: their outputs if it was `alone`, else its item's parts."""
    mask = mine[:, None] & (d < D)[None, :]
    if alone != 0:
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks_H + head, mask=mine, other=0.0) * 1.4426950408889634 - top)
        target = out_SHD + ((sequence + query).to(tl.int64) * HQ + head)[:, None] * D + d[None, :]
        tl.store(target, (sums / total[:, None]).to(out_SHD.dtype.element_ty), mask=mask)
    else:
        base = (item * Q + query) * HQ + head
        tl.store(partial_IQHD + base[:, None] * D + d[None, :], sums, mask=mask)
        tl.store(stats_IQH2 + base * 2, top, mask=mine)
        tl.store(stats_IQH2 + base * 2 + 1, total, mask=mine)
