"""Checks of the kernels of mixtures of experts against float64, token by token.

`test_triton.py` runs them in Triton's interpreter, `tests/gpu/test_kernels.py` on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import gelu, silu

from engine.kernels.experts import Choice, Clamp, Experts, Held, RoutingRule, Score, mixture, route
from engine.kernels.experts.rule import GroupScore
from engine.kernels.quantised.fp8 import FP8, Fp8Matrix
from engine.kernels.quantised.groups import Groups
from tests.unit.kernels import fp8_checks
from tests.unit.kernels.group_checks import KINDS, matrix
from tests.unit.kernels.references import close
from tests.unit.kernels.triton_checks import Suite

RULES: list[tuple[int, RoutingRule]] = [
    (8, RoutingRule(chosen=2, renormalised=True)),
    (20, RoutingRule(chosen=3)),
    (128, RoutingRule(chosen=8, renormalised=True)),
    (1, RoutingRule(chosen=1)),
    (32, RoutingRule(chosen=4, score=Score.SOFTMAX_OF_CHOSEN)),
    (16, RoutingRule(chosen=1, score=Score.SIGMOID)),
    (16, RoutingRule(chosen=2, score=Score.NEAR_OF_CHOSEN, near=0.3)),
    (
        32,
        RoutingRule(
            chosen=4, score=Score.SIGMOID, num_groups=4, groups_kept=2, group_score=GroupScore.TWO_BEST,
            renormalised=True, scale=2.5,
        ),
    ),
    (60, RoutingRule(chosen=6, num_groups=3, groups_kept=1, scale=16.0)),
]  # fmt: skip


def check_routing(device: str, large: bool) -> None:
    for index, (num_experts, rule) in enumerate(RULES):
        has_bias = index % 2 == 1
        for num_tokens, hidden in [(2, 512), (5, 48)] + [(70, 64)] * (not index) + [(4096, 2048)] * large:
            x = torch.randn(num_tokens, hidden, device=device).half()
            router = (torch.randn(num_experts, hidden, device=device) / hidden**0.5).half()
            bias = torch.randn(num_experts, device=device) if has_bias else None
            correction = torch.randn(num_experts, device=device) if has_bias else None
            scales = torch.rand(num_experts, device=device) if index % 3 == 0 else None
            choice = route(x, router, bias, correction, rule, scales=scales)
            _check_choice(choice, x, router, bias, correction, rule, scales)
            for held in (
                Held(0, num_experts - num_experts // 3),
                Held(num_experts // 2, num_experts - num_experts // 2),
            ):
                own = route(x, router, bias, correction, rule, scales=scales, held=held)
                _check_held(own, choice, held)


def _check_held(own: Choice, choice: Choice, held: Held) -> None:
    """Each rank chooses as one does, and calls what it has not -1."""
    is_here = (choice.ids >= held.first) & (choice.ids < held.first + held.number)
    assert torch.equal(own.ids, torch.where(is_here, choice.ids - held.first, -1))
    assert torch.equal(own.weights, choice.weights * is_here)


def _check_choice(
    choice: Choice,
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    rule: RoutingRule,
    scales: torch.Tensor | None,
) -> None:
    """Kernel and twin agree wherever the twin's choice does not hang on rounding."""
    expected = route.reference(x, router, bias, correction, rule, scales=scales)
    assert choice.ids.dtype == torch.int32
    assert bool(((choice.ids >= 0) & (choice.ids < len(router))).all())
    same = (choice.ids == expected.ids).all(dim=1)
    assert same.double().mean() > 0.9, "choices differ by more than rounding"
    close(choice.weights[same], expected.weights[same].double(), torch.float32)


def check_routing_by_a_wide_router(device: str, large: bool) -> None:
    """A router in float32 is not rounded: halves of it would make other weights."""
    for num_tokens in (3, 70):
        x = torch.randn(num_tokens, 512, device=device).half()
        router = torch.randn(24, 512, device=device) / 512**0.5
        choice = route(x, router, None, None, RoutingRule(chosen=4))
        scores = (x.double() @ router.double().T).softmax(dim=-1)
        expected = scores.gather(1, choice.ids.long().clamp(min=0))  # nothing is chosen where it is only compiled
        assert float((choice.weights - expected).abs().max()) < 1e-5


def check_routing_of_nan(device: str, large: bool) -> None:
    """What was never written, or overflowed, still chooses experts that exist."""
    for (num_experts, rule), value in itertools.product(RULES, (float("nan"), float("inf"))):
        x = torch.full((3, 512), value, device=device).half()
        ids = route(x, torch.randn(num_experts, 512, device=device).half(), None, None, rule).ids
        assert bool(((ids >= 0) & (ids < num_experts)).all())


def check_mixture(device: str, large: bool) -> None:
    """Every way to cut the pairs: one each, few an expert, many an expert, experts without a token."""
    shapes = [(1, 32, 2, 64, 48), (3, 4, 2, 80, 40), (20, 5, 3, 64, 32), (70, 4, 3, 64, 136), (150, 2, 2, 40, 72)]
    large_shapes = [
        (4, 128, 8, 2048, 768),
        (64, 128, 8, 2048, 768),
        (700, 32, 4, 2880, 2880),
        (1024, 128, 8, 2048, 768),
    ]
    for num_tokens, num_experts, chosen, hidden, size in shapes + large_shapes * large:
        _check_mixture(num_tokens, num_experts, chosen, hidden, size, device)


def check_mixture_beside_identities(device: str, large: bool) -> None:
    """Each way to cut the pairs, in each kernel; some tokens have no expert with a product, and so has a whole pass."""
    for num_tokens, num_experts, identities in [(1, 16, 8), (9, 4, 5), (70, 3, 2), (150, 2, 2), (3, 1, 40)]:
        _check_mixture(num_tokens, num_experts, 3, 128, 128, device, identities=identities)
    for num_tokens, num_experts, identities in [(1, 16, 8), (70, 3, 2)]:
        for kind in ("fp8", "awq"):
            _check_mixture(num_tokens, num_experts, 3, 128, 128, device, kind=kind, identities=identities)
    _check_mixture(170, 2, 2, 128, 128, device, identities=200)
    for num_tokens in (1, 16, 2048) * large:
        _check_mixture(num_tokens, 512, 12, 6144, 2048, device, identities=256)


def check_mixture_of_a_share(device: str, large: bool) -> None:
    """Experts of other ranks add nothing, whatever memory held: each way to cut the pairs, in each kernel."""
    shapes = [(1, 16, 128), (9, 4, 128), (70, 3, 128), (150, 2, 128), (170, 2, 128)]
    with mock.patch.object(torch, "empty", _full_of_nan):
        for num_tokens, num_experts, size in shapes + [(64, 64, 768), (1024, 64, 768)] * large:
            _check_mixture(num_tokens, num_experts, 3, 128, size, device, is_share=True)
        for num_tokens, num_experts in [(1, 16), (70, 3)]:
            for kind in ("fp8", "awq"):
                _check_mixture(num_tokens, num_experts, 3, 128, 128, device, kind=kind, is_share=True)


def _full_of_nan(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(size, float("nan") if dtype.is_floating_point else 1, dtype=dtype, device=device)


def check_grouping(device: str, large: bool) -> None:
    """Each pair of an expert is in one tile of it; those of none are in no tile, and all that is behind has nothing to do."""
    from engine.kernels.experts.triton_grouping import group

    for num_pairs, num_experts, tile in [(40, 3, 16), (40, 1, 16), (7, 5, 16), (300, 2, 64), (5000, 4, 128)]:
        for none in (0.0, 0.3, 1.0):
            ids = torch.randint(num_experts, (num_pairs, 1), dtype=torch.int32, device=device)
            ids[torch.rand(num_pairs, 1, device=device) < none] = -1
            # What is never written would be taken for a tile. Memory full of -1, which means none, would hide it.
            with mock.patch.object(torch, "empty", lambda size, **options: torch.full(size, 1, **options)):
                order, tiles = group(ids, num_experts, tile)
            found = []
            for expert, first, count, _ in tiles.tolist():
                assert expert == -1 or 0 < count <= tile
                found += [(pair, expert) for pair in order[first : first + count].tolist() if expert >= 0]
            expected = [(pair, expert) for pair, expert in enumerate(ids.flatten().tolist()) if expert >= 0]
            assert sorted(found) == expected


def check_mixture_with_bias(device: str, large: bool) -> None:
    clamp = Clamp(alpha=1.702, limit=0.5)
    for num_tokens, num_experts in [(1, 16), (9, 4), (150, 2)]:
        _check_mixture(num_tokens, num_experts, 2, 48, 40, device, has_bias=True, clamp=clamp)
        _check_mixture(num_tokens, num_experts, 1, 48, 40, device, weighs_inputs=True)
        _check_mixture(num_tokens, num_experts, 2, 48, 40, device, activation="gelu_tanh")


def check_mixture_without_gates(device: str, large: bool) -> None:
    """Each kernel, with each switch that the sums have."""
    shapes = [(1, 16, 2, 48, 40), (9, 4, 2, 80, 48), (150, 2, 2, 64, 72)]
    for num_tokens, num_experts, chosen, hidden, size in shapes + [(4096, 128, 6, 2688, 1856)] * large:
        sizes = (num_tokens, num_experts, chosen, hidden, size, device)
        _check_mixture(*sizes, activation="relu2", has_bias=True)
        _check_mixture(*sizes, activation="relu2", weighs_inputs=True)
    for num_tokens, num_experts in ((1, 8), (9, 4), (170, 2)):
        for kind in ("awq", "fp8"):
            _check_mixture(
                num_tokens, num_experts, 2, 128, 64, device, kind=kind, activation="relu2", plain_down=kind == "awq"
            )


def check_mixture_in_fp8(device: str, large: bool) -> None:
    """Each row has a scale, or each block; gate and up of 64 rows, where blocks of a row have more."""
    shapes = [(1, 8, 2, 128, 128), (20, 4, 2, 64, 64), (70, 2, 2, 128, 64), (170, 3, 2, 64, 192)]
    for num_tokens, num_experts, chosen, hidden, size in (
        shapes + [(64, 128, 8, 2048, 768), (2048, 128, 8, 2048, 768)] * large
    ):
        for block in (None, (64, 64), (1, 64)):
            _check_mixture(num_tokens, num_experts, chosen, hidden, size, device, kind="fp8", block=block)


def _in_fp8(
    num_experts: int, num_outputs: int, num_inputs: int, block: tuple[int, int] | None, device: str
) -> tuple[Fp8Matrix, torch.Tensor]:
    """Random matrices of all experts, and what they stand for."""
    own = [fp8_checks.matrix(num_outputs, num_inputs, block, device) for _ in range(num_experts)]
    weight, scale = (
        torch.stack([each.weight.view(torch.uint8) for each in own]),
        torch.stack([each.scale for each in own]),
    )
    return Fp8Matrix(weight.view(FP8), scale, block), torch.stack([fp8_checks.plain(each) for each in own])


def _check_mixture(
    num_tokens: int,
    num_experts: int,
    chosen: int,
    hidden: int,
    size: int,
    device: str,
    *,
    has_bias: bool = False,
    kind: str | None = None,
    block: tuple[int, int] | None = None,
    plain_down: bool = False,
    **more: Any,
) -> None:
    x, rows = torch.randn(num_tokens, hidden, device=device).half(), size * (1 + (more.get("activation") != "relu2"))
    gate_up, down = _drawn(num_experts, rows, hidden, device), _drawn(num_experts, hidden, size, device)
    packed: dict[str, Groups | Fp8Matrix] = {}
    if kind == "fp8":
        packed["gate_up"], gate_up = _in_fp8(num_experts, rows, hidden, block, device)
        packed["down"], down = _in_fp8(num_experts, hidden, size, block, device)
    elif kind is not None:
        packed["gate_up"], gate_up = _in_groups(kind, num_experts, rows, hidden, device)
        if not plain_down:
            packed["down"], down = _in_groups(kind, num_experts, hidden, size, device)
    biases = {}
    if has_bias:
        biases["gate_up_bias"] = torch.randn(num_experts, rows, device=device).half()
        biases["down_bias"] = torch.randn(num_experts, hidden, device=device).half()
    experts = Experts(gate_up=gate_up, down=down, **biases, **more)
    # All but the last expert, and the first one more often: no tile is like the other.
    elsewhere = num_experts if experts.is_share else experts.identities
    likely = torch.ones(num_tokens, num_experts + elsewhere, device=device)
    likely[:, 0] = 3
    likely[:, chosen:][:, -1:] = 0
    ids = torch.multinomial(likely, chosen).to(torch.int32)
    choice = Choice(ids, torch.rand(num_tokens, chosen, device=device))
    if experts.is_share:
        choice = Choice(ids.masked_fill(ids >= num_experts, -1), choice.weights)
    terms = mixture(x, choice, replace(experts, **packed))
    terms = terms.sum(dim=0, dtype=torch.float32) if terms.dim() == 3 else terms
    close(terms, _mixture_of(x, choice, experts), torch.float16)


def _drawn(num_experts: int, rows: int, inputs: int, device: str) -> torch.Tensor:
    """Matrices of all experts, drawn in 16 bits and scaled in place: 512 of LongCat-Flash's take 24 GiB."""
    return torch.randn(num_experts, rows, inputs, device=device, dtype=torch.float16).mul_(inputs**-0.5)


def _in_groups(kind: str, num_experts: int, rows: int, inputs: int, device: str) -> tuple[Groups, torch.Tensor]:
    """Matrices of all experts, and the same in float64."""
    weight, values = matrix(KINDS[kind], num_experts * rows, inputs, device)

    def of_each(scales: torch.Tensor) -> torch.Tensor:
        return scales.unflatten(1, (num_experts, rows)).movedim(1, 0).contiguous()

    together = Groups(
        codes=weight.codes.unflatten(0, (num_experts, rows)),
        scales=of_each(weight.scales),
        zeros=None if weight.zeros is None else of_each(weight.zeros),
        minimums=None if weight.minimums is None else of_each(weight.minimums),
        inputs=inputs,
        bits=weight.bits,
        words=weight.words,
        group=weight.group,
        is_e2m1=weight.is_e2m1,
        levels=weight.levels,
    )
    return together, values.unflatten(0, (num_experts, rows))


def check_mixture_in_groups(device: str, large: bool) -> None:
    clamp = Clamp(alpha=1.702, limit=1.0)
    _check_mixture(1, 32, 4, 96, 64, device, kind="mxfp4", has_bias=True, clamp=clamp)
    _check_mixture(5, 8, 2, 32, 96, device, kind="mxfp4", has_bias=True, clamp=clamp)
    _check_mixture(70, 8, 2, 128, 128, device, kind="awq", weighs_inputs=True)
    _check_mixture(3, 4, 2, 64, 32, device, kind="q4_k")
    _check_mixture(5, 4, 2, 64, 128, device, kind="nf4")
    _check_mixture(170, 3, 2, 96, 160, device, kind="mxfp4", has_bias=True, clamp=clamp)
    for tokens in (1, 9):  # rows that are no multiple of a group stay plain
        _check_mixture(tokens, 8, 2, 64, 40, device, kind="w4_64", plain_down=True)
    for tokens in (1, 16, 300, 4096) * large:
        _check_mixture(tokens, 32, 4, 2880, 2880, device, kind="mxfp4", has_bias=True, clamp=clamp)
        _check_mixture(tokens, 128, 8, 2048, 768, device, kind="gptq")


def check_mixture_of_many_in_groups(device: str, large: bool) -> None:
    clamp = Clamp(alpha=1.702, limit=1.0)
    for kind, hidden, size in (
        ("awq", 128, 256),
        ("q4_k", 64, 96),
        ("q6_k", 48, 80),
        ("gptq_8", 128, 128),
        ("nf4", 64, 64),
    ):
        _check_mixture(170, 3, 2, hidden, size, device, kind=kind, has_bias=True, clamp=clamp)
    _check_mixture(200, 2, 2, 128, 128, device, kind="awq", weighs_inputs=True, activation="gelu_tanh")


def _mixture_of(x: torch.Tensor, choice: Choice, experts: Experts) -> torch.Tensor:
    """In float64, without a thought of what is stored between the products."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    assert isinstance(experts.gate_up, torch.Tensor)
    assert isinstance(experts.down, torch.Tensor)
    for expert in range(len(experts.down)):
        tokens, slots = (choice.ids == expert).nonzero(as_tuple=True)
        weight = choice.weights[tokens, slots, None].double()
        rows = x[tokens].double() * (weight if experts.weighs_inputs else 1)
        inner = rows @ experts.gate_up[expert].double().T
        if experts.gate_up_bias is not None:
            inner += experts.gate_up_bias[expert].double()
        gate, up = inner.chunk(2, dim=-1)
        if experts.activation == "relu2":
            inner = inner.relu().square()
        elif experts.clamp is None:
            inner = (gelu(gate, approximate="tanh") if experts.activation == "gelu_tanh" else silu(gate)) * up
        else:
            gate, up = gate.clamp(max=experts.clamp.limit), up.clamp(-experts.clamp.limit, experts.clamp.limit)
            inner = (up + 1) * gate * (experts.clamp.alpha * gate).sigmoid()
        result = inner @ experts.down[expert].double().T
        if experts.down_bias is not None:
            result += experts.down_bias[expert].double()
        out.index_add_(0, tokens, result if experts.weighs_inputs else result * weight)
    kept = choice.weights.double() * (choice.ids >= len(experts.down))
    return out + x.double() * kept.sum(dim=1, keepdim=True)


def check_a_tokens_mixture_is_its_own(device: str, large: bool) -> None:
    """The same bits for a token, whoever is beside it in a pass that is cut alike."""
    x = torch.randn(40, 64, device=device).half()
    gate_up, down = torch.randn(8, 96, 64, device=device).half(), torch.randn(8, 64, 48, device=device).half()
    experts = Experts(gate_up=gate_up, down=down)
    choice = route(x, torch.randn(8, 64, device=device).half(), None, None, RoutingRule(chosen=2))
    whole = mixture(x, choice, experts)
    order = torch.randperm(40, device=device)
    moved = mixture(x[order], Choice(choice.ids[order], choice.weights[order]), experts)
    if device == "cpu":  # the interpreter's products know where a row is
        close(moved, whole[:, order].double())
    else:
        assert torch.equal(whole[:, order], moved)


CHECKS: dict[str, Callable[[str, bool], None]] = {
    "routing": check_routing,
    "routing_by_a_wide_router": check_routing_by_a_wide_router,
    "routing_of_nan": check_routing_of_nan,
    "mixture": check_mixture,
    "grouping": check_grouping,
    "mixture_beside_identities": check_mixture_beside_identities,
    "mixture_of_a_share": check_mixture_of_a_share,
    "mixture_with_bias": check_mixture_with_bias,
    "mixture_without_gates": check_mixture_without_gates,
    "mixture_in_groups": check_mixture_in_groups,
    "mixture_of_many_in_groups": check_mixture_of_many_in_groups,
    "mixture_in_fp8": check_mixture_in_fp8,
    "a_tokens_mixture_is_its_own": check_a_tokens_mixture_is_its_own,
}

SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
