"""Triton version of `routing`: the router's GEMM, split over K to fill the GPU, then one program a token.

T tokens, E experts in G groups of N, K experts a token, P partial sums.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.experts.routing import Choice, Held
from engine.kernels.experts.rule import GroupScore, RoutingRule, Score
from engine.kernels.launch import Kernel
from engine.kernels.triton_linear import MAX_ROWS, PREFETCH_ELEMENTS, Tiles, launch_product

MAX_SPLITS = 8
LOOP_STEP = 64  # inputs


def route(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    rule: RoutingRule,
    *,
    scales: torch.Tensor | None = None,
    held: Held | None = None,
) -> Choice:
    logits, num_experts = _logits(x, router), router.shape[0]
    num_tokens = x.shape[0]
    ids = torch.empty((num_tokens, rule.chosen), dtype=torch.int32, device=x.device)
    weights = torch.empty((num_tokens, rule.chosen), dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return Choice(ids, weights)
    pdl = describe(x.device).has_tma
    group = num_experts // rule.num_groups
    fixed = (
        logits.shape[0] if logits.dim() == 3 else 1, num_experts, rule.num_groups, triton.next_power_of_2(rule.num_groups),
        group, triton.next_power_of_2(group), rule.groups_kept, rule.group_score is GroupScore.TWO_BEST,
        rule.chosen, triton.next_power_of_2(rule.chosen), rule.score is Score.SIGMOID,
        rule.score is Score.SOFTMAX_OF_CHOSEN, rule.score is Score.NEAR_OF_CHOSEN, rule.renormalised,
        bias is not None, correction is not None,
        scales is not None, *(held or Held(0, 0)), pdl,
    )  # fmt: skip
    biased, corrected, scaled = (ids if given is None else given for given in (bias, correction, scales))
    _ROUTE.launch(
        (num_tokens,), (logits.dtype, biased.dtype, *fixed),
        logits, biased, corrected, scaled, ids, weights, num_tokens, rule.scale, rule.smallest_sum, rule.near, *fixed,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return Choice(ids, weights)


def _logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """The product [T, E], or its partial sums [P, T, E], in float32."""
    num_rows, (num_experts, num_inputs) = x.shape[0], router.shape
    steps = num_inputs // LOOP_STEP
    is_short = x.element_size() == router.element_size() == 2
    if 0 < num_rows <= MAX_ROWS and is_short and num_inputs == steps * LOOP_STEP >= PREFETCH_ELEMENTS:
        most = min(MAX_SPLITS, num_inputs // PREFETCH_ELEMENTS)
        splits = max(count for count in range(1, most + 1) if steps % count == 0)
        out = torch.empty((splits, num_rows, num_experts), dtype=torch.float32, device=x.device)
        launch_product(x, router, None, out, Tiles(16, LOOP_STEP, 4, 1, splits=splits))
        return out
    if x.is_cuda and is_short:
        return torch.mm(x, router.T, out_dtype=torch.float32)
    return torch.mm(x.float(), router.float().T)


@triton.jit(do_not_specialize=["num_tokens", "scale", "smallest_sum", "near"])
def _route(
    logits_PTE, bias_E, correction_E, scales_E, ids_TK, weights_TK, num_tokens, scale, smallest_sum, near,
    PARTS: tl.constexpr, E: tl.constexpr, G: tl.constexpr, G_PADDED: tl.constexpr, N: tl.constexpr,
    N_PADDED: tl.constexpr, KEPT: tl.constexpr, TWO_BEST: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    SIGMOID: tl.constexpr, OF_CHOSEN: tl.constexpr, NEAR: tl.constexpr, RENORMALISED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, HAS_SCALES: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    g, n = tl.arange(0, G_PADDED), tl.arange(0, N_PADDED)
    at = g[:, None] * N + n[None, :]
    inside = (g < G)[:, None] & (n < N)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.load(logits_PTE + token * E + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        logits += tl.load(logits_PTE + (part * num_tokens.to(tl.int64) + token) * E + at, mask=inside, other=0.0)
    if HAS_BIAS:
        logits += tl.load(bias_E + at, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif OF_CHOSEN or NEAR:
        scores = logits
    else:
        logits = tl.where(inside, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    scores = tl.where(scores == scores, scores, 0.0)
    compared = scores
    if HAS_CORRECTION:
        compared += tl.load(correction_E + at, mask=inside, other=0.0)
    compared = tl.where(inside, compared, float("-inf"))
    if KEPT < G:
        worth = tl.max(compared, axis=1)
        if TWO_BEST:
            best = tl.min(tl.where(compared == worth[:, None], at, E), axis=1)
            worth += tl.max(tl.where(at == best[:, None], float("-inf"), compared), axis=1)
        worth = tl.where(g < G, worth, float("-inf"))
        kept = g < 0
        for _ in tl.static_range(KEPT):
            first = tl.min(tl.where(worth == tl.max(worth, axis=0), g, G), axis=0)
            kept = kept | (g == first)
            worth = tl.where(g == first, float("-inf"), worth)
        compared = tl.where(kept[:, None], compared, float("-inf"))
    k = tl.arange(0, K_PADDED)
    ids = tl.zeros((K_PADDED,), tl.int32)
    weights = tl.zeros((K_PADDED,), tl.float32)
    for slot in tl.static_range(K):
        highest = tl.max(tl.max(compared, axis=1), axis=0)
        chosen = tl.min(tl.min(tl.where(compared == highest, at, E - 1), axis=1), axis=0)
        weight = tl.sum(tl.sum(tl.where(at == chosen, scores, 0.0), axis=1), axis=0)
        if NEAR:
            # Experts selected before are masked in `compared`.
            is_near = (compared > float("-inf")) & (weight - scores <= near * tl.maximum(tl.abs(scores), weight))
            others = tl.where(is_near, tl.exp(scores - weight), 0.0)
            weight = 1.0 / tl.sum(tl.sum(others, axis=1), axis=0)
        compared = tl.where(at == chosen, float("-inf"), compared)
        ids = tl.where(k == slot, chosen, ids)
        weights = tl.where(k == slot, weight, weights)
    if OF_CHOSEN:
        weights = tl.where(k < K, weights, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights = weights / tl.sum(weights, axis=0)
    if RENORMALISED:
        weights = weights / tl.maximum(tl.sum(weights, axis=0), smallest_sum)
    if HAS_SCALES:
        weights = weights * tl.load(scales_E + ids, mask=k < K, other=0.0)
    if HELD > 0:
        ids -= FIRST
        is_here = (ids >= 0) & (ids < HELD)
        ids = tl.where(is_here, ids, -1)
        weights = tl.where(is_here, weights, 0.0)
    tl.store(ids_TK + token * K + k, ids, mask=k < K)
    tl.store(weights_TK + token * K + k, weights * scale, mask=k < K)


_ROUTE = Kernel(_route)
