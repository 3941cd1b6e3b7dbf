"""Tables of `gguf_names`: our names of a GGUF file's tensors, and what converters changed in an architecture's.

What is not named here keeps the file's name, as norms between a layer's halves do (`families/gguf/names.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from modelfiles.gguf import GgufHeader

OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_gate": "self_attn.gate_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b.{}",
    "attn_v_b": "self_attn.v_b.{}",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.correction",
    "ffn_gate_inp_shexp": "mlp.shared_experts_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_inp.scale": "router.scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_dt": "mamba.dt_bias",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_x": "mamba.x_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_out": "mamba.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
# Tensors without a module: their names have no `.weight` and no `.bias`.
ALONE = ("exp_probs_b", "attn_sinks", "ssm_a", "ssm_dt", "ssm_d", "layer_output_scale", "altup_correct_scale")


@dataclass(frozen=True, slots=True)
class Written:
    """A converter's changes to an architecture's tensors, besides their names."""

    names: Mapping[str, str] = field(default_factory=dict)  # ours, where they differ from `IN_LAYER` and `OUTSIDE`
    in_pairs: bool = False  # rows of queries and keys stand in pairs that are rotated together
    norms_hold_one: bool = False  # the 1 that is added to them
    has_delta: bool = False  # layers with the gated delta rule, see `gguf_delta`
    values_in_turn: bool = False  # there the first value head of each key head comes first


_IN_PAIRS, _HOLDING_ONE = Written(in_pairs=True), Written(norms_hold_one=True)
_DELTA = Written(norms_hold_one=True, has_delta=True)
_LFM_2 = Written(names={"attn_output": "self_attn.o_proj", "token_embd_norm": "model.norm"})
WRITTEN: Mapping[str, Written] = {
    "arcee": _IN_PAIRS,
    "gemma": _HOLDING_ONE,
    "gemma2": _HOLDING_ONE,
    "gemma3": _HOLDING_ONE,
    "granite": _IN_PAIRS,
    "granitehybrid": _IN_PAIRS,
    "granitemoe": _IN_PAIRS,
    # Step size: a GEMM with a bias in Mamba, only a bias in Mamba-2.
    "jamba": Written(names={"ssm_dt": "mamba.dt_proj"}),
    "lfm2": _LFM_2,
    "lfm2moe": _LFM_2,
    "llama": _IN_PAIRS,
    "mistral3": _IN_PAIRS,
    "nemotron": _HOLDING_ONE,
    "qwen35": replace(_DELTA, values_in_turn=True),
    "qwen35moe": replace(_DELTA, values_in_turn=True),
    "qwen3next": _DELTA,
    "smollm3": _IN_PAIRS,
}


def written(header: GgufHeader) -> Written:
    """The converter's changes to a file's tensors."""
    return WRITTEN.get(header.metadata.get("general.architecture", ""), Written())
