"""Dense families: each layer attends, then computes an MLP on each token."""

from __future__ import annotations

from collections.abc import Callable

from engine.model.families.dense import (
    close_to_llama,
    cohere,
    exaone4,
    gemmas,
    glm,
    granite,
    hunyuan,
    llama,
    minicpm3,
    mistral,
    olmo,
    phi,
    qwen2,
    qwen3,
    qwen_vl,
    starcoder2,
)
from engine.model.families.known import Fields
from engine.model.spec import ModelSpec

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "LlamaForCausalLM": llama.read,
    "ArceeForCausalLM": close_to_llama.read_arcee,
    "Ernie4_5ForCausalLM": close_to_llama.read_ernie,
    "SeedOssForCausalLM": close_to_llama.read_seed_oss,
    "SmolLM3ForCausalLM": close_to_llama.read_smollm3,
    "CohereForCausalLM": cohere.read,
    "Cohere2ForCausalLM": cohere.read_2,
    "Exaone4ForCausalLM": exaone4.read,
    **gemmas.FAMILIES,
    "GlmForCausalLM": glm.read,
    "Glm4ForCausalLM": glm.read_4,
    "GraniteForCausalLM": granite.read,
    "HunYuanDenseV1ForCausalLM": hunyuan.read,
    "MiniCPM3ForCausalLM": minicpm3.read,
    "MistralForCausalLM": mistral.read,
    "MinistralForCausalLM": mistral.read_by_layer,
    "Ministral3ForCausalLM": mistral.read_3,
    "Mistral3ForConditionalGeneration": mistral.read_with_vision,
    "Olmo2ForCausalLM": olmo.read_2,
    "Olmo3ForCausalLM": olmo.read_3,
    "PhiForCausalLM": phi.read,
    "Phi3ForCausalLM": phi.read_3,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen2VLForConditionalGeneration": qwen_vl.read_2,
    "Qwen2_5_VLForConditionalGeneration": qwen_vl.read_2,
    "Qwen3VLForConditionalGeneration": qwen_vl.read_3,
    "Starcoder2ForCausalLM": starcoder2.read,
}
