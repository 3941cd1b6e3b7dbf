"""HunYuan (dense): queries and keys are normed after the rotation, whose base grows by `alpha`."""

from __future__ import annotations

from dataclasses import replace

from engine.families.fields import Fields, attention, flag, gated_mlp, model, number, rope
from engine.families.ropes import rope_values
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.model import LayerSpec, ModelSpec

DEFAULTS = {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
_IMAGES = ("start", "end", "newline")
QK_NORM = QkNorm(after_rope=True, q_name="self_attn.query_layernorm", k_name="self_attn.key_layernorm")


def read(fields: Fields) -> ModelSpec:
    fields = fields.over(DEFAULTS)
    fields.only("num_experts", 1)
    fields.only("routed_scaling_factor", 1.0)
    layer = LayerSpec(mixer=mixer(fields), mlp=gated_mlp(fields))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def mixer(fields: Fields) -> AttentionSpec:
    """Every layer's attention."""
    fields.ignore("org_vocab_size", "cla_share_factor", "enable_lm_head_fp32", "class_num", "dense_list", "pool_type")
    fields.ignore("pad_id", "mask_init_id", "text_start_id", "text_end_id", *(f"im_{name}_id" for name in _IMAGES))
    fields.only("norm_type", "rms", "hf_rms")
    fields.only("use_rotary_pos_emb", True)
    fields.only("attention_head_dim", fields.get("head_dim"))
    fields.only("use_qk_norm", True)
    fields.only("use_cla", False)
    bias, others = flag(fields, "attention_bias"), ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    found = attention(fields, rope=rope(fields, others=others), qk_norm=QK_NORM, qkv_bias=bias, output_bias=bias)
    _, values = rope_values(fields)
    if found.rope is not None and (values.get("rope_type") or values.get("type")) == "dynamic" and values.get("alpha"):
        dim = found.heads.head_dim
        theta = found.rope.theta * float(values["alpha"]) ** (dim / (dim - 2))
        found = replace(found, rope=replace(found.rope, theta=theta))
    return found
