"""The rows of a sequence with drafted tokens: the first one's program computes all, each behind the state before it."""

import triton
import triton.language as tl

from engine.kernels.delta.plan import CARRIED as _CARRIED

CARRIED = tl.constexpr(_CARRIED)


@triton.jit
def carried_target(moves_S2, row):
    """Return the block that the next row writes, if it goes on from this row's state; else -1."""
    is_there = row + 1 < tl.num_programs(0)
    source = tl.load(moves_S2 + row * 2 + 2, mask=is_there, other=-1)
    target = tl.load(moves_S2 + row * 2 + 3, mask=is_there, other=-1)
    return tl.where(source == CARRIED, target, -1).to(tl.int64)
