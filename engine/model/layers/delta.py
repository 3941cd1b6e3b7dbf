"""The gated delta rule as a layer, with a recurrent state and the last inputs of a convolution for each sequence.

T tokens, E hidden size, N what one product gives of a token: queries, keys, values, the output's gate, strength and decay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.product import LinearSpec
from engine.kernels.delta import Channels, DeltaHeads, convolve, delta_rule, gated_norm
from engine.kernels.delta.plan import Columns, KeptState
from engine.model.layers.building import Surroundings
from engine.model.stream import Stream
from engine.spec.states import DeltaSpec
from engine.weights.parameters import Parameter, Shard, Way, stacked, whole

_APART = ("apart", "apart_but_rates")


class GatedDelta:
    def __init__(self, spec: DeltaSpec, around: Surroundings) -> None:
        hidden, weights, under = around.model.hidden_size, around.weights, around.under
        self._heads = heads = delta_heads(spec)
        self._branch = around.branch
        inputs = {f"linear_attn.{name}": count for name, count in _outputs(spec).items()}
        norm, last = ("o_norm", "o_proj") if spec.stored in _APART else ("norm", "out_proj")
        self._inputs = around.linear(LinearSpec(inputs=hidden, outputs=inputs, bias=False, shard=Shard.NONE))
        output = {f"linear_attn.{last}": hidden}
        self._output = around.linear(LinearSpec(inputs=heads.values_size, outputs=output, bias=False, shard=Shard.NONE))
        self._channels = heads.channels
        self._taps = declare_taps(self._channels, "linear_attn", around)
        self._decay, self._bias = (
            around.in_float32(f"linear_attn.{name}", heads.num_value_heads) for name in ("A_log", "dt_bias")
        )
        self._gate_norm = weights.new(whole(f"linear_attn.{norm}.weight", heads.value_dim), under=under)
        self._eps = around.model.norms.eps if spec.norm_eps is None else spec.norm_eps

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[KeptState], *, is_last: bool) -> None:
        """`kept`: the states [num_blocks, 1, 1, Hv, Dk Dv], and the convolution's last inputs [num_blocks, K - 1, 1, 1, C]."""
        states, inputs = kept
        x = self._inputs(self._branch.read(stream))
        mixed = convolve(x, self._taps, None, inputs.kept, batch.states[inputs.number], self._channels)
        out = delta_rule(mixed, x, self._decay, self._bias, states.kept, batch.states[states.number], self._heads)
        out = gated_norm(out, x, self._gate_norm, self._eps, self._heads)
        self._branch.add_wanted(stream, self._output, out, batch, is_last=is_last)


def _outputs(spec: DeltaSpec) -> dict[str, int]:
    keys, values, num = spec.keys_size, spec.values_size, spec.num_value_heads
    if spec.stored == "by_group":
        return {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * num}
    if spec.stored in _APART:
        rates = {"b_proj": num, "a_proj": num} if spec.stored == "apart" else {"in_proj_ba": 2 * num}
        return {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values} | rates
    return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": num, "in_proj_a": num}


def delta_heads(spec: DeltaSpec) -> DeltaHeads:
    """Column layout of the projection: each kind's features together, or each key head's by kind."""
    ratio, key, value = spec.num_value_heads // spec.num_key_heads, spec.key_dim, spec.value_dim
    widths = {"q": key, "k": key, "v": ratio * value, "z": ratio * value, "b": ratio, "a": ratio}
    together: list[tuple[str, ...]] = [(name,) for name in widths]
    if spec.stored == "by_group":
        together = [("q", "k", "v", "z"), ("b", "a")]
    elif spec.stored == "apart_but_rates":
        together = [("q",), ("k",), ("v",), ("z",), ("b", "a")]
    columns, at = {}, 0
    for names in together:
        step = sum(widths[name] for name in names)
        for name in names:
            columns[name] = Columns(first=at, step=step)
            at += widths[name]
        at += (spec.num_key_heads - 1) * step
    return DeltaHeads(
        num_key_heads=spec.num_key_heads,
        ratio=ratio,
        key_dim=key,
        value_dim=value,
        taps=spec.taps,
        most_strength=spec.most_strength,
        **columns,
    )


def declare_taps(channels: Channels, module: str, around: Surroundings) -> torch.Tensor:
    """The convolution's weights [C, K]: one tensor, or one each of queries, keys and values."""
    sizes = {f"{module}.{kind}_conv1d.weight": size for kind, size in zip("qkv", channels.sizes, strict=True)}
    together = whole(f"{module}.conv1d.weight", channels.count, 1, channels.taps)
    apart = Parameter(shape=together.shape, parts=stacked(sizes))
    taps = around.weights.new(together, ways=(Way(together), Way(apart)), under=around.under)
    return taps.view(channels.count, channels.taps)
