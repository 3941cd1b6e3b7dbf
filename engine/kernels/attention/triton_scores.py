"""Scores and softmax sums, as shared by attention kernels."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


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
def write_sums(
    sums, total, top, row, d, alone, sequence, item, kv_at, out_SHD, partial_IHD, stats_IH2, sinks_H,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write the sums of a decode program: the sequence's output if it was `alone`, else its item's part."""
    head = kv_at * G + row
    mask = (row < G)[:, None] & (d < D)[None, :]
    if alone != 0:
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks_H + head, mask=row < G, other=0.0) * 1.4426950408889634 - top)
        target = out_SHD + sequence.to(tl.int64) * (HQ * D) + head[:, None] * D + d[None, :]
        tl.store(target, (sums / total[:, None]).to(out_SHD.dtype.element_ty), mask=mask)
    else:
        base = item * HQ + head
        tl.store(partial_IHD + base[:, None] * D + d[None, :], sums, mask=mask)
        tl.store(stats_IH2 + base * 2, top, mask=row < G)
        tl.store(stats_IH2 + base * 2 + 1, total, mask=row < G)
