"""Per-layer inputs beside the stream. T tokens, E hidden size, L layers, I size of one layer's input."""

from __future__ import annotations

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.product import LinearSpec
from engine.kernels.activation import ACTIVATIONS
from engine.kernels.embedding import embed
from engine.model.layers.building import Surroundings
from engine.model.stream import Stream
from engine.spec.halves import LayerInputsSpec
from engine.weights.parameters import Shard, Way, whole


class LayerInputs:
    """All per-layer inputs of a pass: rows of a table, plus a normed projection of the embeddings."""

    def __init__(self, spec: LayerInputsSpec, around: Surroundings) -> None:
        model, weights = around.model, around.weights
        self._shape = (model.num_layers, spec.size)
        width = model.num_layers * spec.size
        stored = whole("model.embed_tokens_per_layer.weight", spec.vocab_size, width)
        rows = max(model.vocab_size, spec.vocab_size)
        ways = [Way(stored, seen=lambda table: table[: spec.vocab_size])]
        self._table, self._num_stored = weights.new(whole("", rows, width), ways=ways), spec.vocab_size
        weights.when_loaded.append(self._fill)
        outputs = {"per_layer_model_projection": width}
        self._product = around.linear(
            LinearSpec(inputs=model.hidden_size, outputs=outputs, bias=False, shard=Shard.NONE)
        )
        self._norm = around.norm("per_layer_projection_norm", spec.size)
        # Rounded, as in the checkpoint's own code.
        self._multiplier = torch.tensor(spec.size**0.5, dtype=weights.dtype, device=weights.device)
        self._scale = model.hidden_size**-0.5

    def _fill(self) -> None:
        """Use the first row for tokens without one, which stand for images or sound."""
        self._table[self._num_stored :] = self._table[0]

    def __call__(self, stream: Stream, batch: ForwardBatch) -> None:
        """Attach the inputs to the stream, which has the embeddings."""
        rows = embed(self._table, batch.tokens) * self._multiplier
        products = self._norm((self._product(stream.whole()) * self._scale).unflatten(1, self._shape))
        stream.layer_inputs = (products + rows.unflatten(1, self._shape)) * 2**-0.5


class LayerInput:
    """Adds a layer's own input to the stream, gated by the stream."""

    def __init__(self, spec: LayerInputsSpec, around: Surroundings, *, index: int) -> None:
        hidden = around.model.hidden_size
        self._branch, self._index = around.branch, index
        gate, projection = {"per_layer_input_gate": spec.size}, {"per_layer_projection": hidden}
        self._gate = around.linear(LinearSpec(inputs=hidden, outputs=gate, bias=False, shard=Shard.NONE))
        self._projection = around.linear(LinearSpec(inputs=spec.size, outputs=projection, bias=False, shard=Shard.NONE))
        self._activate = ACTIVATIONS[spec.activation]

    def of(self, x: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Return the addition [T, E] to the stream x [T, E], before a norm."""
        return self._projection(self._gated(x, stream))

    def __call__(self, stream: Stream) -> None:
        self._branch.add(stream, self._projection, self._gated(self._branch.read(stream), stream))

    def _gated(self, x: torch.Tensor, stream: Stream) -> torch.Tensor:
        assert stream.layer_inputs is not None, "the embedding made them"
        return self._activate(self._gate(x)) * stream.layer_inputs[:, self._index]
