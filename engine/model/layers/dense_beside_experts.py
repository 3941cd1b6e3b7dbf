"""A gated MLP in parallel with experts, each between its own norms."""

from __future__ import annotations

from engine.formats.forms import total_of
from engine.kernels.norm import rms_norm
from engine.model.layers.building import Surroundings
from engine.model.layers.mlp import GatedMlp
from engine.model.layers.sparse_mlp import Mixture
from engine.model.stream import Stream
from engine.spec.model import DenseBesideExpertsSpec
from engine.weights.parameters import whole


class DenseBesideExperts:
    def __init__(self, spec: DenseBesideExpertsSpec, around: Surroundings) -> None:
        hidden = around.model.hidden_size
        self._branch, self._eps = around.branch, around.model.norms.eps
        self._dense, self._experts = GatedMlp(spec.dense, around), Mixture(spec.experts, around)
        names = (spec.after_dense, spec.before_experts, spec.after_experts)
        self._after_dense, self._before_experts, self._after_experts = (around.norm(name, hidden) for name in names)
        self._router_norm = around.weights.new(whole(spec.router_norm, hidden), under=around.under)
        around.weights.when_loaded.append(self._divide)

    def _divide(self) -> None:
        self._router_norm.mul_(len(self._router_norm) ** -0.5)

    def __call__(self, stream: Stream) -> None:
        x = self._branch.read(stream)
        before = stream.whole()
        dense = self._after_dense(self._dense.of(x))
        terms = self._experts(self._before_experts(before), routed=rms_norm(before, self._router_norm, self._eps))
        self._branch.add_value(stream, dense + self._after_experts(total_of(terms, x.dtype)))
