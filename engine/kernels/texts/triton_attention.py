"""Triton version of `attention`: a program computes M queries of one head, N keys a loop step.

Texts share programs: M queries one behind the other meet all keys that one of them sees, so short texts fill a program
together, and the grid depends on the number of tokens alone. Steps in the middle, whose keys all M queries see, need no mask.
T queries, S keys, Hq query heads, Hkv key and value heads, D head size, R distances with a bias.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention.triton_scores import LOG2_E
from engine.kernels.launch import Kernel
from engine.kernels.texts.attention import Distances

Shape = tuple[int, int, int, int]  # M, N, warps, stages


def attend_texts(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    distances: Distances | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    num_queries, num_heads, dim = queries.shape
    rows, step, warps, stages = shape or shape_of(num_queries, dim, queries.dtype)
    out = torch.empty((num_queries, num_heads, dim), dtype=queries.dtype, device=queries.device)
    if not num_queries:
        return out
    heads = [one if one.stride()[1:] == (dim, 1) else one.contiguous() for one in (queries, keys, values)]
    far = 0 if distances is None else distances.biases.shape[1] // 2
    fixed = (
        num_heads, keys.shape[1], dim, max(16, triton.next_power_of_2(dim)), rows, step, stages, far,
        *(one.stride(0) for one in heads),
    )  # fmt: skip
    aligned = tuple(one.data_ptr() % 16 == 0 for one in (*heads, seen))
    _ATTEND.launch(
        (num_heads, triton.cdiv(num_queries, rows)), (queries.dtype, aligned, *fixed),
        *heads, seen, seen.stride(0), out if distances is None else distances.biases,
        seen if distances is None else distances.places, out, num_queries, scale * LOG2_E, *fixed,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def shape_of(num_queries: int, dim: int, dtype: torch.dtype) -> Shape:
    """The tiling of a pass over so many tokens."""
    if dtype.itemsize > 2:
        return (32, 32, 4, 2) if dim <= 128 else (16, 32, 4, 2)
    if num_queries <= 256:
        return (16, 64, 4, 3)
    return (64, 64, 4, 3) if dim <= 128 else (64, 64, 8, 2)


@triton.jit(do_not_specialize=["num_queries", "seen_row"], do_not_specialize_on_alignment=["biases_HR", "places_T"])
def _attend(
    q_THD, k_SHD, v_SHD, seen_2T, seen_row, biases_HR, places_T, out_THD, num_queries, scale_log2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, R: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    m, d = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, D_PADDED)
    there = m < num_queries
    m = tl.minimum(m, num_queries - 1)  # rows beyond are as the last one
    first, end = tl.load(seen_2T + m), tl.load(seen_2T + seen_row + m)
    m = m.to(tl.int64)
    inside = (d < D)[None, :]
    q = tl.load(q_THD + m[:, None] * Q_ROW + head * D + d[None, :], mask=inside, other=0.0)
    column = head // (HQ // HKV) * D + d
    keys, values = k_SHD + column, v_SHD + column
    place = end
    if R > 0:
        place = tl.load(places_T + m)
        biases_HR += head * (2 * R + 1) + R

    sums = tl.zeros((M, D_PADDED), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    begin, stop = tl.min(first, axis=0), tl.max(end, axis=0)
    whole = begin + tl.cdiv(tl.max(first, axis=0) - begin, N) * N  # from here on all queries see what is before `end`
    after = whole + tl.maximum(tl.min(end, axis=0) - whole, 0) // N * N
    for at in tl.range(begin, tl.minimum(whole, stop), N, num_stages=1):
        sums, top, total = _step(
            q, keys, values, at, first, end, stop, place, biases_HR, scale_log2, sums, top, total,
            D, D_PADDED, N, R, K_ROW, V_ROW, True,
        )  # fmt: skip
    for at in tl.range(whole, after, N, num_stages=STAGES):
        sums, top, total = _step(
            q, keys, values, at, first, end, stop, place, biases_HR, scale_log2, sums, top, total,
            D, D_PADDED, N, R, K_ROW, V_ROW, False,
        )  # fmt: skip
    for at in tl.range(after, stop, N, num_stages=1):
        sums, top, total = _step(
            q, keys, values, at, first, end, stop, place, biases_HR, scale_log2, sums, top, total,
            D, D_PADDED, N, R, K_ROW, V_ROW, True,
        )  # fmt: skip
    target = out_THD + m[:, None] * (HQ * D) + head * D + d[None, :]
    tl.store(target, (sums / total[:, None]).to(out_THD.dtype.element_ty), mask=inside & there[:, None])


@triton.jit
def _step(
    q, keys, values, at, first, end, stop, place, biases, scale_log2, sums, top, total,
    D: tl.constexpr, D_PADDED: tl.constexpr, N: tl.constexpr, R: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys [at, at + N). `MASKED`: some queries don't see all of them; nothing is read from `stop` on."""
    n = at + tl.arange(0, N)
    row = n.to(tl.int64)[:, None]
    if MASKED:
        inside = (n < stop)[:, None] & (tl.arange(0, D_PADDED) < D)[None, :]
        k = tl.load(keys[None, :] + row * K_ROW, mask=inside, other=0.0)
        v = tl.load(values[None, :] + row * V_ROW, mask=inside, other=0.0)
    elif D < D_PADDED:
        inside = (tl.arange(0, D_PADDED) < D)[None, :]
        k = tl.load(keys[None, :] + row * K_ROW, mask=inside, other=0.0)
        v = tl.load(values[None, :] + row * V_ROW, mask=inside, other=0.0)
    else:
        k = tl.load(keys[None, :] + row * K_ROW)
        v = tl.load(values[None, :] + row * V_ROW)
    scores = tl.dot(q, k.T, input_precision="ieee")
    factor = scale_log2
    if R > 0:
        behind = tl.minimum(tl.maximum(n[None, :] - place[:, None], -R), R)
        scores = scores * scale_log2 + tl.load(biases + behind) * 1.4426950408889634
        factor = 1.0
    if MASKED:
        scores = tl.where((n[None, :] >= first[:, None]) & (n[None, :] < end[:, None]), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
    safe_top = new_top
    if MASKED:  # a query may have seen nothing so far
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * factor - safe_top[:, None])  # one instruction, and the exponential
    decay = tl.exp2(top - safe_top)
    sums = tl.dot(weights.to(v.dtype), v, sums * decay[:, None], input_precision="ieee")
    return sums, new_top, total * decay + tl.sum(weights, axis=1)


_ATTEND = Kernel(_attend)
