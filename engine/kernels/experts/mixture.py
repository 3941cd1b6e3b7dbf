"""The experts' MLPs. T tokens, E experts, K experts a token, H hidden size, I intermediate size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from engine.kernels.activation import ACTIVATIONS
from engine.kernels.device import twin
from engine.kernels.experts.routing import Choice
from engine.kernels.native import halves
from engine.kernels.native.halves import Halves
from engine.kernels.quantised import slabs, tiles
from engine.kernels.quantised.fp8 import Fp8Matrix
from engine.kernels.quantised.groups import Groups, dequantised
from engine.kernels.quantised.slabs import Slabs
from engine.kernels.quantised.tiles import Tiles

Matrices = torch.Tensor | Groups | Fp8Matrix | Slabs | Tiles | Halves  # [E, N, K]; the last three on CPUs alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """The gated activation of gpt-oss: both halves are clamped, and (up + 1) * gate * sigmoid(alpha * gate)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The matrices of all experts of a layer."""

    gate_up: Matrices  # [E, 2 I or I, H], a gate's rows first
    down: Matrices  # [E, H, I]
    gate_up_bias: torch.Tensor | None = None  # [E, 2 I]
    down_bias: torch.Tensor | None = None  # [E, H]
    clamp: Clamp | None = None  # None: silu(gate) * up
    weighs_inputs: bool = False  # the routing weight scales an expert's input, not its output
    activation: str = "silu"  # or "gelu_tanh"; "relu2": without a gate
    identities: int = 0  # identity experts after these, without matrices
    is_share: bool = False  # pairs of number -1 are other ranks', and zeros here

    @property
    def num_experts(self) -> int:
        return _elements(self.down).shape[0]

    @property
    def size(self) -> int:
        """I."""
        return (
            self.down.inputs
            if isinstance(self.down, Groups | Slabs | Tiles | Halves)
            else _elements(self.down).shape[2]
        )

    @property
    def bounds(self) -> tuple[float, float]:
        """The clamp's alpha and limit; without a clamp silu's alpha, and an unused limit."""
        return (1.0, 0.0) if self.clamp is None else (self.clamp.alpha, self.clamp.limit)

    def sides(self, *, first: bool) -> int:
        """Rows of the first or the second GEMM that are combined into one output."""
        return 2 if first and self.activation != "relu2" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One of the two GEMMs of a layer's experts, as passed to kernels. P = T K pairs in S tiles."""

    x: torch.Tensor  # [T, H], or [P, I] for the second
    experts: Experts
    weights: torch.Tensor  # [T, K]
    out: torch.Tensor  # [P, I], or [K, T, H]
    order: torch.Tensor  # [P] pairs sorted by expert
    tiles: torch.Tensor  # [S, 4]; for ungrouped pairs, the selected experts [T, K]
    tile: int  # pairs; 0: one each, ungrouped
    first: bool

    @property
    def matrices(self) -> Matrices:
        """[E, N, K]."""
        return self.experts.gate_up if self.first else self.experts.down

    @property
    def bias(self) -> torch.Tensor | None:
        """[E, N]."""
        return self.experts.gate_up_bias if self.first else self.experts.down_bias

    @property
    def sides(self) -> int:
        """Rows that are combined into one output."""
        return self.experts.sides(first=self.first)

    @property
    def outputs(self) -> int:
        """Outputs of a pair."""
        return self.out.shape[-1]

    @property
    def chosen(self) -> int:
        """K."""
        return self.weights.shape[1]

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[0] if self.tile else self.weights.numel()

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return self.x.dtype, self.out.dtype

    @property
    def flags(self) -> tuple[bool, int, bool, bool, bool, bool]:
        """The variant: sides, and the epilogue: plus a bias, times a pair's weight, clamped, gelu instead of silu."""
        experts, clamped = self.experts, self.first and self.experts.clamp is not None
        weighted, has_gelu = self.first == experts.weighs_inputs, experts.activation == "gelu_tanh"
        return self.first, self.sides, self.bias is not None, weighted, clamped, has_gelu

    @property
    def behind(self) -> tuple[torch.Tensor | int | float, ...]:
        """The common kernel arguments after `x` and the matrices. A missing bias is never read."""
        bias = self.weights if self.bias is None else self.bias
        return self.out, bias, self.weights, self.order, self.tiles, self.weights.shape[0], *self.experts.bounds


@twin("engine.kernels.experts.triton_mixture")
def mixture(x: torch.Tensor, choice: Choice, experts: Experts) -> torch.Tensor:
    """Return the weighted sum of each token's experts [T, H], or its terms [K, T, H] for a kernel that adds them as it reads.

    `x` [T, H]. A token's result depends on no other token, but for the order of float32 sums that a number of tokens selects.
    """
    num_chosen = choice.ids.shape[1]
    # A rank that has none of a pair's experts has -1: such pairs come last, after all experts.
    ids, pairs = choice.ids.flatten().long().remainder(experts.num_experts + 1 + experts.identities).sort(stable=True)
    weights = choice.weights.flatten()[pairs, None].to(x.dtype)
    out = given(x, choice, experts).sum(dim=0).to(x.dtype) if experts.identities else torch.zeros_like(x)
    ends = torch.bincount(ids, minlength=experts.num_experts).cumsum(0)[: experts.num_experts].tolist()
    begin = 0
    for expert, end in enumerate(ends):
        if begin < end:
            tokens, weight = pairs[begin:end] // num_chosen, weights[begin:end]
            rows = x[tokens] * weight if experts.weighs_inputs else x[tokens]
            result = _expert(rows, experts, expert)
            out.index_add_(0, tokens, result if experts.weighs_inputs else result * weight)
        begin = end
    return out


def given(x: torch.Tensor, choice: Choice, experts: Experts, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the terms [K, T, H] of identity experts, and zeros for the others; in float32, or in `out`."""
    own = choice.weights.masked_fill(choice.ids < experts.num_experts, 0.0)
    return torch.mul(x, own.T[..., None], out=out)


def _expert(x: torch.Tensor, experts: Experts, index: int) -> torch.Tensor:
    bias = None if experts.gate_up_bias is None else experts.gate_up_bias[index]
    sums = _product(x, experts.gate_up, index, bias).chunk(experts.sides(first=True), dim=-1)
    inner = gated(*sums, experts.clamp, experts.activation) if len(sums) == 2 else ACTIVATIONS["relu2"](*sums)
    bias = None if experts.down_bias is None else experts.down_bias[index]
    return _product(inner, experts.down, index, bias)


def _product(x: torch.Tensor, matrices: Matrices, index: int, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(matrices, Slabs):
        return slabs.product(x, matrices[index], bias)
    if isinstance(matrices, Tiles):
        return tiles.product(x, matrices[index], None if bias is None else bias.float()).to(x.dtype)
    if isinstance(matrices, Halves):
        return halves.product(x, matrices[index], bias)
    return linear(x, _plain(matrices, index, x.dtype), bias)


def _elements(matrices: Matrices) -> torch.Tensor:
    """Selects some experts."""
    if isinstance(matrices, torch.Tensor):
        return matrices
    if isinstance(matrices, Tiles):
        return matrices.blocks
    if isinstance(matrices, Halves):
        return matrices.panels
    return matrices.weight if isinstance(matrices, Fp8Matrix) else matrices.codes


def _plain(matrices: torch.Tensor | Groups | Fp8Matrix, index: int, dtype: torch.dtype) -> torch.Tensor:
    """One expert's matrix [N, K]."""
    if isinstance(matrices, Fp8Matrix):
        return matrices[index].plain(dtype)
    own = matrices[index]
    if isinstance(own, torch.Tensor):
        return own
    return dequantised.reference(own.codes, own, dtype)


def gated(gate: torch.Tensor, up: torch.Tensor, clamp: Clamp | None, activation: str = "silu") -> torch.Tensor:
    if clamp is None:
        return ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(min=-clamp.limit, max=clamp.limit)
    return (up + 1) * gate * (clamp.alpha * gate).sigmoid()
