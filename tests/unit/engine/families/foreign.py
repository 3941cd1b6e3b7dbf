"""Models that transformers computes over our cache: some without a family of ours, some with one."""

from __future__ import annotations

from typing import Any

from tests.unit.engine.families.case import Case

BY_TRANSFORMERS: Any = {"model_impl": "transformers"}
CASES: tuple[Case, ...] = (
    Case(name="by transformers: gpt_neox", config="GPTNeoXConfig"),
    Case(name="by transformers: nemotron", config="NemotronConfig", fields={"head_dim": 16}, **BY_TRANSFORMERS),
    Case(name="by transformers: helium", config="HeliumConfig", fields={"head_dim": 16}, **BY_TRANSFORMERS),
    Case(name="by transformers: stablelm", config="StableLmConfig", fields={"use_qkv_bias": True}, **BY_TRANSFORMERS),
    Case(
        name="by transformers: qwen3_moe",
        config="Qwen3MoeConfig",
        fields={"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        **BY_TRANSFORMERS,
    ),
    Case(name="by transformers: apertus", config="ApertusConfig", **BY_TRANSFORMERS),
    Case(
        name="by transformers: gemma2",
        config="Gemma2Config",
        fields={"head_dim": 32, "sliding_window": 20, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True},
        **BY_TRANSFORMERS,
    ),
)
