"""Dense families."""

from __future__ import annotations

from tests.unit.engine.families.case import Case

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES = (
    Case(name="llama", config="LlamaConfig", fields={"attention_bias": True, "mlp_bias": True}),
    Case(name="llama3", config="LlamaConfig", fields={"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    Case(name="mistral", config="MistralConfig", fields={"sliding_window": 24}),
    Case(name="qwen2", config="Qwen2Config", fields={"tie_word_embeddings": True}),
    Case(name="qwen3", config="Qwen3Config", fields={"head_dim": 32}),
)
