"""Models that transformers computes over our cache: without a family of ours, and one with, for its windows and soft-caps."""

from __future__ import annotations

from tests.unit.engine.families.case import Case

CASES: tuple[Case, ...] = (
    Case(name="by transformers: nemotron", config="NemotronConfig", fields={"head_dim": 16}),
    Case(name="by transformers: helium", config="HeliumConfig", fields={"head_dim": 16}),
    Case(name="by transformers: stablelm", config="StableLmConfig", fields={"use_qkv_bias": True}),
    Case(name="by transformers: apertus", config="ApertusConfig"),
    Case(name="by transformers: gpt_neox", config="GPTNeoXConfig"),
    Case(
        name="by transformers: gemma2",
        config="Gemma2Config",
        fields={"head_dim": 32, "sliding_window": 20, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True},
        model_impl="transformers",
    ),
)
