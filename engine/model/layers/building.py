"""The environment that layers are built in, besides their spec, and their shared rotary tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

from engine.formats.product import ExpertsSpec, Format, Linear, LinearSpec, declare
from engine.kernels.experts.mixture import Matrices
from engine.model.layers.norm import LayerNorm, Norm, RmsNorm
from engine.model.ranks import summed_over
from engine.model.rope import cos_sin_table, query_growth_table
from engine.model.stream import Branch
from engine.parallel.group import ALONE, Group
from engine.spec.ends import NormSpec
from engine.spec.model import BranchSpec, ModelSpec
from engine.spec.ranks import own_share
from engine.spec.scaling import QueryGrowth, RopeSpec
from engine.weights.parameters import Weights, whole

Spec = TypeVar("Spec")


@dataclass(frozen=True, slots=True)
class Rotations:
    """Rotary tables, one for all layers with the same rope."""

    num_positions: int
    device: torch.device
    _tables: dict[object, torch.Tensor] = field(default_factory=dict)

    def table(self, rope: RopeSpec, head_dim: int) -> torch.Tensor:
        """Return [num_positions, rotated dimensions] float32, see `cos_sin_table`."""
        key = (rope, head_dim)
        if key not in self._tables:
            table = cos_sin_table(rope, head_dim=head_dim, num_positions=self.num_positions)
            self._tables[key] = table.to(self.device)
        return self._tables[key]

    def query_growth(self, growth: QueryGrowth) -> torch.Tensor:
        """Return [num_positions] float32, see `query_growth_table`."""
        if growth not in self._tables:
            self._tables[growth] = query_growth_table(growth, self.num_positions).to(self.device)
        return self._tables[growth]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The model around one layer."""

    model: ModelSpec
    weights: Weights
    rotations: Rotations
    under: str  # prefix of the layer's tensor names in the checkpoint
    branch: Branch  # between this half of the layer and the stream
    formats: list[Format] = field(default_factory=list)
    group: Group = ALONE

    def own(self, spec: Spec) -> Spec:
        """Return this rank's share of a mixer or an MLP: layers declare the whole and compute the share."""
        return own_share(spec, self.group.rank, self.group.size)

    def norm(self, name: str, size: int) -> RmsNorm:
        """Declare an RMSNorm over `size` features."""
        norm = declare_norm(self.model.norms, self.weights, self.under + name, size)
        assert isinstance(norm, RmsNorm), "a model with LayerNorm has no other norms"
        return norm

    def in_float32(self, name: str, count: int) -> torch.Tensor:
        """Declare a tensor [count] that needs float32 precision."""
        return self.weights.new(replace(whole(name, count), format=torch.float32), under=self.under)

    def linear(self, spec: LinearSpec) -> Linear:
        """Declare a product in the checkpoint's format."""
        linear = declare(spec, self._format_of, self.weights, under=self.under)
        return summed_over(linear, spec, self.group)

    def matrix(self, spec: LinearSpec) -> torch.Tensor:
        """Declare a matrix [N, K] that is plain here, whatever its format in the checkpoint."""
        (module,) = spec.outputs
        return self._format_of(self.under + module).matrix(spec, self.weights, under=self.under)

    def experts(self, spec: ExpertsSpec) -> Matrices:
        """Declare the matrices [E, N, K] of all experts in the checkpoint's format."""
        modules = [self.under + module for module in spec.modules]
        # A checkpoint has one of the tensors of all experts.
        formats = {self._format_of(module) for module in modules} if spec.each else {self._format_of(*modules)}
        if len(formats) > 1:
            raise ValueError(
                f"{self.under}{spec.modules[0]} and {spec.modules[1]} have different formats: not supported"
            )
        return formats.pop().experts(spec, self.weights, under=self.under)

    def _format_of(self, *modules: str) -> Format:
        format = self.model.format_of(*modules)
        self.formats.append(format)
        return format


def declare_norm(spec: NormSpec, weights: Weights, name: str, size: int) -> Norm:
    """Declare a norm of this kind."""
    weight = weights.new(whole(f"{name}.weight", size)) if spec.has_weight else weights.empty((size,)).fill_(1)
    if spec.kind in ("rms", "rms_plus_one"):
        return RmsNorm(weight, spec.eps, plus_one=spec.kind == "rms_plus_one")
    bias = weights.new(whole(f"{name}.bias", size)) if spec.has_bias else None
    if spec.kind == "layer_plus_one":
        weights.when_loaded.append(partial(_plus_one, weight))
    return LayerNorm(weight, bias, spec.eps)


def _plus_one(weight: torch.Tensor) -> None:
    weight.add_(1)


def declare_branch(
    spec: BranchSpec, model: ModelSpec, weights: Weights, *, under: str, is_read_again: bool = False
) -> Branch:
    """Declare the norms around one half of a layer; `is_read_again`: the other half shares its input."""

    def norm(name: str, eps: float = 0.0) -> Norm | None:
        kind = replace(model.norms, eps=eps) if eps else model.norms
        return declare_norm(kind, weights, under + name, model.hidden_size) if name else None

    scalar: torch.Tensor | float | None = None if spec.scale == 1.0 else spec.scale
    if spec.scalar:
        scalar = weights.new(whole(spec.scalar, 1), under=under)
    return Branch(
        spec,
        before=norm(spec.before),
        after=norm(spec.after, spec.after_eps),
        scalar=scalar,
        is_read_again=is_read_again,
    )
