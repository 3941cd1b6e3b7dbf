"""Families with latent attention and, but for one, experts."""

from __future__ import annotations

from typing import Any

from tests.unit.engine.families.case import Case
from tests.unit.engine.families.dense import YARN

GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
# Heads enough that no score is 0 by chance: transformers does not say which of equal scores it chooses.
INDEXER: dict[str, Any] = {"q_lora_rank": 24, "index_topk": 8, "index_head_dim": 24, "index_n_heads": 12}
TWO_MAGNITUDES = YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32}
LONGCAT: dict[str, Any] = {
    **LATENT,
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 40,
    "q_lora_rank": 24,
    "head_dim": 16,
    "n_routed_experts": 6,
    "zero_expert_num": 4,
    "moe_topk": 4,
    "routed_scaling_factor": 1.5,
}

CASES: tuple[Case, ...] = (
    Case(
        name="deepseek_v2",
        config="DeepseekV2Config",
        fields={
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
        },
    ),
    Case(
        name="glm4_moe_lite",
        config="Glm4MoeLiteConfig",
        fields={**LATENT, **GROUPED, "q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    Case(
        name="deepseek_v3",
        config="DeepseekV3Config",
        fields={**LATENT, **GROUPED, "q_lora_rank": 24, "rope_parameters": TWO_MAGNITUDES},
    ),
    Case(
        name="deepseek_v32",
        config="DeepseekV32Config",
        fields={**LATENT, **GROUPED, **INDEXER, "rope_parameters": TWO_MAGNITUDES},
    ),
    Case(
        name="deepseek_v32, most contexts attended to whole",
        config="DeepseekV32Config",
        fields={**LATENT, **GROUPED, **INDEXER, "index_topk": 40},
    ),
    Case(
        name="glm_moe_dsa",
        config="GlmMoeDsaConfig",
        fields={
            **LATENT,
            **GROUPED,
            **INDEXER,
            "num_hidden_layers": 4,
            "index_head_dim": 16,  # as many as are rotated
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    # With a padding id transformers zeroes that row of the table as it loads it.
    Case(name="youtu", config="YoutuConfig", fields={**LATENT, "q_lora_rank": 24, "pad_token_id": None}),
    Case(
        name="mistral4",
        config="Mistral4Config",
        fields={
            **LATENT,
            **GROUPED,
            "q_lora_rank": 24,
            "rope_parameters": TWO_MAGNITUDES | {"llama_4_scaling_beta": 0.3, "partial_rotary_factor": 0.4},
        },
    ),
    Case(name="axk1", config="AXK1Config", fields={**LATENT, **GROUPED, "q_lora_rank": 24}),
    Case(name="longcat_flash", config="LongcatFlashConfig", fields=LONGCAT),
    Case(
        name="longcat_flash, no expert does nothing",
        config="LongcatFlashConfig",
        fields=LONGCAT | {"zero_expert_num": 0},
    ),
)
