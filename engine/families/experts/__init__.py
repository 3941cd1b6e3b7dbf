"""Families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.experts import (
    cohere,
    ernie4_5_moe,
    glm4_moe,
    granite_moe,
    hunyuan,
    like_deepseek,
    ling,
    llama4,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from engine.families.experts.with_latents import close_to_deepseek, deepseek, deepseek_sparse, longcat
from engine.families.experts.with_sinks import gpt_oss, mimo
from engine.families.fields import Fields
from engine.spec.model import ModelSpec

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "AfmoeForCausalLM": like_deepseek.read_trinity,
    "AXK1ForCausalLM": close_to_deepseek.read_axk,
    "BailingMoeV2ForCausalLM": ling.read,
    "Cohere2MoeForCausalLM": cohere.read,
    "DeepseekV2ForCausalLM": deepseek.read_v2,
    "DeepseekV3ForCausalLM": deepseek.read_v3,
    "DeepseekV32ForCausalLM": deepseek_sparse.read_deepseek,
    "Glm4MoeLiteForCausalLM": deepseek.read_glm,
    "Dots1ForCausalLM": like_deepseek.read_dots,
    "ExaoneMoeForCausalLM": like_deepseek.read_exaone,
    "FlexOlmoForCausalLM": olmoe.read_flex,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe.read,
    "Glm4MoeForCausalLM": glm4_moe.read,
    "GlmMoeDsaForCausalLM": deepseek_sparse.read_glm,
    "GptOssForCausalLM": gpt_oss.read,
    "GraniteMoeForCausalLM": granite_moe.read,
    "GraniteMoeSharedForCausalLM": granite_moe.read,
    "GraniteMoeSWAForCausalLM": granite_moe.read_swa,
    "HunYuanMoEV1ForCausalLM": hunyuan.read,
    "HYV3ForCausalLM": hunyuan.read_3,
    "LagunaForCausalLM": like_deepseek.read_laguna,
    "LongcatFlashForCausalLM": longcat.read,
    "MellumForCausalLM": qwen3_moe.read_mellum,
    "SolarOpenForCausalLM": glm4_moe.read_solar,
    "YoutuForCausalLM": deepseek.read_youtu,
    "Llama4ForCausalLM": llama4.read,
    "Llama4ForConditionalGeneration": llama4.read_with_vision,
    "MiMoV2FlashForCausalLM": mimo.read,
    "MiniMaxM2ForCausalLM": minimax_m2.read,
    "Mistral4ForCausalLM": close_to_deepseek.read_mistral,
    "MixtralForCausalLM": mixtral.read,
    "OlmoeForCausalLM": olmoe.read,
    "PhimoeForCausalLM": phimoe.read,
    "PhiMoEForCausalLM": phimoe.read,
    "Qwen2MoeForCausalLM": qwen2_moe.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
}
