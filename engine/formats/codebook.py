"""bitsandbytes' 4 bits: codes index a codebook. N rows, K inputs.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from engine.formats.groups import declare_group_experts, declare_groups
from engine.formats.product import ExpertsSpec, KeptWhole, Linear, LinearSpec
from engine.formats.stored import StoredPart, places_by_module, plain_experts, plain_linear, plain_matrix
from engine.kernels.device import use_triton
from engine.kernels.quantised.groups import GROUPS, Groups
from engine.kernels.quantised.repack import Unpacked
from engine.kernels.quantised.slabs import Slabs
from engine.kernels.quantised.tiles import Tiles
from engine.weights.parameters import Weights

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Module4:
    """Sizes of one module. `mean`: offset of the scales, which are quantised themselves."""

    name: str
    shape: tuple[int, int]
    mean: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Codebook4:
    """4-bit codes, the first in a byte's high half; a scale for each `block` of them, row after row.

    They stay codes on a GPU, where blocks and a rank's share lie within rows. On a CPU, which has no kernel for them, they become
    plain: rows of 8 bits are faster there, but would be other numbers.

    `kind`: the codebook, "nf4" or "fp4", with which a tensor's name ends. `scales_block`: so many scales are codes of 8 bits and
    share one of their own; 0: they are floats. `modules`: by the checkpoint's names.
    """

    kind: str
    block: int
    scales_block: int
    modules: Mapping[str, Module4] = field(compare=False, repr=False)

    @property
    def group(self) -> int:
        """Inputs of a group, of which a block may have several."""
        return min(self.block, max(GROUPS))

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear | KeptWhole:
        columns = [place.source[1] for places in places_by_module(spec, weights).values() for place in places]
        if use_triton(weights.empty((1,))) and all(
            each.start % self.group == each.stop % self.group == 0 for each in columns
        ):
            return declare_groups(self._of(weights), spec, weights, under=under)
        return plain_linear(self._of(weights), spec, weights, under=under)

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return plain_matrix(self._of(weights), spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor | Groups | Slabs | Tiles:
        if spec.inputs % self.group:
            return plain_experts(self._of(weights), spec, weights, under=under)
        return declare_group_experts(self._of(weights), spec, weights, under=under)

    def _of(self, weights: Weights) -> Callable[[str], OfCodebook]:
        def of(module: str) -> OfCodebook:
            for name in weights.stored.theirs(module):
                if name in self.modules:
                    return OfCodebook(self, self.modules[name])
            raise ValueError(f"{module} has no quant_state, though others of its product have one")

        return of


@dataclass(frozen=True, slots=True)
class OfCodebook:
    """A checkpoint's tensors of one module with a codebook."""

    bits = 4
    scales = torch.float32
    has_levels = True
    has_zeros = has_minimums = is_e2m1 = has_order = False

    format: Codebook4
    module: Module4

    def group_of(self, inputs: int) -> int:
        return self.format.group

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        if self.module.shape != (rows, inputs):
            raise ValueError(
                f"{self.module.name}: its quant_state has the shape {list(self.module.shape)}, config.json asks for"
                f" {[rows, inputs]}"
            )
        blocks = -(-rows * inputs // self.format.block)
        parts = {
            "weight": StoredPart((-(-rows * inputs // 2),), torch.uint8),
            "weight.quant_map": StoredPart((16,), torch.float32),
        }
        if not self.format.scales_block:
            return parts | {"weight.absmax": StoredPart((blocks,), torch.float32)}
        return parts | {
            "weight.absmax": StoredPart((blocks,), torch.uint8),
            "weight.nested_absmax": StoredPart((-(-blocks // self.format.scales_block),), torch.float32),
            "weight.nested_quant_map": StoredPart((256,), torch.float32),
        }

    def unused(self) -> tuple[str, ...]:
        return (f"weight.quant_state.bitsandbytes__{self.format.kind}",)

    def plain(self, tensors: Tensors) -> torch.Tensor:
        """Return the matrix [N, K] in float32."""
        rows, inputs = self.module.shape
        scales = self._scales(tensors)
        # Lookup by whole bytes, a pair of codebook entries each, which needs half as many indices.
        book = tensors["weight.quant_map"]
        pairs = torch.stack((book.repeat_interleave(16), book.repeat(16)), dim=1)
        numbers = pairs.index_select(0, tensors["weight"].view(-1).int()).view(-1)[: rows * inputs]
        whole, size = len(numbers) // self.format.block, self.format.block
        numbers[: whole * size].view(whole, size).mul_(scales[:whole, None])
        # The last block may be smaller.
        numbers[whole * size :].mul_(scales[whole:])
        return numbers.view(rows, inputs)

    def unpacked(self, tensors: Tensors) -> Unpacked:
        """Split the tensors of a matrix whose rows are whole groups."""
        rows, inputs = self.module.shape
        stored, group = tensors["weight"].view(-1), self.format.group
        codes = torch.stack((stored >> 4, stored & 15), dim=1).view(-1)[: rows * inputs].view(rows, inputs)
        scales = self._scales(tensors).repeat_interleave(self.format.block // group)[: rows * inputs // group]
        return Unpacked(codes, scales.view(rows, inputs // group), None, levels=tensors["weight.quant_map"])

    def _scales(self, tensors: Tensors) -> torch.Tensor:
        """Scales of the blocks, in float32."""
        scales = tensors["weight.absmax"]
        if size := self.format.scales_block:
            of_scales = tensors["weight.nested_absmax"].repeat_interleave(size)[: len(scales)]
            scales = tensors["weight.nested_quant_map"][scales.int()] * of_scales + self.module.mean
        return scales
