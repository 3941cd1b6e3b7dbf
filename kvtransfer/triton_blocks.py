"""The kernel of `blocks`: copies whole blocks and digests them on the way, also into memory of another device.

A fixed number of programs walks over all pieces. Addresses are plain integers: the peer's pool is memory that torch does not
know. n blocks of L lanes (32 bit).
"""

from typing import Any

import torch
import triton
import triton.language as tl

CHUNK = 2048  # lanes of a loop step
STEPS = 8  # loop steps of a piece
PROGRAMS = 264  # two for each processor of an H200; fewer copy slower over NVLink (64: 6 % less, 24: a quarter less)


_compiled: dict[tuple[object, ...], Any] = {}  # Triton's own look at the arguments takes longer than copying a block


def move_blocks(
    source: int,
    target: int | None,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    digests: torch.Tensor | None,
    *,
    count: int | torch.Tensor,
    block_lanes: int,
) -> None:
    """See `blocks.move_blocks`; runs on the current stream of the current device."""
    pieces = triton.cdiv(block_lanes, CHUNK * STEPS)
    ids = next(x for x in (source_ids, target_ids, digests) if x is not None)
    told = isinstance(count, int)
    flags = (target is not None, source_ids is not None, target_ids is not None, digests is not None, told)
    target = source if target is None else target
    arguments = (
        source, target, ids if source_ids is None else source_ids, ids if target_ids is None else target_ids,
        ids if digests is None else digests, ids if told else count, count if told else 0, pieces, block_lanes,
        *flags, CHUNK, STEPS,
    )  # fmt: skip
    grid = (min(PROGRAMS, count * pieces) if told else PROGRAMS, 1, 1)
    # everything that Triton compiles for; tensors are whole allocations or multiples of 16 bytes into one
    key = (flags, source % 16, target % 16, block_lanes, torch.cuda.current_device() if ids.is_cuda else None)
    if (compiled := _compiled.get(key)) is not None:
        compiled[grid](*arguments)
    elif (compiled := _move[grid](*arguments, num_warps=8)) is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled


@triton.jit
def _multiplier(at):
    """splitmix64(at) | 1, see `digest.multipliers`."""
    z = (at.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit(do_not_specialize=["count", "pieces"])
def _move(
    source, target, source_ids_n, target_ids_n, digests_n, count_1, count, pieces, block_lanes,
    TARGET: tl.constexpr, SOURCE_IDS: tl.constexpr, TARGET_IDS: tl.constexpr, DIGEST: tl.constexpr, TOLD: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    if not TOLD:
        count = tl.load(count_1)
    lane = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), count * pieces, tl.num_programs(0)):
        index, piece = item // pieces, item % pieces
        source_block = tl.load(source_ids_n + index).to(tl.int64) if SOURCE_IDS else index.to(tl.int64)
        target_block = tl.load(target_ids_n + index).to(tl.int64) if TARGET_IDS else index.to(tl.int64)
        read = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16) + source_block * block_lanes
        write = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16) + target_block * block_lanes
        total = tl.zeros((CHUNK,), tl.uint64)
        for step in range(STEPS):
            at = (piece * STEPS + step) * CHUNK + lane
            inside = at < block_lanes
            lanes = tl.load(read + at, mask=inside, other=0)
            if TARGET:
                tl.store(write + at, lanes, mask=inside)
            if DIGEST:
                term = ((lanes.to(tl.int64) & 0xFFFFFFFF).to(tl.uint64) + 1) * _multiplier(at)
                total += tl.where(inside, term, tl.zeros_like(term))
        if DIGEST:
            tl.atomic_add(digests_n + index, tl.sum(total, axis=0).to(tl.int64), sem="relaxed")
