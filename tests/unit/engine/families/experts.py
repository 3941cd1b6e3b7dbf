"""Families with a mixture of experts."""

from __future__ import annotations

from typing import Any

from tests.unit.engine.families import latents
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.dense import BY_KIND, LONGROPE
from tests.unit.engine.families.latents import GROUPED

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
LLAMA_4 = {"num_local_experts": 4, "intermediate_size": 40, "intermediate_size_mlp": 72, "head_dim": 16}
COHERE_2: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "num_shared_experts": 2,
    "head_dim": 16,
    "logit_scale": 0.3,
    "sliding_window": 20,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "prefix_dense_intermediate_size": 72,
}
MULTIPLIED: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "intermediate_size": 40,
}

LAGUNA: dict[str, Any] = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_attention_heads_per_layer": [4, 8, 4],
    "shared_expert_intermediate_size": 48,
    "moe_routed_scaling_factor": 2.5,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    },
}

MIMO = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 20,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}

CASES: tuple[Case, ...] = (
    *latents.CASES,
    Case(
        name="qwen3_moe",
        config="Qwen3MoeConfig",
        fields={
            **EXPERTS,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    Case(
        name="qwen2_moe",
        config="Qwen2MoeConfig",
        fields={**EXPERTS, "shared_expert_intermediate_size": 48, "num_hidden_layers": 3, "decoder_sparse_step": 2},
    ),
    Case(
        name="mixtral",
        config="MixtralConfig",
        fields={"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    Case(
        name="olmoe",
        config="OlmoeConfig",
        fields={"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40, "num_key_value_heads": 4},
    ),
    Case(
        name="granitemoe",
        config="GraniteMoeConfig",
        fields={**MULTIPLIED, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    Case(
        name="granitemoeshared",
        config="GraniteMoeSharedConfig",
        fields={**MULTIPLIED, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    Case(
        name="glm4_moe",
        config="Glm4MoeConfig",
        fields={**GROUPED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True},
    ),
    Case(
        name="minimax_m2",
        config="MiniMaxM2Config",
        fields={
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    Case(name="mimo_v2_flash", config="MiMoV2FlashConfig", fields=MIMO),
    Case(
        name="mimo_v2_flash, other ropes",
        config="MiMoV2FlashConfig",
        fields=MIMO
        | {
            "attention_value_scale": None,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    Case(
        name="ernie4_5_moe",
        config="Ernie4_5_MoeConfig",
        fields={
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 3,
            "moe_layer_start_index": 1,
        },
    ),
    Case(
        name="gpt_oss",
        config="GptOssConfig",
        fields={
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "head_dim": 16,
            "sliding_window": 24,
        },
    ),
    Case(
        name="llama4",
        config="Llama4TextConfig",
        fields={**LLAMA_4, "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "floor_scale": 8},
    ),
    Case(
        name="llama4-chunks",
        config="Llama4TextConfig",
        fields={**LLAMA_4, "num_hidden_layers": 4, "attention_chunk_size": 20, "no_rope_layers": [1, 0, 1, 1]},
    ),
    Case(
        name="llama4-vision",
        config="Llama4TextConfig",
        fields=LLAMA_4,
        text_in="Llama4Config",
        outer={
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            }
        },
    ),
    Case(name="laguna", config="LagunaConfig", fields=LAGUNA),
    Case(
        name="laguna, gates of numbers",
        config="LagunaConfig",
        fields={**LAGUNA, "gating": "per-element", "rope_parameters": None},
    ),
    Case(
        name="exaone_moe",
        config="ExaoneMoeConfig",
        fields={
            **EXPERTS,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Case(
        name="dots1",
        config="Dots1Config",
        fields={**GROUPED, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4, "attention_bias": True},
    ),
    Case(
        name="solar_open",
        config="SolarOpenConfig",
        fields={**GROUPED, "head_dim": 16, "attention_bias": True, "num_hidden_layers": 2, "first_k_dense_replace": 0},
    ),
    Case(
        name="hunyuan_v1_moe",
        config="HunYuanMoEV1Config",
        fields={"num_experts": 6, "moe_topk": 3, "intermediate_size": 40, "head_dim": 16},
    ),
    Case(
        name="hy_v3",
        config="HYV3Config",
        fields={**EXPERTS, "head_dim": 16, "attention_bias": True, "num_shared_experts": 2},
    ),
    Case(
        name="flex_olmo",
        config="FlexOlmoConfig",
        fields={"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40},
    ),
    Case(
        name="mellum",
        config="MellumConfig",
        fields={
            **EXPERTS,
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": BY_KIND,
        },
    ),
    Case(
        name="granitemoe_swa",
        config="GraniteMoeSWAConfig",
        fields={
            **MULTIPLIED,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [0, 1000.0],
        },
    ),
    Case(name="cohere2_moe", config="Cohere2MoeConfig", fields=COHERE_2),
    Case(
        name="cohere2_moe-sigmoid",
        config="Cohere2MoeConfig",
        fields={
            **COHERE_2,
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-5,
        },
    ),
    Case(
        name="phimoe",
        config="PhimoeConfig",
        fields={
            "num_local_experts": 8,
            "intermediate_size": 40,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.3,
            "sliding_window": 24,
        },
    ),
    Case(
        name="phimoe-short",
        config="PhimoeConfig",
        fields={
            "num_local_experts": 4,
            "intermediate_size": 40,
            "max_position_embeddings": 512,
            "rope_parameters": {
                **LONGROPE,
                "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 2.5, 3.0],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0, 9.0, 9.0],
                "short_mscale": 1.3,
                "long_mscale": 1.7,
                "original_max_position_embeddings": 256,
            },
        },
        max_model_len=256,
    ),
    Case(
        name="afmoe",
        config="AfmoeConfig",
        fields={
            **EXPERTS,
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "mup_enabled": True,
            "route_scale": 1.5,
        },
    ),
)
