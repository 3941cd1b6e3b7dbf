"""What layers are built with besides their spec, and their shared tables of rotations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.model.layers.linear import FORMATS, Linear, LinearSpec
from engine.model.layers.norm import RmsNorm
from engine.model.parameters import Weights, whole
from engine.model.rope import cos_sin_table
from engine.model.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Rotations:
    """Tables of rotations, one for all layers that rotate alike."""

    num_positions: int
    device: torch.device
    _tables: dict[tuple[RopeSpec, int], torch.Tensor] = field(default_factory=dict)

    def table(self, rope: RopeSpec, head_dim: int) -> torch.Tensor:
        """Return [num_positions, head_dim] float32, see `cos_sin_table`."""
        key = (rope, head_dim)
        if key not in self._tables:
            table = cos_sin_table(rope, head_dim=head_dim, num_positions=self.num_positions)
            self._tables[key] = table.to(self.device)
        return self._tables[key]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The model around one layer."""

    model: ModelSpec
    weights: Weights
    rotations: Rotations
    under: str  # prefix of the layer's tensor names in the checkpoint

    def norm(self, name: str, size: int | None = None) -> RmsNorm:
        """Declare a norm over the hidden state, or over `size` features."""
        parameter = whole(f"{name}.weight", size or self.model.hidden_size)
        return RmsNorm(self.weights.new(parameter, under=self.under), self.model.norm_eps)

    def linear(self, spec: LinearSpec) -> Linear:
        """Declare a product in the checkpoint's format."""
        return FORMATS[self.model.quantization](spec, self.weights, under=self.under)
