"""Families that keep a state beside keys and values."""

from __future__ import annotations

from tests.unit.engine.families.case import Case
from tests.unit.engine.families.dense import MULTIPLIED

STATE = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
LAST_IS_LINEAR = ["full_attention", "linear_attention", "linear_attention"]
MIXED = {"mlp_only_layers": [1], "layer_types": LAST_IS_LINEAR, "num_hidden_layers": 3, "linear_conv_kernel_dim": 2}
MAMBA = {
    "num_hidden_layers": 3,
    "mamba_expand": 1,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
LAST_IS_ATTENTION = ["linear_attention", "linear_attention", "full_attention"]
GRANITE_4 = MAMBA | MULTIPLIED | {"shared_intermediate_size": 96, "layer_types": LAST_IS_ATTENTION}
NO_EXPERTS = {"num_local_experts": 0, "num_experts_per_tok": 0}
ODD_MAMBA = {
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
    "time_step_limit": [0.3, 0.9],
}
FALCON_H1 = MAMBA | {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 64,
    "num_key_value_heads": 4,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.6,
    "attention_out_multiplier": 0.7,
    "ssm_out_multiplier": 1.3,
    "ssm_multipliers": [0.7, 1.2, 0.9, 1.4, 0.8],
    "mlp_multipliers": [1.5, 0.6],
}
NEMOTRON_H = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
    # It bounds prompts' steps in transformers 5.17, see docs/design/linear-attention.md.
    "time_step_min": 1e-9,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 2.5,
}
SMALL_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip
CONVOLUTIONS = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_multiple_of": 16,
    "tie_word_embeddings": True,
}
OF_LFM_2_MOE = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "conv", "full_attention"],
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
# As large as the values' the keys are: transformers writes the three convolutions as equal parts.
OLMO = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
KIMI = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "linear_num_heads": 2,
    "linear_head_dim": 24,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
JAMBA = {
    "num_hidden_layers": 5,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_dt_rank": 20,
}

QWEN_3_5 = Case(name="qwen3_5", config="Qwen3_5TextConfig", fields=STATE)
CASES: tuple[Case, ...] = (
    Case(
        name="bamba",
        config="BambaConfig",
        fields=MAMBA | {"attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True},
    ),
    Case(
        name="granite4",
        config="GraniteMoeHybridConfig",
        fields=GRANITE_4 | {"num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    Case(
        name="granite4, a state in the last layer",
        config="GraniteMoeHybridConfig",
        fields=GRANITE_4 | NO_EXPERTS | ODD_MAMBA | {"layer_types": LAST_IS_LINEAR},
        can_be_cached=False,  # it bounds the steps of prompts alone
    ),
    Case(
        name="granite4 without states",
        config="GraniteMoeHybridConfig",
        fields=GRANITE_4 | NO_EXPERTS | {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"},
    ),
    Case(
        name="falcon_h1",
        config="FalconH1Config",
        fields=FALCON_H1 | {"attention_in_multiplier": 1.3, "ssm_in_multiplier": 0.8},
    ),
    Case(
        name="falcon_h1, normed before the gate",
        config="FalconH1Config",
        fields=FALCON_H1 | {"mamba_rms_norm": True, "attention_bias": True, "projectors_bias": True},
    ),
    Case(
        name="falcon_h1, normed behind the gate",
        config="FalconH1Config",
        fields=MAMBA
        | {"mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True},
    ),
    Case(
        name="nemotron_h",
        config="NemotronHConfig",
        fields=NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"]},
    ),
    Case(
        name="nemotron_h, a state in the last mixer",
        config="NemotronHConfig",
        fields=NEMOTRON_H
        | {
            "layers_block_type": ["mlp", "full_attention", "linear_attention", "moe", "linear_attention", "moe"],
            "num_key_value_heads": 4,
            "moe_latent_size": 32,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "time_step_min": 0.3,
            "time_step_limit": [0.3, float("inf")],
        },
        can_be_cached=False,
    ),
    Case(name="jamba", config="JambaConfig", fields=JAMBA),
    Case(
        name="jamba, without experts",
        config="JambaConfig",
        fields=JAMBA
        | {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "num_experts": 1,
            "mamba_dt_rank": "auto",
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_expand": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    QWEN_3_5,
    Case(
        name="qwen3_5 of a checkpoint with vision",
        config="Qwen3_5TextConfig",
        fields=STATE | {"tie_word_embeddings": True, "attention_bias": True},
        text_in="Qwen3_5Config",
        outer={"tie_word_embeddings": True, "vision_config": SMALL_VISION},
    ),
    Case(name="qwen3_5_moe", config="Qwen3_5MoeTextConfig", fields=STATE | EXPERTS),
    Case(
        name="qwen3_5_moe of a checkpoint with vision",
        config="Qwen3_5MoeTextConfig",
        fields=STATE | EXPERTS,
        text_in="Qwen3_5MoeConfig",
        outer={"vision_config": SMALL_VISION},
    ),
    Case(name="lfm2", config="Lfm2Config", fields=CONVOLUTIONS),
    Case(
        name="lfm2, with biases",
        config="Lfm2Config",
        fields={"full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    Case(name="lfm2_moe", config="Lfm2MoeConfig", fields=OF_LFM_2_MOE),
    Case(
        name="lfm2_moe, not corrected",
        config="Lfm2MoeConfig",
        fields=OF_LFM_2_MOE | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
    Case(name="olmo_hybrid", config="OlmoHybridConfig", fields=OLMO | {"rope_parameters": {"rope_theta": None}}),
    Case(
        name="olmo_hybrid, rotated, weaker",
        config="OlmoHybridConfig",
        fields=OLMO | {"num_hidden_layers": 3, "linear_allow_neg_eigval": False, "attention_bias": True},
    ),
    Case(name="kimi_linear", config="KimiLinearConfig", fields=KIMI),
    Case(
        name="kimi_linear, queries through fewer features",
        config="KimiLinearConfig",
        fields=KIMI
        | {"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]}
        | {
            "q_lora_rank": 24,
            "n_group": 2,
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    Case(name="qwen3_next", config="Qwen3NextConfig", fields=STATE | EXPERTS),
    Case(name="qwen3_next, a state in the last layer", config="Qwen3NextConfig", fields=STATE | EXPERTS | MIXED),
)
