"""Layers of experts as plain values, and how checkpoints name their tensors. Sizes are element counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.formats.product import Order
from engine.kernels.experts.rule import RoutingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """Tensor names below the layer's, and the order of tensors with all experts."""

    router: tuple[str, ...] = ("mlp.gate",)  # one of these modules
    each: tuple[str, ...] | None = None  # gate, if any, up, down of expert `{}`
    all: tuple[tuple[str, str], ...] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)  # or one of these pairs
    order: Order = Order.ROWS
    correction: tuple[str, ...] = ()  # one of these tensors; none: the rule has no correction
    correction_shape: tuple[int, ...] | None = None  # where it is not [E]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The product that scores experts, and the rule by which tokens choose among them."""

    rule: RoutingRule
    bias: bool = False
    is_wide: bool = False  # its matrix stays in float32, whatever the model's dtype is
    weight_scale: str = ""  # tensor [E] that multiplies the experts' weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSpec:
    """An MLP that every token passes through, in addition to its experts."""

    size: int
    under: str  # name of its module
    is_gated: bool = False  # its output is multiplied by the sigmoid of another projection, `{under}_gate`
    gate_up: str | None = None  # name of one tensor with both halves; None: gate_proj and up_proj
    down: str = "down_proj"
    activation: Literal["silu", "relu2"] = "silu"  # "relu2": there is no gate
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentExperts:
    """Experts in a smaller latent space, with projections before and after."""

    size: int
    before: str  # modules
    behind: str
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlpSpec:
    """MLPs, of which a router selects some for each token."""

    num_experts: int
    size: int  # one expert's intermediate size
    router: RouterSpec
    tensors: ExpertTensors
    shared: SharedExpertSpec | None = None
    latent: LatentExperts | None = None
    expert_bias: bool = False
    clamp: tuple[float, float] | None = None  # alpha and limit of the clamped activation; None: silu
    weighs_inputs: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"  # "relu2": there are no gates
    identities: int = 0  # identity experts after these, without matrices
    is_cut: bool = False  # ranks have a part of every expert, instead of some

    @property
    def num_routed(self) -> int:
        """Experts that the router chooses among."""
        return self.num_experts + self.identities

    @property
    def has_gates(self) -> bool:
        return self.activation != "relu2"
