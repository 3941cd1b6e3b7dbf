"""Triton versions of `blocks`: copies and digests of whole blocks. n blocks, E elements a block."""

import torch
import triton
import triton.language as tl

from engine.kernels.blocks import multipliers

CHUNK = 4096


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    flat = pool.view(pool.shape[0], -1)
    out = torch.empty((ids.shape[0], flat.shape[1]), dtype=pool.dtype, device=pool.device)
    grid = (ids.shape[0], triton.cdiv(flat.shape[1], CHUNK))
    _copy[grid](flat, out, ids, flat.shape[1], GATHER=True, CHUNK=CHUNK)
    return out


def scatter_blocks(staging: torch.Tensor, pool: torch.Tensor, ids: torch.Tensor) -> None:
    flat = pool.view(pool.shape[0], -1)
    grid = (ids.shape[0], triton.cdiv(flat.shape[1], CHUNK))
    _copy[grid](staging.contiguous(), flat, ids, flat.shape[1], GATHER=False, CHUNK=CHUNK)


def block_digests(staging: torch.Tensor) -> torch.Tensor:
    lanes = staging.contiguous().view(torch.int16 if staging.element_size() == 2 else torch.int32)
    num_chunks = triton.cdiv(lanes.shape[1], CHUNK)
    sums = torch.empty((lanes.shape[0], num_chunks), dtype=torch.int64, device=staging.device)
    lane_mask = 0xFFFF if staging.element_size() == 2 else 0xFFFFFFFF
    factors = multipliers(lanes.shape[1], staging.device)
    _digest[(lanes.shape[0], num_chunks)](lanes, factors, sums, lanes.shape[1], num_chunks, lane_mask, CHUNK=CHUNK)
    return sums.sum(dim=1)


@triton.jit
def _copy(source, target, ids_n, num_elements, GATHER: tl.constexpr, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(ids_n + index)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_elements
    if GATHER:
        tl.store(
            target + index * num_elements + at, tl.load(source + block * num_elements + at, mask=inside), mask=inside
        )
    else:
        tl.store(
            target + block * num_elements + at, tl.load(source + index * num_elements + at, mask=inside), mask=inside
        )


@triton.jit
def _digest(lanes_nE, factors_E, sums, num_lanes, num_chunks, lane_mask, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_lanes
    lanes = tl.load(lanes_nE + index * num_lanes + at, mask=inside, other=0).to(tl.int64) & lane_mask
    factors = tl.load(factors_E + at, mask=inside, other=0)
    tl.store(sums + index * num_chunks + tl.program_id(1), tl.sum((lanes + 1) * factors, axis=0))
