"""Triton version of `mixture`: both GEMMs of the experts, and the tiling for each number of tokens.

T tokens, E experts, K experts a token, P = T K pairs, H hidden size, I intermediate size. The first product writes the
activation of each pair [P, I], the second each pair's weighted result to its own place [K, T, H]: nothing is added up where
the order would be left to chance.
"""

from dataclasses import dataclass
from types import ModuleType

import torch

from engine.kernels.device import describe
from engine.kernels.experts import triton_few, triton_few_groups, triton_many, triton_many_codes
from engine.kernels.experts.mixture import Experts, Matrices, Product, given
from engine.kernels.experts.routing import Choice
from engine.kernels.experts.triton_grouping import group
from engine.kernels.quantised.groups import Groups

# Pairs stay ungrouped while there are at most E / ALONE of them. More of them share an expert's weights.
ALONE = 4
FEW_ROWS_TILES = (16, 32, 64)  # pairs of a tile
# Average pairs of an expert from which tokens become the tensor core's wide operand, and from which its tiles are large.
MANY_ROWS, LARGE_ROWS = 24, 48
MANY_TILES = (64, 128)
COPY_BYTES = 16  # TMA needs rows that are multiples of it


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiling of the pairs."""

    tile: int  # pairs; 0: one each, ungrouped
    is_many: bool


def plan(num_pairs: int, num_experts: int, *, in_bulk: bool, of_codes: bool) -> Plan:
    """`in_bulk`: TMA can read the matrices. `of_codes`: a kernel for many rows reads their codes."""
    if num_pairs * ALONE <= num_experts:
        return Plan(0, is_many=False)
    average = num_pairs / num_experts
    if in_bulk and average > MANY_ROWS:
        return Plan(MANY_TILES[average > LARGE_ROWS], is_many=True)
    if of_codes and average > FEW_ROWS_TILES[-1]:
        return Plan(triton_many_codes.TILE, is_many=True)
    return Plan(next((tile for tile in FEW_ROWS_TILES if average <= tile / 2), FEW_ROWS_TILES[-1]), is_many=False)


def mixture(x: torch.Tensor, choice: Choice, experts: Experts) -> torch.Tensor:
    (num_tokens, hidden), num_chosen = x.shape, choice.ids.shape[1]
    num_experts, size = experts.num_experts, experts.size
    num_plain = sum(isinstance(each, torch.Tensor) for each in (experts.gate_up, experts.down))
    is_new = describe(x.device).has_tma or not x.is_cuda  # TMA, and enough shared memory for large tiles
    in_bulk = (
        is_new and num_plain == 2 and all(length * x.element_size() % COPY_BYTES == 0 for length in (hidden, size))
    )
    of_codes = is_new and num_plain == 0 and x.element_size() == 2
    cut = plan(num_tokens * num_chosen, num_experts, in_bulk=in_bulk, of_codes=of_codes)
    # For large batches float32 partials would cost as much bandwidth as the GEMM.
    dtype = x.dtype if cut.is_many else torch.float32
    inner = torch.empty((num_tokens * num_chosen, size), dtype=x.dtype, device=x.device)
    allocate = torch.zeros if experts.is_share else torch.empty
    out = allocate((num_chosen, num_tokens, hidden), dtype=dtype, device=x.device)
    if num_tokens == 0:
        return out
    ids = choice.ids
    if experts.identities:
        given(x, choice, experts, out)
        ids = ids.masked_fill(ids >= num_experts, -1)
    order, tiles = (ids, ids) if cut.tile == 0 else group(ids, num_experts, cut.tile)
    for rows, result, first in ((x, inner, True), (inner, out, False)):
        product = Product(
            x=rows, experts=experts, weights=choice.weights, out=result,
            order=order, tiles=tiles, tile=cut.tile, first=first,
        )  # fmt: skip
        _kernel_of(product.matrices, is_many=cut.is_many).write(product)
    return out


def _kernel_of(matrices: Matrices, *, is_many: bool) -> ModuleType:
    """The kernel of a GEMM: gate and up may have another format than down."""
    if is_many:
        return triton_many if isinstance(matrices, torch.Tensor) else triton_many_codes
    return triton_few_groups if isinstance(matrices, Groups) else triton_few
