"""InternLM (Shanghai AI Laboratory): InternLM 3."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, gated_mlp, model, with_defaults
from engine.spec.model import LayerSpec, ModelSpec


def read_internlm3(fields: Fields) -> ModelSpec:
    """InternLM 3: Llama with a size of heads of its own."""
    fields = with_defaults(fields, "internlm3")
    bias = fields.flag("bias")
    mixer = attention(fields, qkv_bias=fields.flag("qkv_bias"), output_bias=bias)
    return model(
        fields, [LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=bias))] * fields.number("num_hidden_layers")
    )


FAMILIES: dict[str, Family] = {
    "InternLM3ForCausalLM": read_internlm3,
}
