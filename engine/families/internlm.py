"""InternLM (Shanghai AI Laboratory): InternLM 3."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, flag, gated_mlp, model, number, with_defaults
from engine.spec.model import LayerSpec, ModelSpec


def read_internlm3(fields: Fields) -> ModelSpec:
    """InternLM 3: Llama with a size of heads of its own."""
    fields = with_defaults(fields, "internlm3")
    bias = flag(fields, "bias")
    mixer = attention(fields, qkv_bias=flag(fields, "qkv_bias"), output_bias=bias)
    return model(
        fields, [LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=bias))] * number(fields, "num_hidden_layers")
    )


FAMILIES: dict[str, Family] = {
    "InternLM3ForCausalLM": read_internlm3,
}
