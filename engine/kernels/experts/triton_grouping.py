"""Token-expert pairs, sorted by expert and split into tiles on the device.

P pairs, E experts, S tiles of at most M pairs. Each expert owns as many tiles as it can need: those from (pairs before its own)
// M + its number on. So every program finds its own place by counting, and S = P // M + E is known before.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.launch import Kernel

TILE_COLUMNS = 4  # expert (-1: none), first index in the order, pairs
BLOCK = 4096  # pairs counted by a loop step, at most


def group(ids: torch.Tensor, num_experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs [P] int32, sorted by expert, and tiles [S, 4] int32.

    `ids` [T, K] int32; -1: no expert computes the pair, and it is in no tile.
    """
    num_pairs = ids.numel()
    order = torch.empty((num_pairs,), dtype=torch.int32, device=ids.device)
    tiles = torch.empty((num_pairs // tile + num_experts, TILE_COLUMNS), dtype=torch.int32, device=ids.device)
    pdl = describe(ids.device).has_tma
    block = min(BLOCK, max(32, triton.next_power_of_2(num_pairs)))
    _GROUP.launch(
        (num_experts,), (tile, block, pdl), ids, order, tiles, num_pairs, tile, block, pdl,
        num_warps=8 if block == BLOCK else 4, launch_pdl=pdl,
    )  # fmt: skip
    return order, tiles


@triton.jit(do_not_specialize=["num_pairs"])
def _group(ids_P, order_P, tiles_S4, num_pairs, M: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before, own = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        ids = tl.load(ids_P + start + at, mask=start + at < num_pairs, other=2147483647)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    first, count = tl.sum(before, axis=0), tl.sum(own, axis=0)
    tile = first // M + expert
    # Pairs without an expert leave empty tiles at the end.
    last = tl.where(expert == tl.num_programs(0) - 1, num_pairs, first + count) // M + expert
    for index in range(tile, last + 1):
        done = (index - tile) * M
        left = tl.minimum(M, count - done)
        tl.store(tiles_S4 + index * 4, tl.where(left > 0, expert, -1))
        tl.store(tiles_S4 + index * 4 + 1, first + done)
        tl.store(tiles_S4 + index * 4 + 2, left)
    if count > 0:
        filled = first
        for start in range(0, num_pairs, BLOCK):
            mine = tl.load(ids_P + start + at, mask=start + at < num_pairs, other=-1) == expert
            place = tl.cumsum(mine.to(tl.int32), axis=0)
            tl.store(order_P + filled + place - 1, start + at, mask=mine)
            filled += tl.sum(mine.to(tl.int32), axis=0)


_GROUP = Kernel(_group)
