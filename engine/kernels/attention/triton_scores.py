"""What kernels of attention share about scores."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """As `plan.first_seen`; of chunks, `window` is their positions."""
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
