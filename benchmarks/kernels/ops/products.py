"""Products with fp8 weights: Llama's linear layers by number of rows, and the experts of Qwen3-30B-A3B.

Rows are quantised beforehand, as the norm or the activation before a product does it; the experts' path has its own steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from benchmarks.kernels.ops.comparing import OURS, PLAIN, Comparison, Implementation, Run
from benchmarks.kernels.ops.libraries import library
from benchmarks.kernels.quantised import matrix_in_fp8
from engine.kernels.experts import Choice, Experts, mixture
from engine.kernels.quantised import fp8
from engine.kernels.quantised.fp8 import Fp8Matrix, Fp8Rows, Rounding

BLOCK = 128
ROWS = (1, 17, 64, 128, 256, 512)
# Outputs and inputs of each linear layer: queries, keys and values; gate and up; down.
LLAMA = {
    "8B qkv": (6144, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B gate_up": (57344, 8192),
    "70B down": (8192, 28672),
}
TINY = {"tiny": (128, 256)}
MOST_EXACT = 4096  # outputs compared: float64 is slow
MOST_COPIED = 1 << 28  # weights in 16 bits beyond this are no comparison


def linear_fp8(device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> Iterator[Comparison]:
    """Products of each shape; scales for each row of the weights, and for the largest also for each block."""
    for name, (outputs, inputs) in (TINY if is_tiny else LLAMA).items():
        for block in (None, (BLOCK, BLOCK)):
            if block is not None and not name.endswith(("gate_up", "tiny")):
                continue
            matrix = matrix_in_fp8(block)((outputs, inputs), device)
            for rows in (2, 70) if is_tiny else ROWS:
                x = torch.randn(rows, inputs, device=device).to(dtype)
                yield _linear(f"{name} {'blocks' if block else 'rows'} m{rows}", x, matrix)


def _linear(shape: str, x: torch.Tensor, matrix: Fp8Matrix) -> Comparison:
    rounded = fp8.quantise_rows.reference(x, fp8.rounding_of(matrix, len(x), x.dtype))
    some = slice(MOST_EXACT)

    def exact() -> torch.Tensor:
        part = Fp8Matrix(
            matrix.weight[some],
            matrix.scale[some if matrix.block is None else slice(MOST_EXACT // BLOCK)],
            matrix.block,
        )
        return x.double() @ part.plain().double().T

    def plain() -> Run:
        weight = matrix.plain(x.dtype)
        return lambda: linear(x, weight)

    return Comparison(
        op="linear-fp8",
        shape=shape,
        implementations={
            OURS: Implementation(
                prepare=lambda: lambda: fp8.product_of_rows(rounded.values, rounded.scale, matrix, None, x.dtype)
            ),
            f"{PLAIN}, weights in 16 bits": Implementation(prepare=plain),
            "torch._scaled_mm": Implementation(prepare=lambda: _scaled_mm(x, matrix)),
            "DeepGEMM": Implementation(prepare=lambda: _deep_gemm(x, matrix)),
        },
        exact=exact,
        compared=lambda out: out[:, some],
        num_bytes=float(matrix.weight.nbytes + x.nbytes // 2 + 2 * len(x) * len(matrix.weight)),
        flops=2.0 * len(x) * matrix.weight.numel(),
        is_fp8=True,
    )


def _scaled_mm(x: torch.Tensor, matrix: Fp8Matrix) -> Run:
    if matrix.block is None:
        rows = fp8.quantise_rows.reference(x)
        scale, scale_b = rows.scale, matrix.scale[None]
    else:
        rows = fp8.quantise_rows.reference(x, Rounding(BLOCK))
        scale, scale_b = rows.scale.T.contiguous().T, matrix.scale.T  # both with the first dimension contiguous
    run: Run = lambda: torch._scaled_mm(  # noqa: E731
        rows.values,
        matrix.weight.T,
        scale_a=scale,
        scale_b=scale_b,
        out_dtype=x.dtype,
        use_fast_accum=matrix.block is None,
    )
    return run


def _deep_gemm(x: torch.Tensor, matrix: Fp8Matrix) -> Run:
    gemm = library("deep_gemm")
    rows = fp8.quantise_rows.reference(x, Rounding(BLOCK))
    out = torch.empty(len(x), len(matrix.weight), dtype=x.dtype, device=x.device)

    def run() -> torch.Tensor:
        gemm.fp8_gemm_nt((rows.values, rows.scale), (matrix.weight, matrix.scale), out)
        return out

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    experts: int
    chosen: int
    hidden: int
    size: int


QWEN, TINY_MOE = (
    MoEShape(experts=128, chosen=8, hidden=2048, size=768),
    MoEShape(experts=4, chosen=2, hidden=128, size=128),
)


def experts_fp8(device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> Iterator[Comparison]:
    """One layer's experts, a scale for each row of the weights."""
    shape = TINY_MOE if is_tiny else QWEN
    draw = matrix_in_fp8(None)
    gate_up = draw((shape.experts, 2 * shape.size, shape.hidden), device)
    down = draw((shape.experts, shape.hidden, shape.size), device)
    assert isinstance(gate_up, Fp8Matrix)
    assert isinstance(down, Fp8Matrix)
    for tokens in (3,) if is_tiny else (1, 17, 64, 128, 256, 512, 2048):
        yield _experts(torch.randn(tokens, shape.hidden, device=device).to(dtype), gate_up, down, shape)


def _experts(x: torch.Tensor, gate_up: Fp8Matrix, down: Fp8Matrix, shape: MoEShape) -> Comparison:
    ids = torch.rand(len(x), shape.experts, device=x.device).topk(shape.chosen, dim=1).indices.to(torch.int32)
    choice = Choice(ids, torch.full((len(x), shape.chosen), 1 / shape.chosen, device=x.device))
    experts = Experts(gate_up=gate_up, down=down)
    compared = list(range(0, len(x), max(1, len(x) // 8)))

    def exact() -> torch.Tensor:
        out = torch.zeros(len(compared), shape.hidden, dtype=torch.float64, device=x.device)
        for row, token in enumerate(compared):
            for expert in ids[token].tolist():
                gate, up = (gate_up[expert].plain().double() @ x[token].double()).chunk(2)
                out[row] += down[expert].plain().double() @ (silu(gate) * up) / shape.chosen
        return out

    used = len(ids.unique()) / shape.experts
    return Comparison(
        op="experts-fp8",
        shape=f"t{len(x)}",
        implementations={
            OURS: Implementation(
                prepare=lambda: lambda: mixture(x, choice, experts),
                output=lambda out: out.float().sum(dim=0) if out.dim() == 3 else out,
            ),
            PLAIN: Implementation(prepare=lambda: lambda: mixture.reference(x, choice, experts), in_graph=False),
            "torch._scaled_grouped_mm, sorting and rounding": Implementation(
                prepare=lambda: _grouped(x, choice, gate_up, down)
            ),
            "torch._scaled_grouped_mm, products alone": Implementation(
                prepare=lambda: _products_alone(x, choice, gate_up, down), output=lambda out: _summed(out, choice)
            ),
        },
        exact=exact,
        compared=lambda out: out[compared],
        num_bytes=used * (gate_up.weight.nbytes + down.weight.nbytes) + 3.0 * x.nbytes,
        flops=6.0 * ids.numel() * shape.hidden * shape.size,
        is_fp8=True,
    )


def _multiplied(x: torch.Tensor, matrix: Fp8Matrix, ends: torch.Tensor) -> torch.Tensor:
    return _product(fp8.quantise_rows.reference(x), matrix, ends)


def _product(rows: Fp8Rows, matrix: Fp8Matrix, ends: torch.Tensor) -> torch.Tensor:
    weight, scale = matrix.weight.transpose(-2, -1), rows.scale[:, 0]
    found: torch.Tensor = torch._scaled_grouped_mm(
        rows.values, weight, scale, matrix.scale, offs=ends, out_dtype=rows.dtype, use_fast_accum=True
    )
    return found


def _order(choice: Choice, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs by expert, and each expert's end among them."""
    ids, pairs = choice.ids.flatten().sort(stable=True)
    wanted = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
    return pairs, torch.searchsorted(ids, wanted, right=True).to(torch.int32)


def _grouped(x: torch.Tensor, choice: Choice, gate_up: Fp8Matrix, down: Fp8Matrix) -> Run:
    num_chosen = choice.ids.shape[1]

    def run() -> torch.Tensor:
        pairs, ends = _order(choice, len(gate_up.weight))
        gate, up = _multiplied(x[pairs // num_chosen], gate_up, ends).chunk(2, dim=-1)
        terms = _multiplied(silu(gate) * up, down, ends) * choice.weights.flatten()[pairs, None].to(x.dtype)
        return torch.empty_like(terms).index_copy_(0, pairs, terms).unflatten(0, (-1, num_chosen)).sum(dim=1)

    return run


def _products_alone(x: torch.Tensor, choice: Choice, gate_up: Fp8Matrix, down: Fp8Matrix) -> Run:
    pairs, ends = _order(choice, len(gate_up.weight))
    first = fp8.quantise_rows.reference(x[pairs // choice.ids.shape[1]])
    gate, up = _product(first, gate_up, ends).chunk(2, dim=-1)
    second = fp8.quantise_rows.reference(silu(gate) * up)

    def run() -> torch.Tensor:
        _product(first, gate_up, ends)
        return _product(second, down, ends)

    return run


def _summed(out: torch.Tensor, choice: Choice) -> torch.Tensor:
    pairs = choice.ids.flatten().sort(stable=True).indices
    terms = out * choice.weights.flatten()[pairs, None]
    return torch.empty_like(terms).index_copy_(0, pairs, terms).unflatten(0, (-1, choice.ids.shape[1])).sum(dim=1)
