"""Swiss AI: Apertus."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, flag, model, number, rope
from engine.spec.attention import QkNorm
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, PlainMlpSpec

APERTUS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "hidden_act": "xielu",
}
APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_apertus(fields: Fields) -> ModelSpec:
    """Apertus: queries and keys normed head by head, an MLP of xIELU without a gate."""
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields = fields.over({"rope_parameters": APERTUS_ROPE})
    fields = fields.over(APERTUS)
    fields.only("hidden_act", "xielu")
    fields.only("qk_norm", True)
    fields.only("post_norm", False)
    fields.only("mlp_bias", False)
    bias, rotation = flag(fields, "attention_bias"), rope(fields, theta=12_000_000.0)
    size = number(fields, "intermediate_size")
    layer = LayerSpec(
        mixer=attention(fields, rope=rotation, qk_norm=QkNorm(), qkv_bias=bias, output_bias=bias),
        mlp=PlainMlpSpec(size=size, bias=False, activation="xielu", learned="mlp.act_fn"),
        around_mixer=BranchSpec(before="attention_layernorm"),
        around_mlp=BranchSpec(before="feedforward_layernorm"),
    )
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "ApertusForCausalLM": read_apertus,
}
