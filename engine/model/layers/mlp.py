"""The gated MLP: down(silu(gate(x)) * up(x)). Gate and up are one matrix and one product."""

from __future__ import annotations

from engine.model.layers.building import Surroundings
from engine.model.layers.linear import LinearSpec
from engine.model.parameters import Shard
from engine.model.spec import GatedMlpSpec
from engine.model.stream import Stream


class GatedMlp:
    def __init__(self, spec: GatedMlpSpec, around: Surroundings) -> None:
        hidden = around.model.hidden_size
        gate_up = {"mlp.gate_proj": spec.size, "mlp.up_proj": spec.size}
        down = {"mlp.down_proj": hidden}
        self._norm = around.norm("post_attention_layernorm")
        self._gate_up = around.linear(LinearSpec(inputs=hidden, outputs=gate_up, bias=spec.bias, shard=Shard.OUTPUTS))
        self._down = around.linear(LinearSpec(inputs=spec.size, outputs=down, bias=spec.bias, shard=Shard.INPUTS))

    def __call__(self, stream: Stream) -> None:
        stream.plus(self._down, self._gate_up.gated(stream.normed(self._norm)))
