"""bitsandbytes' 4 bits: codes name numbers of a codebook. N rows, K inputs.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.model.formats.product import ExpertsSpec, Linear, LinearSpec
from engine.model.formats.stored import Stored, StoredOf, StoredPart, plain_experts, plain_linear, plain_matrix
from engine.model.parameters import Weights

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Module4:
    """What is said of one module beside its tensors. `mean`: of the scales; their codes stand for what is added to it."""

    name: str
    shape: tuple[int, int]
    mean: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Codebook4:
    """Codes of 4 bits, the first of a byte above; a scale for each `block` of them, row after row. Always made plain.

    `kind`: the codebook, "nf4" or "fp4", with which a tensor's name ends. `scales_block`: so many scales are codes of 8 bits and
    share one of their own; 0: they are floats. `modules`: by the checkpoint's names.
    """

    kind: str
    block: int
    scales_block: int
    modules: Mapping[str, Module4] = field(compare=False, repr=False)

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
        return plain_linear(self._of(weights), spec, weights, under=under)

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return plain_matrix(self._of(weights), spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return plain_experts(self._of(weights), spec, weights, under=under)

    def _of(self, weights: Weights) -> StoredOf:
        def of(module: str) -> Stored:
            for name in weights.stored.theirs(module):
                if name in self.modules:
                    return OfCodebook(self, self.modules[name])
            raise ValueError(f"{module} has no quant_state, though others of its product have one")

        return of


@dataclass(frozen=True, slots=True)
class OfCodebook:
    """What a checkpoint has of one module."""

    format: Codebook4
    module: Module4

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
        scales = tensors["weight.absmax"]
        if size := self.format.scales_block:
            of_scales = tensors["weight.nested_absmax"].repeat_interleave(size)[: len(scales)]
            scales = tensors["weight.nested_quant_map"][scales.int()] * of_scales + self.module.mean
        # By whole bytes: a module's numbers of 32 bits are there once, beside half as many indices.
        book = tensors["weight.quant_map"]
        pairs = torch.stack((book.repeat_interleave(16), book.repeat(16)), dim=1)
        numbers = pairs.index_select(0, tensors["weight"].view(-1).int()).view(-1)[: rows * inputs]
        whole, size = len(numbers) // self.format.block, self.format.block
        numbers[: whole * size].view(whole, size).mul_(scales[:whole, None])
        # The last block may be smaller.
        numbers[whole * size :].mul_(scales[whole:])
        return numbers.view(rows, inputs)
