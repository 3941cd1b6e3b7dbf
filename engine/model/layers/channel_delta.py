"""The delta rule with per-channel decay as a layer. T tokens, E hidden size, H heads, D their size, K taps.

One product gives queries, keys, values and strengths, and few features of which two more make decays and the output's gate.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch.batch import ForwardBatch
from engine.formats.product import Linear, LinearSpec
from engine.kernels.delta import DeltaHeads, channel_delta_rule, convolve, gated_norm
from engine.kernels.delta.plan import Columns, KeptState
from engine.model.layers.building import Surroundings
from engine.model.layers.delta import declare_taps
from engine.model.stream import Stream
from engine.spec.states import ChannelDeltaSpec
from engine.weights.parameters import Shard, whole


class ChannelDelta:
    def __init__(self, spec: ChannelDeltaSpec, around: Surroundings) -> None:
        hidden, size, dim, heads = around.model.hidden_size, spec.size, spec.head_dim, spec.num_heads
        self._branch, self._heads = around.branch, channel_heads(spec)
        names = {"q_proj": size, "k_proj": size, "v_proj": size, "b_proj": heads, "f_a_proj": dim, "g_a_proj": dim}
        inputs = {f"self_attn.{name}": count for name, count in names.items()}
        self._inputs = around.linear(LinearSpec(inputs=hidden, outputs=inputs, bias=False, shard=Shard.NONE))
        self._decays, self._gate = (_widening(name, spec, around) for name in ("f_b_proj", "g_b_proj"))
        output = {"self_attn.o_proj": hidden}
        self._output = around.linear(LinearSpec(inputs=size, outputs=output, bias=False, shard=Shard.NONE))
        self._channels = self._heads.channels
        self._taps = declare_taps(self._channels, "self_attn", around)
        self._decay, self._bias = (
            around.in_float32(f"self_attn.{name}", count) for name, count in (("A_log", heads), ("dt_bias", size))
        )
        self._norm, self._eps = (
            around.weights.new(whole("self_attn.o_norm.weight", dim), under=around.under),
            around.model.norms.eps,
        )
        self._few = slice(3 * size + heads, 3 * size + heads + dim), slice(3 * size + heads + dim, None)

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[KeptState], *, is_last: bool) -> None:
        """`kept`: the states [num_blocks, 1, 1, H, D D], and the convolution's last inputs [num_blocks, K - 1, 1, 1, 3 H D]."""
        states, inputs = kept
        x = self._inputs(self._branch.read(stream))
        decays, gate = (
            wide(x[:, few].contiguous()) for wide, few in zip((self._decays, self._gate), self._few, strict=True)
        )
        mixed = convolve(x, self._taps, None, inputs.kept, batch.states[inputs.number], self._channels)
        out = channel_delta_rule(
            mixed, x, decays, self._decay, self._bias, states.kept, batch.states[states.number], self._heads
        )
        out = gated_norm(out, gate, self._norm, self._eps, self._heads, has_silu=False)
        self._branch.add_wanted(stream, self._output, out, batch, is_last=is_last)


def channel_heads(spec: ChannelDeltaSpec) -> DeltaHeads:
    """Column layout of the projection. Decays and gates have their own projections."""
    dim = spec.head_dim
    q, k, v = (Columns(first=at * spec.size, step=dim) for at in range(3))
    own = Columns(first=0, step=dim)
    return DeltaHeads(
        num_key_heads=spec.num_heads, ratio=1, key_dim=dim, value_dim=dim, taps=spec.taps,
        q=q, k=k, v=v, z=own, b=Columns(first=3 * spec.size, step=1), a=own,
    )  # fmt: skip


def _widening(name: str, spec: ChannelDeltaSpec, around: Surroundings) -> Linear:
    outputs = {f"self_attn.{name}": spec.size}
    return around.linear(LinearSpec(inputs=spec.head_dim, outputs=outputs, bias=False, shard=Shard.NONE))
