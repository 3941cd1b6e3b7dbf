"""A mixture of experts: a router's choice of MLPs for each token, and shared experts.

E experts, H hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.formats.dense import one_by_one, together
from engine.formats.forms import RankSum, total_of
from engine.formats.product import ExpertsSpec, Linear, LinearSpec
from engine.kernels.activation import ACTIVATIONS
from engine.kernels.experts import Clamp, Experts, Held, mixture, route
from engine.kernels.experts.mixture import Matrices
from engine.model.layers.building import Surroundings
from engine.model.stream import Stream
from engine.parallel.group import Group
from engine.spec.experts import ExpertTensors, LatentExperts, SharedExpertSpec, SparseMlpSpec
from engine.weights.parameters import Shard, Way, of_experts, whole


class SparseMlp:
    def __init__(self, spec: SparseMlpSpec, around: Surroundings) -> None:
        self._branch = around.branch
        self._mixture = Mixture(spec, around)
        self._latents = None if spec.latent is None else _latents(spec.latent, around)
        self._shared = None if spec.shared is None else _SharedExpert(spec.shared, around)

    def __call__(self, stream: Stream) -> None:
        x = self._branch.read(stream)
        chosen = self._mixture(x) if self._latents is None else self._through(*self._latents, x)
        if self._shared is None:
            self._branch.add_value(stream, chosen)
        else:
            self._branch.add_both(stream, chosen, self._shared.down, self._shared(x))

    def _through(self, before: Linear, behind: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return the experts' output from latents, with a router that reads x."""
        return behind(total_of(self._mixture(before(x), routed=x), x.dtype))


class Mixture:
    """A router and its experts."""

    def __init__(self, spec: SparseMlpSpec, around: Surroundings) -> None:
        hidden, router = around.model.hidden_size, spec.router
        self._rule = router.rule
        dtype = torch.float32 if router.is_wide else None
        self._router = _one_of(spec.tensors.router, "weight", (spec.num_routed, hidden), around, format=dtype)
        self._router_bias = self._correction = self._weight_scale = None
        if router.bias:
            self._router_bias = _one_of(spec.tensors.router, "bias", (spec.num_routed,), around)
        if spec.tensors.correction:
            shape = spec.tensors.correction_shape or (spec.num_routed,)
            correction = _one_of(spec.tensors.correction, "", shape, around, format=torch.float32)
            self._correction = correction.view(-1)
        if router.weight_scale:
            self._weight_scale = around.in_float32(router.weight_scale, spec.num_experts)
        self._experts = _experts(spec, around)
        self._group = around.group
        count = self._experts.num_experts
        self._held = Held(around.group.rank * count, count) if self._experts.is_share else None

    def __call__(self, x: torch.Tensor, *, routed: torch.Tensor | None = None) -> torch.Tensor | RankSum:
        """Return the weighted sum [T, E], its terms [K, T, E], or the ranks' sum of either.

        `routed` [T, E] is the router's input, if not x.
        """
        read = x if routed is None else routed
        choice = route(
            read, self._router, self._router_bias, self._correction, self._rule,
            scales=self._weight_scale, held=self._held,
        )  # fmt: skip
        terms = mixture(x, choice, self._experts)
        return terms if self._group.size == 1 else RankSum(terms, self._group)


class _SharedExpert:
    def __init__(self, spec: SharedExpertSpec, around: Surroundings) -> None:
        hidden, under = around.model.hidden_size, spec.under
        self._activation = spec.activation
        names = ("up_proj",) if spec.activation == "relu2" else ("gate_proj", "up_proj")
        rows = {f"{under}.{name}": spec.size for name in names}
        gate_up = rows if spec.gate_up is None else {f"{under}.{spec.gate_up}": 2 * spec.size}
        down = {f"{under}.{spec.down}": hidden}
        self._gate_up = around.linear(LinearSpec(inputs=hidden, outputs=gate_up, bias=spec.bias, shard=Shard.OUTPUTS))
        self.down = around.linear(LinearSpec(inputs=spec.size, outputs=down, bias=spec.bias, shard=Shard.INPUTS))
        self._gate: Linear | None = None
        if spec.is_gated:
            outputs = {f"{under}_gate": 1}
            self._gate = around.linear(LinearSpec(inputs=hidden, outputs=outputs, bias=False, shard=Shard.NONE))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projection by `down` of the expert's output."""
        if self._activation == "relu2":
            return ACTIVATIONS[self._activation](self._gate_up(x))
        inner = self._gate_up.gated(x)
        return inner if self._gate is None else inner * self._gate(x).sigmoid()


def _one_of(
    names: tuple[str, ...],
    tensor: str,
    shape: tuple[int, ...],
    around: Surroundings,
    *,
    format: torch.dtype | None = None,
) -> torch.Tensor:
    """Declare a replicated parameter, under the first of the names or another."""
    parameters = [replace(whole(f"{name}.{tensor}".rstrip("."), *shape), format=format) for name in names]
    return around.weights.new(parameters[0], ways=[Way(parameter) for parameter in parameters], under=around.under)


def _latents(spec: LatentExperts, around: Surroundings) -> tuple[Linear, Linear]:
    hidden, before, behind = around.model.hidden_size, {spec.before: spec.size}, {spec.behind: around.model.hidden_size}
    return (
        around.linear(LinearSpec(inputs=hidden, outputs=before, bias=spec.bias, shard=Shard.NONE)),
        around.linear(LinearSpec(inputs=spec.size, outputs=behind, bias=spec.bias, shard=Shard.NONE)),
    )


def _is_share(spec: SparseMlpSpec, group: Group) -> bool:
    """True where each rank has some of the experts, whole."""
    return group.size > 1 and not spec.is_cut


def _experts(spec: SparseMlpSpec, around: Surroundings) -> Experts:
    num, tensors = spec.num_experts, spec.tensors
    hidden = around.model.hidden_size if spec.latent is None else spec.latent.size
    rows = spec.size * (1 + spec.has_gates)
    # transformers also saves gates for experts without a gate projection.
    empty = [name.format(expert) for name in tensors.each or () for expert in range(num, spec.num_routed)]
    around.weights.unused |= {f"{around.under}{name}.weight" for name in empty}
    gate_up_bias = down_bias = None
    if spec.expert_bias:
        gate_up_bias = _biases(tensors, (num, rows), around, first=True)
        down_bias = _biases(tensors, (num, hidden), around, first=False)
    return Experts(
        gate_up=_matrices(spec, (rows, hidden), around, first=True),
        down=_matrices(spec, (hidden, spec.size), around, first=False),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        clamp=None if spec.clamp is None else Clamp(alpha=spec.clamp[0], limit=spec.clamp[1]),
        weighs_inputs=spec.weighs_inputs,
        activation=spec.activation,
        identities=spec.identities,
        is_share=_is_share(spec, around.group),
    )


def _matrices(spec: SparseMlpSpec, shape: tuple[int, int], around: Surroundings, *, first: bool) -> Matrices:
    """Declare gate and up, as two halves, or down of all experts."""
    tensors, modules = spec.tensors, spec.tensors.each or ()
    return around.experts(
        ExpertsSpec(
            num_experts=spec.num_experts,
            rows=shape[0],
            inputs=shape[1],
            each=modules[:-1] if first else modules[-1:],
            together=tuple(pair[0 if first else 1] for pair in tensors.all),
            order=tensors.order,
            halves=first and spec.has_gates,
            shard=Shard.EXPERTS if not spec.is_cut else Shard.OUTPUTS if first else Shard.INPUTS,
        )
    )


def _biases(tensors: ExpertTensors, shape: tuple[int, int], around: Surroundings, *, first: bool) -> torch.Tensor:
    """Declare biases [E, N], in one tensor, or beside each expert's matrices."""
    names, modules = [pair[0 if first else 1] + "_bias" for pair in tensors.all], tensors.each or ()
    ways = [together(name, shape, tensors.order, halves=first) for name in names]
    if own := modules[:-1] if first else modules[-1:]:
        ways.append(one_by_one(own, "bias", shape))
    return around.weights.new(of_experts("", *shape), ways=ways, under=around.under)
