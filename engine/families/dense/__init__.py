"""Dense families: each layer attends, then computes an MLP on each token."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.dense import (
    close_to_llama,
    cohere,
    exaone4,
    gemmas,
    glm,
    granite,
    granite_derived,
    hunyuan,
    layer_norms,
    llama,
    minicpm3,
    mistral,
    no_gate,
    olmo,
    phi,
    qwen2,
    qwen3,
)
from engine.families.known import Fields
from engine.spec.model import ModelSpec

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "ExaoneForCausalLM": close_to_llama.read_exaone,
    "InternLM3ForCausalLM": close_to_llama.read_internlm3,
    "MiMoForCausalLM": qwen2.read_mimo,
    "MiniCPMForCausalLM": minicpm3.read_like_llama,
    "LlamaForCausalLM": llama.read,
    "ArceeForCausalLM": close_to_llama.read_arcee,
    "CwmForCausalLM": close_to_llama.read_cwm,
    "Ernie4_5ForCausalLM": close_to_llama.read_ernie,
    "HeliumForCausalLM": close_to_llama.read_helium,
    "SeedOssForCausalLM": close_to_llama.read_seed_oss,
    "SmolLM3ForCausalLM": close_to_llama.read_smollm3,
    "CohereForCausalLM": cohere.read,
    "Cohere2ForCausalLM": cohere.read_2,
    "Exaone4ForCausalLM": exaone4.read,
    **gemmas.FAMILIES,
    "GlmForCausalLM": glm.read,
    "Glm4ForCausalLM": glm.read_4,
    "GraniteForCausalLM": granite.read,
    "GraniteSWAForCausalLM": granite_derived.read_swa,
    "HyperCLOVAXForCausalLM": granite_derived.read_hyperclova_x,
    "HunYuanDenseV1ForCausalLM": hunyuan.read,
    "MiniCPM3ForCausalLM": minicpm3.read,
    "MistralForCausalLM": mistral.read,
    "MinistralForCausalLM": mistral.read_by_layer,
    "Ministral3ForCausalLM": mistral.read_3,
    "ApertusForCausalLM": no_gate.read_apertus,
    "NanoChatForCausalLM": no_gate.read_nanochat,
    "NemotronForCausalLM": layer_norms.read_nemotron,
    "StableLmForCausalLM": layer_norms.read_stablelm,
    "OlmoForCausalLM": olmo.read,
    "Olmo2ForCausalLM": olmo.read_2,
    "Olmo3ForCausalLM": olmo.read_3,
    "PhiForCausalLM": phi.read,
    "Phi3ForCausalLM": phi.read_3,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Starcoder2ForCausalLM": layer_norms.read_starcoder2,
    "Jais2ForCausalLM": layer_norms.read_jais2,
}
