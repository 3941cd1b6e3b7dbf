"""Families with a mixture of experts."""

from __future__ import annotations

from typing import Any

from tests.unit.engine.families.case import Case

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

CASES: tuple[Case, ...] = (
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
)
