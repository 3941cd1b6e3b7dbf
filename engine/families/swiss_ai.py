"""Swiss AI: Apertus."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, model, rope, with_default_rope, with_defaults
from engine.spec.attention import QkNorm
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, PlainMlpSpec


def read_apertus(fields: Fields) -> ModelSpec:
    """Apertus: queries and keys normed head by head, an MLP of xIELU without a gate."""
    fields = with_default_rope(fields, "apertus")
    fields = with_defaults(fields, "apertus")
    fields.only("hidden_act", "xielu")
    fields.only("qk_norm", True)
    fields.only("post_norm", False)
    fields.only("mlp_bias", False)
    bias, rotation = fields.flag("attention_bias"), rope(fields, theta=12_000_000.0)
    size = fields.number("intermediate_size")
    layer = LayerSpec(
        mixer=attention(fields, rope=rotation, qk_norm=QkNorm(), qkv_bias=bias, output_bias=bias),
        mlp=PlainMlpSpec(size=size, bias=False, activation="xielu", learned="mlp.act_fn"),
        around_mixer=BranchSpec(before="attention_layernorm"),
        around_mlp=BranchSpec(before="feedforward_layernorm"),
    )
    return model(fields, [layer] * fields.number("num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "ApertusForCausalLM": read_apertus,
}
