"""Mamba-2 as a layer, with a recurrent (SSM) state and the last inputs of a convolution for each sequence.

T tokens, E hidden size, N what one product gives of a token: gate, values, keys, queries, steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.product import LinearSpec
from engine.kernels.delta import convolve
from engine.kernels.delta.plan import KeptState
from engine.kernels.mamba import gate, scan
from engine.model.layers.building import Surroundings
from engine.model.stream import Stream
from engine.spec.states import MambaSpec
from engine.weights.parameters import Shard, whole


class Mamba:
    def __init__(self, spec: MambaSpec, around: Surroundings) -> None:
        hidden, weights, of = around.model.hidden_size, around.weights, spec.under
        self._heads = heads = spec.heads
        self._branch = around.branch
        inputs, output = {f"{of}.in_proj": heads.num_columns}, {f"{of}.out_proj": hidden}
        self._inputs = around.linear(LinearSpec(inputs=hidden, outputs=inputs, bias=spec.in_bias, shard=Shard.NONE))
        self._output = around.linear(
            LinearSpec(inputs=heads.size, outputs=output, bias=spec.out_bias, shard=Shard.NONE)
        )
        self._channels = heads.channels
        num, self._taps_bias = self._channels.count, None
        taps = weights.new(whole(f"{of}.conv1d.weight", num, 1, heads.taps), under=around.under)
        self._taps = taps.view(num, -1)
        if spec.taps_bias:
            self._taps_bias = weights.new(whole(f"{of}.conv1d.bias", num), under=around.under)
        self._decay, self._bias, self._skip = (
            around.in_float32(f"{of}.{name}", heads.num_heads) for name in ("A_log", "dt_bias", "D")
        )
        self._norm: torch.Tensor | None = None
        if heads.norm != "none":
            self._norm = weights.new(whole(f"{of}.norm.weight", heads.size), under=around.under)
        self._eps = around.model.norms.eps
        self._multipliers: torch.Tensor | None = None
        if spec.multipliers:
            widths = (heads.size, heads.size, heads.keys_size, heads.keys_size, heads.num_heads)
            each = [value for value, width in zip(spec.multipliers, widths, strict=True) for _ in range(width)]
            # Rounded, as in the checkpoint's own code.
            self._multipliers = torch.tensor(each, dtype=weights.dtype, device=weights.device)

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[KeptState], *, is_last: bool) -> None:
        """`kept`: the states [num_blocks, 1, 1, H, N P], and the convolution's last inputs [num_blocks, K - 1, 1, 1, C]."""
        out = self._inner(self._branch.read(stream), batch, kept)
        self._branch.add_wanted(stream, self._output, out, batch, is_last=is_last)

    def _inner(self, read: torch.Tensor, batch: ForwardBatch, kept: Sequence[KeptState]) -> torch.Tensor:
        """Return the input of the output projection [T, D]."""
        states, inputs = kept
        x = self._inputs(read)
        if self._multipliers is not None:
            x = x * self._multipliers
        last = batch.states[inputs.number]
        mixed = convolve(x, self._taps, self._taps_bias, inputs.kept, last, self._channels)
        rates = (self._decay, self._bias, self._skip)
        out = scan(mixed, x, *rates, states.kept, batch.states[states.number], self._heads)
        return gate(out, x, self._norm, self._eps, self._heads)
