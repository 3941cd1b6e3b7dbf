"""Families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

from engine.model.families.experts import (
    deepseek,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granite_moe,
    llama4,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from engine.model.families.fields import Fields
from engine.model.spec import ModelSpec

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "DeepseekV2ForCausalLM": deepseek.read_v2,
    "DeepseekV3ForCausalLM": deepseek.read_v3,
    "Glm4MoeLiteForCausalLM": deepseek.read_glm,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe.read,
    "Glm4MoeForCausalLM": glm4_moe.read,
    "GptOssForCausalLM": gpt_oss.read,
    "GraniteMoeForCausalLM": granite_moe.read,
    "GraniteMoeSharedForCausalLM": granite_moe.read,
    "Llama4ForCausalLM": llama4.read,
    "Llama4ForConditionalGeneration": llama4.read_with_vision,
    "MiniMaxM2ForCausalLM": minimax_m2.read,
    "MixtralForCausalLM": mixtral.read,
    "OlmoeForCausalLM": olmoe.read,
    "Qwen2MoeForCausalLM": qwen2_moe.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
}
