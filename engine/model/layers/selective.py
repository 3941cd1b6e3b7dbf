"""Mamba as a layer, with a recurrent (SSM) state and the last inputs of a convolution for each sequence.

T tokens, E hidden size, D channels, N numbers of a channel's state, R features that steps are made of, K taps. One product gives
values and the gate; one more of the mixed values R features and the keys and queries of all channels, which are normed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.product import LinearSpec
from engine.kernels.delta import Channels, Columns, Span, convolve
from engine.kernels.delta.plan import KeptState
from engine.kernels.mamba import selective_scan, three_norms
from engine.model.layers.building import Surroundings
from engine.model.stream import Stream
from engine.spec.states import SelectiveSpec
from engine.weights.parameters import Parameter, Shard, stacked, whole


class Selective:
    def __init__(self, spec: SelectiveSpec, around: Surroundings) -> None:
        hidden, size, numbers, weights = around.model.hidden_size, spec.size, spec.state_size, around.weights

        def linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> LinearSpec:
            return LinearSpec(inputs=inputs, outputs={f"mamba.{name}": outputs}, bias=bias, shard=Shard.NONE)

        self._branch, self._rank, self._eps = around.branch, spec.rank, around.model.norms.eps
        self._inputs = around.linear(linear("in_proj", hidden, 2 * size, bias=spec.in_bias))
        self._few = around.linear(linear("x_proj", size, spec.rank + 2 * numbers))
        self._steps = around.linear(linear("dt_proj", spec.rank, size))
        self._output = around.linear(linear("out_proj", size, hidden, bias=spec.out_bias))
        self._channels = Channels(
            spans=(Span(columns=Columns(first=0, step=size), groups=1, width=size),), taps=spec.taps
        )
        taps = weights.new(whole("mamba.conv1d.weight", size, 1, spec.taps), under=around.under)
        self._taps, self._taps_bias = taps.view(size, spec.taps), None
        if spec.taps_bias:
            self._taps_bias = weights.new(whole("mamba.conv1d.bias", size), under=around.under)
        norms = {"dt_layernorm": spec.rank, "b_layernorm": numbers, "c_layernorm": numbers}
        parts = stacked({f"mamba.{name}.weight": count for name, count in norms.items()})
        self._norms = weights.new(Parameter(shape=(sum(norms.values()),), parts=parts), under=around.under)
        rates = replace(whole("mamba.A_log", size, numbers), format=torch.float32)
        self._rates = weights.new(rates, under=around.under)
        weights.when_loaded.append(self._make_rates)
        self._bias, self._skip = (around.in_float32(f"mamba.{name}", size) for name in ("dt_proj.bias", "D"))

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[KeptState], *, is_last: bool) -> None:
        """`kept`: the states [num_blocks, 1, 1, D, N], and the convolution's last inputs [num_blocks, K - 1, 1, 1, D]."""
        states, inputs = kept
        x = self._inputs(self._branch.read(stream))
        mixed = convolve(x, self._taps, self._taps_bias, inputs.kept, batch.states[inputs.number], self._channels)
        few, shared = three_norms(self._few(mixed), self._norms, self._eps, self._rank)
        of_channels = (self._rates, self._bias, self._skip)
        out = selective_scan(mixed, x, self._steps(few), shared, *of_channels, states.kept, batch.states[states.number])
        self._branch.add_wanted(stream, self._output, out, batch, is_last=is_last)

    def _make_rates(self) -> None:
        """Convert the checkpoint's logarithms (A_log) once: each token would compute the same exponentials."""
        self._rates.exp_().neg_()
