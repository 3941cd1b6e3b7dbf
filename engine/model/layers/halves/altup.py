"""AltUp: layers compute on one of several residual streams. S streams, T tokens, E hidden size."""

from __future__ import annotations

import torch

from engine.formats.product import LinearSpec
from engine.kernels.altup import StreamRouter, correct_streams, predict_streams
from engine.model.layers.building import Surroundings
from engine.model.layers.halves.layer_inputs import LayerInput
from engine.model.stream import Stream
from engine.spec.halves import AltUpSpec, LayerInputsSpec
from engine.weights.parameters import Shard, whole

LEAST_SQUARE = 1e-5  # lower bound of a stream's mean square


class AltUp:
    """One layer's AltUp: `predict` before it, `correct` after it."""

    def __init__(self, spec: AltUpSpec, inputs: LayerInputsSpec, around: Surroundings, *, index: int) -> None:
        hidden, num, weights, under = around.model.hidden_size, spec.num_streams, around.weights, around.under
        self._active = spec.active
        norm = around.norm("altup.router_norm", hidden)
        rows = weights.new(whole("altup.modality_router.weight", num, hidden), under=under)
        self._router = StreamRouter(norm.weight, rows, norm.eps)
        self._predicting = weights.new(whole("altup.prediction_coefs.weight", num * num, num), under=under)
        self._correcting = weights.new(whole("altup.correction_coefs.weight", num, num), under=under)
        self._scale: torch.Tensor | None = weights.new(whole("altup.correct_output_scale", hidden), under=under)
        if not spec.scales_output:
            self._scale = None
        self._input = LayerInput(inputs, around, index=index)
        self._norm = around.norm("post_per_layer_input_norm", hidden)

    def predict(self, stream: Stream) -> None:
        """Predict all streams, and continue with the active one."""
        stream.go_on_with(
            predict_streams(_all(stream), self._router, self._predicting, active=self._active), self._active
        )

    def correct(self, stream: Stream) -> None:
        """Correct all streams, and add the per-layer input to all but the first."""
        streams = correct_streams(_all(stream), stream.whole(), self._router, self._correcting, active=self._active)
        x = streams[self._active]
        streams[1:] += self._norm(self._input.of(x if self._scale is None else x * self._scale, stream))
        stream.go_on_with(streams, self._active)


class Streams:
    """Both ends of a model: one stream becomes several, and several become one."""

    def __init__(self, spec: AltUpSpec, around: Surroundings) -> None:
        hidden, others = around.model.hidden_size, range(spec.num_streams - 1)
        self._active, self._shape = spec.active, (len(others), hidden)
        begins = {f"altup_projections.{index}": hidden for index in others}
        self._begins = around.linear(LinearSpec(inputs=hidden, outputs=begins, bias=False, shard=Shard.NONE))
        self._ends = [
            around.linear(
                LinearSpec(
                    inputs=hidden, outputs={f"altup_unembed_projections.{index}": hidden}, bias=False, shard=Shard.NONE
                )
            )
            for index in others
        ]

    def begin(self, stream: Stream) -> None:
        """Start: the first stream is the embedding, the others are projections rescaled to its size."""
        x = stream.whole()
        others = self._begins(x).unflatten(1, self._shape).transpose(0, 1)
        stream.go_on_with(torch.cat((x[None], _as_large(others, x))), self._active)

    def end(self, stream: Stream) -> None:
        """End: the mean of the first stream and the others' projections, rescaled to its size."""
        first, *others = _all(stream).unbind(0)
        products = torch.stack([product(other) for product, other in zip(self._ends, others, strict=True)])
        summed = first.float() + _as_large(products, first).sum(dim=0, dtype=torch.float32)
        stream.become((summed / (1 + len(others))).to(first.dtype))


def _all(stream: Stream) -> torch.Tensor:
    assert stream.streams is not None, "the model's beginning made them"
    return stream.streams


def _as_large(x: torch.Tensor, as_this: torch.Tensor) -> torch.Tensor:
    """Return x [..., T, E] rescaled to the mean square of the other's rows [T, E]."""
    wide = x.float()
    wanted = as_this.float().square().mean(dim=-1, keepdim=True)
    found = wide.square().mean(dim=-1, keepdim=True).clamp(min=LEAST_SQUARE)
    return (wide * (wanted / found).sqrt()).to(x.dtype)
