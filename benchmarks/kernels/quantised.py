"""Cells of `benchmarks.kernels` with quantised weights: products of each format, and experts, few rows and many.

An error is against float64 of the numbers that the codes stand for: what rounding weights to a format costs is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks import environment
from benchmarks.kernels.case import Case, errors
from benchmarks.results_format import MISSING
from engine.kernels.device import use_triton
from engine.kernels.experts import Choice, Experts, mixture
from engine.kernels.quantised import fp8, groups
from engine.kernels.quantised.fp8 import FP8, Fp8Matrix
from engine.kernels.quantised.groups import Groups

Quantised = Groups | Fp8Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the cells."""

    inputs: int
    outputs: int
    rows: tuple[int, ...]  # of products
    experts: int
    chosen: int
    hidden: int
    size: int  # of an expert
    tokens: tuple[int, ...]  # of experts


# Llama-3.1-8B's queries, keys and values; the experts of Qwen3-30B-A3B.
REAL = Shape(
    inputs=4096, outputs=6144, rows=(1, 16, 64, 512), experts=128, chosen=8, hidden=2048, size=768, tokens=(1, 64, 2048)
)
# As long sums, of fewer outputs: Triton's interpreter computes some million products a second.
INTERPRETED = Shape(
    inputs=4096, outputs=128, rows=(16, 96), experts=2, chosen=1, hidden=1024, size=256, tokens=(2, 160)
)


# bitsandbytes' numbers: quantiles of the normal distribution, and 0.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def matrix_in_groups(
    bits: int, group: int, *, lower: str = "", is_e2m1: bool = False, has_levels: bool = False
) -> Callable[[tuple[int, ...], torch.device], Groups]:
    """`lower`: each group has "zeros" or "minimums". `has_levels`: nf4's, with scales of 32 bits."""

    def draw(shape: tuple[int, ...], device: torch.device) -> Groups:
        highest = 1 << bits
        of_groups = (*shape[:-1], -(-shape[-1] // (group or shape[-1])))
        codes = torch.randint(0, highest, shape, device=device, dtype=torch.uint8)
        scales = (0.5 + torch.rand(of_groups, device=device)) / (highest / 4 * shape[-1] ** 0.5)
        more = {}
        if lower == "zeros":
            more["zeros"] = torch.randint(0, highest, of_groups, device=device)
        if lower == "minimums":
            more["minimums"] = -(highest / 2) * scales.half()
        if is_e2m1:  # exponents of 2
            scales = scales.log2().round().exp2().bfloat16()
        elif has_levels:
            scales, more["levels"] = scales * (highest / 2), torch.tensor(NF4, device=device)
        else:
            scales = scales.half()
        return groups.pack(codes, scales, bits=bits, group=group or shape[-1], is_e2m1=is_e2m1, **more)

    return draw


def matrix_in_fp8(block: tuple[int, int] | None) -> Callable[[tuple[int, ...], torch.device], Fp8Matrix]:
    def draw(shape: tuple[int, ...], device: torch.device) -> Fp8Matrix:
        *_, rows, inputs = shape
        weight = (60 * torch.randn(shape, device=device)).clamp(-448, 448).to(FP8)
        of_blocks = (rows,) if block is None else (-(-rows // block[0]), -(-inputs // block[1]))
        scale = (0.5 + torch.rand((*shape[:-2], *of_blocks), device=device)) / (60 * inputs**0.5)
        return Fp8Matrix(weight, scale, block)

    return draw


# By name: how a random matrix is drawn.
FORMATS: dict[str, Callable[[tuple[int, ...], torch.device], Quantised]] = {
    "int4": matrix_in_groups(4, 128),
    "awq": matrix_in_groups(4, 128, lower="zeros"),
    "int4_rows": matrix_in_groups(4, 0),
    "int8": matrix_in_groups(8, 128),
    "mxfp4": matrix_in_groups(4, 32, is_e2m1=True),
    "nf4": matrix_in_groups(4, 64, has_levels=True),
    "q4_k": matrix_in_groups(4, 32, lower="minimums"),
    "q5_k": matrix_in_groups(8, 32, lower="minimums"),
    "q6_k": matrix_in_groups(8, 16),
    "fp8_rows": matrix_in_fp8(None),
    "fp8_blocks": matrix_in_fp8((128, 128)),
}
# Whose experts are timed on a GPU, too: packing the others takes longer than measuring them.
OF_EXPERTS = ("int4", "mxfp4", "nf4", "q4_k", "fp8_rows", "fp8_blocks")


def column_of(case: Case) -> tuple[str, str]:
    """A case's format, and its kind of product and number of rows."""
    name = max((name for name in FORMATS if case.name.startswith(f"{name}_")), key=len)
    return name, case.name.removeprefix(f"{name}_")


def quantised_cases(device: torch.device, shape: Shape, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a case of each format, kind of product and number of rows."""
    for name, draw in FORMATS.items():
        weight = draw((shape.outputs, shape.inputs), device)
        for rows in shape.rows:
            yield from _product_cases(name, weight, torch.randn(rows, shape.inputs, device=device).to(dtype))
        if name in OF_EXPERTS:
            experts = Experts(
                gate_up=draw((shape.experts, 2 * shape.size, shape.hidden), device),
                down=draw((shape.experts, shape.hidden, shape.size), device),
            )
            for tokens in shape.tokens:
                yield _expert_case(name, experts, torch.randn(tokens, shape.hidden, device=device).to(dtype), shape)


def _product_cases(name: str, weight: Quantised, x: torch.Tensor) -> Iterator[Case]:
    flops = 2.0 * len(x) * x.shape[1] * _rows_of(weight)

    def exact() -> torch.Tensor:
        return x.double() @ _values(weight).double().T

    def gated() -> torch.Tensor:
        gate, up = exact().chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    if isinstance(weight, Groups):
        linear = lambda: groups.linear(x, weight, None)  # noqa: E731
        gated_linear = lambda: groups.gated_linear(x, weight, None)  # noqa: E731
    elif len(x) <= fp8.FEW_ROWS:
        linear = lambda: fp8.product(x, weight, None)  # noqa: E731
        gated_linear = lambda: fp8.gated_product(x, weight, None)  # noqa: E731
    else:  # a norm or an activation has rounded the rows
        rounded = fp8.quantise_rows.reference(x, fp8.rounding_of(weight, len(x), x.dtype))
        yield Case(
            f"{name}_linear_b{len(x)}",
            lambda: fp8.product_of_rows(rounded.values, rounded.scale, weight, None, x.dtype),
            exact, lambda out: out, _bytes(weight), flops,
        )  # fmt: skip
        return
    yield Case(f"{name}_linear_b{len(x)}", linear, exact, lambda out: out, _bytes(weight), flops)
    yield Case(f"{name}_gated_b{len(x)}", gated_linear, gated, lambda out: out, _bytes(weight), flops)


def _expert_case(name: str, experts: Experts, x: torch.Tensor, shape: Shape) -> Case:
    """Each token chooses by chance; its experts' weights are equal."""
    ids = torch.rand(len(x), shape.experts, device=x.device).topk(shape.chosen, dim=1).indices.to(torch.int32)
    choice = Choice(ids, torch.full((len(x), shape.chosen), 1 / shape.chosen, device=x.device))
    compared = list(range(0, len(x), max(1, len(x) // 32)))

    def exact() -> torch.Tensor:
        out = torch.zeros(len(compared), shape.hidden, dtype=torch.float64, device=x.device)
        for row, token in enumerate(compared):
            for expert in ids[token].tolist():
                gate, up = (_values(experts.gate_up, expert).double() @ x[token].double()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                out[row] += _values(experts.down, expert).double() @ inner / shape.chosen
        return out

    def output(terms: torch.Tensor) -> torch.Tensor:
        return (terms.double().sum(dim=0) if terms.dim() == 3 else terms)[compared]

    used = len(ids.unique()) / shape.experts
    num_bytes = used * sum(_bytes(each) for each in (experts.gate_up, experts.down))
    flops = 6.0 * ids.numel() * shape.hidden * shape.size
    return Case(f"{name}_experts_t{len(x)}", lambda: mixture(x, choice, experts), exact, output, num_bytes, flops)


def _rows_of(weight: Quantised) -> int:
    return weight.outputs if isinstance(weight, Groups) else weight.weight.shape[-2]


def _bytes(weight: torch.Tensor | Quantised) -> int:
    if isinstance(weight, torch.Tensor):
        return weight.nbytes
    return weight.num_bytes if isinstance(weight, Groups) else weight.weight.nbytes + weight.scale.nbytes


def _values(weight: torch.Tensor | Quantised, expert: int | None = None) -> torch.Tensor:
    """The numbers that the codes stand for; float32 holds them, but for the last bits of those with minimums."""
    own = weight if expert is None else weight[expert]
    if isinstance(own, torch.Tensor):
        return own
    return groups.values(own) if isinstance(own, Groups) else own.plain()


@torch.inference_mode()
def print_errors() -> int:
    """Print errors alone. The interpreter computes in float16: it reads some results in bfloat16 as float32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not use_triton(torch.empty(0, device=device)):
        raise SystemExit(f"benchmarks.kernels: {environment.NEEDS_A_CARD}; or --errors TRITON_INTERPRET=1")
    shape, dtype = (REAL, torch.bfloat16) if device.type == "cuda" else (INTERPRETED, torch.float16)
    torch.manual_seed(0)
    for key, fact in environment.describe("benchmarks.kernels", ["--errors"], device).items():
        print(f"{key}: {fact}")
    found, roundings = dict[str, dict[str, str]](), []
    for case in quantised_cases(device, shape, dtype):
        error, rounding = errors(case, dtype)
        name, column = column_of(case)
        found.setdefault(name, {})[column] = f"{error * 1e3:.2f}"
        roundings.append(rounding * 1e3)
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    bounds = f"{min(roundings):.2f} to {max(roundings):.2f}"
    print(f"\n| relative error, 1e-3; rounding exact results to {str(dtype)[6:]}: {bounds} | {' | '.join(columns)} |")
    print("|---|" + "--:|" * len(columns))
    for name, row in found.items():
        print(f"| {name} | {' | '.join(row.get(column, MISSING) for column in columns)} |")
    return 0
