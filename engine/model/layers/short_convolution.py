"""A short convolution between two gates as a layer, with its last inputs kept for each sequence.

T tokens, E hidden size, K taps. One product gives what is mixed, the gate before and the gate behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch.batch import ForwardBatch
from engine.formats.product import LinearSpec
from engine.kernels.delta import Channels, Columns, Span, convolve
from engine.kernels.delta.plan import KeptState
from engine.model.layers.building import Surroundings
from engine.model.stream import Stream
from engine.spec.states import ShortConvolutionSpec
from engine.weights.parameters import Shard, whole


class ShortConvolution:
    def __init__(self, spec: ShortConvolutionSpec, around: Surroundings) -> None:
        size, hidden, bias = spec.size, around.model.hidden_size, spec.has_bias
        self._branch = around.branch
        mixed = Span(columns=Columns(first=2 * size, step=size), groups=1, width=size)
        self._channels = Channels(spans=(mixed,), taps=spec.taps, has_silu=False, gates=(0, size))
        inputs, outputs = {"conv.in_proj": 3 * size}, {"conv.out_proj": hidden}
        self._inputs = around.linear(LinearSpec(inputs=hidden, outputs=inputs, bias=bias, shard=Shard.NONE))
        self._output = around.linear(LinearSpec(inputs=size, outputs=outputs, bias=bias, shard=Shard.NONE))
        taps = around.weights.new(whole("conv.conv.weight", size, 1, spec.taps), under=around.under)
        self._taps = taps.view(size, spec.taps)
        self._bias = around.weights.new(whole("conv.conv.bias", size), under=around.under) if bias else None

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[KeptState], *, is_last: bool) -> None:
        """`kept`: the last inputs [num_blocks, K - 1, 1, 1, E]."""
        (inputs,) = kept
        x = self._branch.product(stream, self._inputs)
        out = convolve(x, self._taps, self._bias, inputs.kept, batch.states[inputs.number], self._channels)
        self._branch.add_wanted(stream, self._output, out, batch, is_last=is_last)
