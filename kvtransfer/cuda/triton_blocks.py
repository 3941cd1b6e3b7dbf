"""The kernels of `mover` and `shares`: they copy blocks, or shares of them, and digest them in one pass.

The target may be another device's memory. A request is read from host memory and the completion written there, so a move is
one launch, and waiting needs no driver call. A fixed number of programs walks over all pieces. Addresses are plain integers,
because torch does not know the peer's pool. n blocks of l lanes (32 bit).
"""

import torch
import triton
import triton.language as tl

# The fastest of eight settings between two H200s over NVLink, from 2 to 512 MiB (benchmarks/results/handoff.md).
CHUNK = 2048  # lanes of a loop step
STEPS = 2  # loop steps of a piece
PROGRAMS = 528  # four for each processor of an H100 or H200
# With one program a processor pushes are 3 to 6 % slower up to 32 MiB, but slow a concurrent prompt less.
PUSHING_PROGRAMS = 132


def move_blocks(
    request: torch.Tensor,
    digests: torch.Tensor,
    finished: torch.Tensor,
    answer: torch.Tensor,
    *,
    source: int,
    target: int | None,
    indices: torch.Tensor | None,
    source_ids: bool,
    target_ids: bool,
    digest: bool,
    block_lanes: int,
) -> None:
    """Copy blocks of `block_lanes` 32-bit lanes from address `source` to `target` (None: only digest them).

    `request` [1 + n] int64 is in host memory and read when the kernel runs. Its first word holds the number of blocks and, from
    bit 32 on, the move's sequence number; then each block's word its source index and, from bit 32 on, its target index (used
    only with `source_ids`, `target_ids`). `answer` [1 + n] int64, also in host memory, finally holds the sequence number and,
    with `digest`, the digests (bits of a u64, `kvtransfer.digest`). `digests` [n] int64 and `finished` [1] int32 are scratch
    memory of the device, zero before and after. `indices` [block_lanes] int64 are the lanes' indices in the whole model's
    block; None: this block's. Runs on the current stream of the current device.
    """
    pieces = triton.cdiv(block_lanes, CHUNK * STEPS)
    _move[(PUSHING_PROGRAMS if source_ids and target_ids else PROGRAMS,)](
        request, source, source if target is None else target, digests, finished, answer,
        digests if indices is None else indices, pieces, block_lanes,
        target is not None, source_ids, target_ids, digest, indices is not None, CHUNK, STEPS, num_warps=8,
    )  # fmt: skip


def move_shares(
    request: torch.Tensor,
    digests: torch.Tensor,
    finished: torch.Tensor,
    answer: torch.Tensor,
    *,
    source: int,
    target: int,
    lanes: torch.Tensor,
    places: torch.Tensor | None,
    spans: torch.Tensor,
    longest: int,
    source_lanes: int,
    target_lanes: int,
    is_pushed: bool = True,
) -> None:
    """Copy pieces of blocks of `source_lanes` 32-bit lanes at address `source` into blocks of `target_lanes` at `target`.

    `request` [2 + 2 n] int64 is in host memory: the number of pieces and, from bit 32 on, the sequence number; the number of
    moves; then of each piece a word with its block here and, from bit 32 on, there, and one with its kind and, from bit 32
    on, its move. `lanes` [l, 2] int32 are the lanes of all kinds here (-1: zeros are written) and there, `places` [l] int64
    their indices in the whole model's block (None: nothing is digested), `spans` [k + 1] int64 the first lane of each kind,
    `longest` the most of one. Otherwise as `move_blocks`, with a digest a move. `is_pushed`: into another device's memory.
    """
    pieces = triton.cdiv(longest, CHUNK * STEPS)
    _move_shares[(PUSHING_PROGRAMS if is_pushed else PROGRAMS,)](
        request, source, target, digests, finished, answer, lanes, digests if places is None else places, spans, pieces,
        source_lanes, target_lanes, places is not None, CHUNK, STEPS, num_warps=8,
    )  # fmt: skip


@triton.jit
def _multiplier(at):
    """splitmix64(at) | 1, see `digest.multipliers`."""
    z = (at.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit(do_not_specialize=["pieces"])
def _move(
    request_n, source, target, digests_n, finished_1, answer_n, indices_l, pieces, block_lanes,
    TARGET: tl.constexpr, SOURCE_IDS: tl.constexpr, TARGET_IDS: tl.constexpr, DIGEST: tl.constexpr, INDEXED: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    head = tl.load(request_n)
    # Loaded together with the head: each read of host memory costs a microsecond.
    ids = tl.load(request_n + 1 + tl.program_id(0) // pieces)
    count, sequence = (head & 0xFFFFFFFF).to(tl.int32), head >> 32
    lane = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), count * pieces, tl.num_programs(0)):
        index, piece = item // pieces, item % pieces
        source_block = (ids & 0xFFFFFFFF) if SOURCE_IDS else index.to(tl.int64)
        target_block = (ids >> 32) if TARGET_IDS else index.to(tl.int64)
        following = item + tl.num_programs(0)
        ids = tl.load(request_n + 1 + following // pieces, mask=following < count * pieces, other=0)
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
                place = tl.load(indices_l + at, mask=inside, other=0) if INDEXED else at
                term = ((lanes.to(tl.int64) & 0xFFFFFFFF).to(tl.uint64) + 1) * _multiplier(place)
                total += tl.where(inside, term, tl.zeros_like(term))
        if DIGEST:
            tl.atomic_add(digests_n + index, tl.sum(total, axis=0).to(tl.int64), sem="relaxed")
    _end(digests_n, finished_1, answer_n, sequence, count, lane, DIGEST, CHUNK)


@triton.jit(do_not_specialize=["pieces"])
def _move_shares(
    request_n, source, target, digests_n, finished_1, answer_n, lanes_2l, places_l, spans_s, pieces, source_lanes,
    target_lanes, DIGEST: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    head, moves = tl.load(request_n), tl.load(request_n + 1)
    count, sequence = (head & 0xFFFFFFFF).to(tl.int32), head >> 32
    lane = tl.arange(0, CHUNK)
    at = request_n + 2 + tl.program_id(0) // pieces * 2
    blocks, what = tl.load(at), tl.load(at + 1)
    for item in range(tl.program_id(0), count * pieces, tl.num_programs(0)):
        piece = item % pieces
        read = source.to(tl.pointer_type(tl.int32)) + (blocks & 0xFFFFFFFF) * source_lanes
        write = target.to(tl.pointer_type(tl.int32)) + (blocks >> 32) * target_lanes
        span, move = what & 0xFFFFFFFF, what >> 32
        following = item + tl.num_programs(0)
        at = request_n + 2 + following // pieces * 2
        # Loaded ahead: a read of host memory takes a microsecond.
        blocks = tl.load(at, mask=following < count * pieces, other=0)
        what = tl.load(at + 1, mask=following < count * pieces, other=0)
        first, last = tl.load(spans_s + span), tl.load(spans_s + span + 1)
        total = tl.zeros((CHUNK,), tl.uint64)
        for step in range(STEPS):
            entry = first + (piece * STEPS + step) * CHUNK + lane
            inside = entry < last
            origin = tl.load(lanes_2l + 2 * entry, mask=inside, other=-1)
            lanes = tl.load(read + origin, mask=inside & (origin >= 0), other=0)
            tl.store(write + tl.load(lanes_2l + 2 * entry + 1, mask=inside, other=0), lanes, mask=inside)
            if DIGEST:
                place = tl.load(places_l + entry, mask=inside, other=0)
                term = ((lanes.to(tl.int64) & 0xFFFFFFFF).to(tl.uint64) + 1) * _multiplier(place)
                total += tl.where(inside, term, tl.zeros_like(term))
        if DIGEST:
            tl.atomic_add(digests_n + move, tl.sum(total, axis=0).to(tl.int64), sem="relaxed")
    _end(digests_n, finished_1, answer_n, sequence, moves.to(tl.int32), lane, DIGEST, CHUNK)


@triton.jit
def _end(digests_n, finished_1, answer_n, sequence, count, lane, DIGEST: tl.constexpr, CHUNK: tl.constexpr):
    """The last program to end writes `count` digests, then the sequence, for the host to see."""
    tl.debug_barrier()  # all threads' writes precede the program's completion flag
    if tl.atomic_add(finished_1, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        if DIGEST:
            for start in range(0, count, CHUNK):
                inside = start + lane < count
                sums = tl.load(digests_n + start + lane, mask=inside, other=0, cache_modifier=".cg")
                tl.store(answer_n + 1 + start + lane, sums, mask=inside)
                tl.store(digests_n + start + lane, tl.zeros_like(sums), mask=inside)
        tl.debug_barrier()
        programs = tl.atomic_xchg(finished_1, 0, sem="acq_rel", scope="sys")  # digests precede the sequence
        tl.store(answer_n, sequence + programs - tl.num_programs(0))
