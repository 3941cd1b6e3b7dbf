"""Prefill attention on Hopper: loads, GEMMs and softmax in separate warp groups (Gluon, Triton's lower level).

The method is FlashAttention 3's (Shah et al., 2024). A program computes 128 queries of one head, 64 in each of two groups of four
warps; one more warp copies keys and values, N positions a step, into two buffers ahead of them. A group multiplies the next
step's queries and keys while it adds up this step's values; while one group computes exponentials the other multiplies.
For few queries with a long context, several programs share a tile, a part of the context each; the last one done adds up the
sums (as in stream-K, Osama et al., 2023). Letters and interface are `triton_prefill`'s; no window, 16-bit numbers, heads of
64 or 128.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.attention.split import HOPPER_STEP as STEP
from engine.kernels.attention.split import LARGE_TILE as ROWS
from engine.kernels.device import describe
from engine.kernels.launch import Kernel

BUFFERS = 2  # loop steps of keys, and of values, in shared memory
COMPUTING_GROUPS = 2  # four warps each
SWIZZLED_COLUMNS = 64  # 128 bytes, the width of a swizzled part of shared memory


_meet = getattr(gl, "thread_barrier", None) or gl.barrier  # the names up to Triton 3.6, and since 3.7
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def reads_pages(block_size: int) -> bool:
    """True if contexts can be read in the pool: blocks must be multiples of 8 rows."""
    return block_size % 8 == 0 and STEP % block_size == 0


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    num_kv_heads: int,
    scale: float,
    at_once: int = 0,
    blocks: torch.Tensor | None = None,
) -> None:
    """Write every row of `out` [T, Hq, D]; all as in `triton_prefill.prefill`, tiles of `LARGE_TILE` queries.

    With `blocks` [I, 2] int32 as in `triton_prefill.gather_context`, `keys` and `values` are the pool's, [num_blocks, B,
    Hkv D]. `at_once`: the limit with which `tiles` were dealt out. Launches with parts on one device must follow each other.
    """
    num_heads, head_dim = q.shape[1:]
    dtype = _TYPES[q.dtype]
    sums = torch.empty((at_once, num_heads, ROWS, head_dim), dtype=torch.float32, device=q.device)
    tops = torch.empty((2, at_once, num_heads, ROWS), dtype=torch.float32, device=q.device)
    page = 0 if blocks is None else keys.shape[1]
    size = [STEP, head_dim] if not page else [1, page, SWIZZLED_COLUMNS]
    loaded = (
        _descriptor(q.flatten(1), [ROWS // COMPUTING_GROUPS, head_dim]),
        _descriptor(keys, size),
        _descriptor(values, size),
    )
    fixed = (num_heads, num_kv_heads, head_dim, ROWS // COMPUTING_GROUPS, STEP, BUFFERS, page, dtype)
    _ATTEND.launch(
        (num_heads, tiles.shape[0]), (q.dtype, *fixed[:-1]),
        *loaded, tiles if blocks is None else blocks, tiles, out,
        sums, tops, tops.stride(0), _arrived(q.device), scale * 1.4426950408889634, *fixed,
        num_warps=4,
    )  # fmt: skip


@functools.cache
def _arrived(device: torch.device) -> torch.Tensor:
    """[...] int32: parts of a tile finished by each group; 0 between launches."""
    return torch.zeros(COMPUTING_GROUPS * describe(device).processors, dtype=torch.int32, device=device)


def _descriptor(rows: torch.Tensor, size: list[int]) -> TensorDescriptor:
    """Tensor descriptor for tiles of `rows`."""
    layout = gl.NVMMASharedLayout.get_default_for(size, _TYPES[rows.dtype])
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), size, layout)


@gluon.jit
def _attend(
    q_rows, k_rows, v_rows, blocks_I2, tiles_I8, out_THD, sums_IHMD, tops_2IHM, totals_at, arrived, scale_log2,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    head, tile = gl.program_id(0), tiles_I8 + gl.program_id(1) * 8
    first_row, num_rows = gl.load(tile), gl.load(tile + 1)
    first_position, context = gl.load(tile + 2), gl.load(tile + 3)
    part, parts = gl.load(tile + 5), gl.maximum(gl.load(tile + 6), 1)
    end = first_position + num_rows  # one past the last row's position
    all_steps = gl.maximum((end + N - 1) // N, 1)  # a tile without rows runs one step and stores nothing
    first_step = all_steps * part // parts
    steps = all_steps * (part + 1) // parts - first_step
    q = gl.allocate_shared_memory(DTYPE, [2, M, D], q_rows.layout)
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], DTYPE)
    k = gl.allocate_shared_memory(DTYPE, [STAGES, N, D], KV)
    v = gl.allocate_shared_memory(DTYPE, [STAGES, N, D], KV)
    q_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_there, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_there.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=2)
        mbarrier.init(v_there.index(slot), count=1)
        mbarrier.init(v_free.index(slot), count=2)
    fence_async_shared()
    column, kv_column, row = head * D, head // (HQ // HKV) * D, context + first_step * N
    last_row = context + gl.maximum(end, 1) - 1
    source = (q_rows, k_rows, v_rows, blocks_I2)
    buffers = (k, v, q_there, k_there, k_free, v_there, v_free)
    work = (out_THD, first_row, num_rows, first_position, column, end, first_step, steps, scale_log2)
    shared = (sums_IHMD, tops_2IHM, totals_at, arrived, gl.program_id(1) * HQ + head, part, parts)
    gl.warp_specialize(
        [
            (_compute, (q.index(0), buffers, work, shared, HQ, D, 0, M, N, STAGES)),
            (_compute, (q.index(1), buffers, work, shared, HQ, D, 1, M, N, STAGES)),
            (
                _copy,
                (source, q, buffers, (first_row, row, last_row, column, kv_column, steps), D, M, N, STAGES, PAGE),
            ),
        ],
        [4, 1],  # warps of the producer and second consumer groups
        [240, 24],  # registers of their threads: sums and scores need them
    )


@gluon.jit
def _copy(
    source, q, buffers, work,
    D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The producer warps: copy queries, keys and values, each step once both consumer groups released its buffer."""
    q_rows, k_rows, v_rows, blocks_I2 = source
    k, v, q_there, k_there, k_free, v_there, v_free = buffers
    first_row, row, last_row, column, kv_column, steps = work
    mbarrier.expect(q_there, 2 * q_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(q_rows, [first_row, column], q_there, q.index(0))
    tma.async_copy_global_to_shared(q_rows, [first_row + M, column], q_there, q.index(1))
    for step in range(steps):
        slot, before = step % STAGES, ((step // STAGES) & 1) ^ 1
        mbarrier.wait(k_free.index(slot), before)
        mbarrier.expect(k_there.index(slot), N * D * 2)
        _bring(k_rows, blocks_I2, k, k_there.index(slot), slot, row + step * N, last_row, kv_column, D, N, STAGES, PAGE)
        mbarrier.wait(v_free.index(slot), before)
        mbarrier.expect(v_there.index(slot), N * D * 2)
        _bring(v_rows, blocks_I2, v, v_there.index(slot), slot, row + step * N, last_row, kv_column, D, N, STAGES, PAGE)


@gluon.jit
def _bring(
    rows, blocks_I2, buffers, there, slot, row, last_row, column,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Copy `N` rows of keys or values, contiguous or by blocks; rows after `last_row` are undefined."""
    if PAGE == 0:
        tma.async_copy_global_to_shared(rows, [row, column], there, buffers.index(slot))
    else:
        WIDTH: gl.constexpr = rows.block_type.shape[2]
        PAGES: gl.constexpr = N // PAGE
        pages = buffers._reinterpret(buffers.dtype, [STAGES * (D // WIDTH) * PAGES, 1, PAGE, WIDTH], rows.layout)
        for page in gl.static_range(PAGES):
            block = gl.load(blocks_I2 + gl.minimum(row + page * PAGE, last_row) // PAGE * 2)
            for half in gl.static_range(D // WIDTH):
                place = pages.index((slot * (D // WIDTH) + half) * PAGES + page)
                tma.async_copy_global_to_shared(rows, [block, 0, column + half * WIDTH], there, place)


@gluon.jit
def _compute(
    q, buffers, work, shared,
    HQ: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The two consumer groups: `M` rows each. A step's scores start before the previous step's values are accumulated."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    k, v, q_there, k_there, k_free, v_there, v_free = buffers
    out_THD, first_row, num_rows, first_position, column, end, first_step, steps, scale_log2 = work
    position = first_position + GROUP * M - first_step * N + gl.arange(0, M, gl.SliceLayout(1, SCORES))
    masked = (first_position + GROUP * M + 1) // N - first_step  # from this step on, some rows need a mask
    nothing = gl.zeros((M, N), gl.float32, SCORES)
    sums = gl.zeros((M, D), gl.float32, SUMS)

    mbarrier.wait(q_there, 0)
    mbarrier.wait(k_there.index(0), 0)
    scores = warpgroup_mma(q, k.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _free(k_free.index(0))
    if masked <= 0:
        scores = _hide(scores, 0, position, N, SCORES)
    top = gl.max(scores, 1) * scale_log2
    weights = gl.exp2(scores * scale_log2 - top[:, None])
    total = gl.sum(weights, 1)
    operand = gl.convert_layout(weights.to(v.dtype), WEIGHTS)
    for step in range(1, steps):
        slot, last = step % STAGES, (step - 1) % STAGES
        mbarrier.wait(k_there.index(slot), (step // STAGES) & 1)
        scores = warpgroup_mma(q, k.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_there.index(last), ((step - 1) // STAGES) & 1)
        sums = warpgroup_mma(operand, v.index(last), sums, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        _free(k_free.index(slot))
        if step >= masked:
            scores = _hide(scores, step * N, position, N, SCORES)
        new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
        weights = gl.exp2(scores * scale_log2 - new_top[:, None])
        decay = gl.exp2(top - new_top)
        total = total * decay + gl.sum(weights, 1)
        top = new_top
        sums, operand = warpgroup_mma_wait(0, deps=[sums, operand])
        _free(v_free.index(last))
        sums = sums * gl.convert_layout(decay, ROW)[:, None]
        operand = gl.convert_layout(weights.to(v.dtype), WEIGHTS)
    last = (steps - 1) % STAGES
    mbarrier.wait(v_there.index(last), ((steps - 1) // STAGES) & 1)
    if (first_step + steps) * N > end:
        _clean(v.index(last), (first_step + steps - 1) * N, end, N)
    sums = warpgroup_mma(operand, v.index(last), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    top, total = gl.convert_layout(top, ROW), gl.convert_layout(total, ROW)
    is_last = True
    if shared[6] > 1:
        sums, top, total, is_last = _add_up(sums, top, total, shared, HQ, D, GROUP, M, SUMS)
    row = GROUP * M + gl.arange(0, M, ROW)
    offsets = (first_row + row).to(gl.int64)[:, None] * (HQ * D) + column
    offsets += gl.arange(0, D, gl.SliceLayout(0, SUMS))[None, :]
    sums = sums / total[:, None]
    gl.store(out_THD + offsets, sums.to(out_THD.dtype.element_ty), mask=(row < num_rows)[:, None] & is_last)


@gluon.jit
def _add_up(
    sums,
    top,
    total,
    shared,
    HQ: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    M: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Write this part's sums for the other parts. The last part to finish combines all; the flag tells."""
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    sums_IHMD, tops_2IHM, totals_at, arrived, item, part, parts = shared
    row = GROUP * M + gl.arange(0, M, ROW)
    at = row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, SUMS))[None, :]
    ROWS: gl.constexpr = 2 * M
    gl.store(sums_IHMD + item * (ROWS * D) + at, sums)
    gl.store(tops_2IHM + item * ROWS + row, top)
    gl.store(tops_2IHM + totals_at + item * ROWS + row, total)
    _meet()
    counter = arrived + (item - part * HQ) * 2 + GROUP
    before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    is_last = before == parts - 1
    if is_last:
        gl.store(counter, 0)
        for step in range(1, parts):
            other = item + ((part + step) % parts - part) * HQ
            its_top = gl.load(tops_2IHM + other * ROWS + row, cache_modifier=".cg")
            its_total = gl.load(tops_2IHM + totals_at + other * ROWS + row, cache_modifier=".cg")
            its_sums = gl.load(sums_IHMD + other * (ROWS * D) + at, cache_modifier=".cg")
            new_top = gl.maximum(top, its_top)
            decay, its_decay = gl.exp2(top - new_top), gl.exp2(its_top - new_top)
            sums = sums * decay[:, None] + its_sums * its_decay[:, None]
            total = total * decay + its_total * its_decay
            top = new_top
    return sums, top, total, is_last


@gluon.jit
def _free(buffer):
    """Release a buffer once all warps of this group are done; one of them signals it."""
    _meet()
    mbarrier.arrive(buffer, count=1)


@gluon.jit
def _hide(scores, at, position, N: gl.constexpr, SCORES: gl.constexpr):
    """Apply the causal mask."""
    n = at + gl.arange(0, N, gl.SliceLayout(0, SCORES))
    return gl.where(n[None, :] <= position[:, None], scores, float("-inf"))


@gluon.jit
def _clean(v, at, end, N: gl.constexpr):
    """Zero the positions from `end` on, which belong to another request: 0 * NaN would be NaN. Both groups write the same."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    there = at + gl.arange(0, N, gl.SliceLayout(1, LAYOUT)) < end
    v.store(gl.where(there[:, None], v.load(LAYOUT), 0.0))
    fence_async_shared()
    _meet()


_ATTEND = Kernel(_attend)
