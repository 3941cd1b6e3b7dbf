"""Phi-1 and 2: attention and MLP read the same LayerNorm, part of each head is rotated, biases everywhere.

Phi-3 and 4 are Llama with fused tensors and LongRoPE.
"""

from __future__ import annotations

from engine.families.fields import Fields, attention, gated_mlp, model, number, rope, sliding_window
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, PlainMlpSpec

PHI = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "hidden_act": "gelu_new",
}
PHI_3 = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "original_max_position_embeddings": 4096,
}


def read(fields: Fields) -> ModelSpec:
    """Phi-1 and 2: parallel halves, LayerNorm, part of each head rotated."""
    fields = fields.over(PHI)
    fields.only("hidden_act", "gelu_new")
    fields.only("qk_layernorm", False)
    mixer = attention(fields, qkv_bias=True, output_bias=True, output="self_attn.dense")
    size = number(fields, "intermediate_size")
    mlp = PlainMlpSpec(size=size, bias=True, activation="gelu_tanh", up="mlp.fc1", down="mlp.fc2")
    layer = LayerSpec(mixer=mixer, mlp=mlp, around_mlp=BranchSpec(shares=True))
    options = {"norm": "layer", "norm_bias": True, "head_bias": True, "final_norm": "model.final_layernorm"}
    return model(fields, [layer] * number(fields, "num_hidden_layers"), eps="layer_norm_eps", **options)


def read_3(fields: Fields) -> ModelSpec:
    """Phi-3, Phi-3.5, Phi-4 and their mini models: Llama with fused tensors and LongRoPE."""
    fields = fields.over(PHI_3)
    fields.only("full_attn_mod", 1)
    fields.only("interpolate_factor", 1)
    fields.only("lm_head_bias", False)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.ignore("original_max_position_embeddings")
    mixer = attention(
        fields,
        rope=rope(fields, legacy_type="longrope"),
        window=sliding_window(fields),
        fused="self_attn.qkv_proj",
    )
    mlp = gated_mlp(fields, fused="mlp.gate_up_proj")
    return model(fields, [LayerSpec(mixer=mixer, mlp=mlp)] * number(fields, "num_hidden_layers"))
