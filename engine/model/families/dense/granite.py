"""Granite: multipliers of embeddings, scores, residuals and logits. Of Granite 4, the models without experts and state layers."""

from __future__ import annotations

from engine.model.families.fields import (
    FULL,
    Fields,
    attention,
    flag,
    gated_mlp,
    layer_types,
    model,
    number,
    real,
    rope,
)
from engine.model.spec import AttentionSpec, BranchSpec, LayerSpec, MlpSpec, ModelSpec, UnsupportedModelError

GRANITE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "attention_multiplier": 1.0,
}
GRANITE_4 = GRANITE | {"shared_intermediate_size": 1024, "num_local_experts": 8}


def read(fields: Fields) -> ModelSpec:
    """Granite 3: four multipliers."""
    fields = fields.over(GRANITE)
    mlp = gated_mlp(fields, bias=flag(fields, "mlp_bias"))
    return around(
        fields, [layer(fields, attention_of(fields, has_rope=True), mlp)] * number(fields, "num_hidden_layers")
    )


def read_4(fields: Fields) -> ModelSpec:
    """Granite 4 without experts and state layers."""
    fields = fields.over(GRANITE_4)
    if experts := fields.get("num_local_experts"):
        raise UnsupportedModelError(f"config.json: num_local_experts = {experts} is not supported; supported: 0")
    num_layers = number(fields, "num_hidden_layers")
    layer_types(fields, ["linear_attention"] * num_layers, known=(FULL, "attention"))
    fields.ignore(
        "intermediate_size", "num_experts_per_tok", "normalization_function", "time_step_limit", "layers_block_type"
    )
    fields.ignore(*(name for name in fields if name.startswith("mamba_")))
    fields.only("position_embedding_type", "rope", "nope")
    fields.only("normalization_function", "rmsnorm")
    mlp = gated_mlp(
        fields, size="shared_intermediate_size", fused="shared_mlp.input_linear", down="shared_mlp.output_linear"
    )
    mixer = attention_of(fields, has_rope=fields.get("position_embedding_type") == "rope")
    return around(fields, [layer(fields, mixer, mlp)] * num_layers)


def attention_of(fields: Fields, *, has_rope: bool) -> AttentionSpec:
    bias, rotation = flag(fields, "attention_bias"), rope(fields)
    scale = real(fields, "attention_multiplier", 1.0)
    return attention(fields, rope=rotation if has_rope else None, qkv_bias=bias, output_bias=bias, scale=scale)


def layer(fields: Fields, mixer: AttentionSpec, mlp: MlpSpec) -> LayerSpec:
    multiplier = real(fields, "residual_multiplier", 1.0)
    return LayerSpec(
        mixer=mixer,
        mlp=mlp,
        around_mixer=BranchSpec(before="input_layernorm", multiplier=multiplier),
        around_mlp=BranchSpec(before="post_attention_layernorm", multiplier=multiplier),
    )


def around(fields: Fields, layers: list[LayerSpec]) -> ModelSpec:
    return model(
        fields,
        layers,
        embedding_multiplier=real(fields, "embedding_multiplier", 1.0),
        logits_multiplier=1 / real(fields, "logits_scaling", 1.0),
    )
