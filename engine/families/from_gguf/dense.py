"""Dense models close to Llama, and Mixtral, which files call Llama."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.from_gguf.entries import Config, Entries
from engine.families.from_gguf.shared import biases, common, full_attention, head_dim, rope, windows_by_layer

_WITH_ONE_SWITCH = "Ernie4_5ForCausalLM"
_LAYERS_TO_NO_ROPE_OF_SMOLLM3 = 4


def _llama(entries: Entries) -> Config:
    config = common(entries, "LlamaForCausalLM") | rope(entries) | {"head_dim": head_dim(entries)}
    if experts := entries.get("expert_count"):
        config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": experts}
        return config | {"num_experts_per_tok": entries["expert_used_count"]}
    return config | biases(entries)


def _smollm_3(entries: Entries) -> Config:
    """Every fourth layer has no rotation. Later files may say which step that is."""
    config = common(entries, "SmolLM3ForCausalLM") | rope(entries) | biases(entries)
    return config | {"no_rope_layer_interval": _LAYERS_TO_NO_ROPE_OF_SMOLLM3, "use_sliding_window": False}


def _olmo_2(entries: Entries) -> Config:
    """Norms stand behind both halves; OLMo 3 has windows too."""
    config = common(entries, "Olmo2ForCausalLM", norm="post_attention_norm") | rope(entries)
    config |= {"attention_bias": entries.has("blk.0.attn_q.bias")}
    window = entries.get("attention.sliding_window")
    if not window:
        return config
    windowed = entries.of_layers("attention.sliding_window_pattern")
    full, theta = config.pop("rope_parameters"), float(entries.get("rope.freq_base", 10_000.0))
    sliding = {"rope_type": "default", "rope_theta": float(entries.get("rope.freq_base_swa", theta))}
    return config | {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": ["sliding_attention" if there else "full_attention" for there in windowed],
        "rope_parameters": {"full_attention": {"rope_type": "default"} | full, "sliding_attention": sliding},
    }


def _qwen_2(entries: Entries) -> Config:
    return common(entries, "Qwen2ForCausalLM") | rope(entries) | full_attention(entries)


def _qwen_3(entries: Entries) -> Config:
    own = {"head_dim": head_dim(entries), "attention_bias": entries.has("blk.0.attn_q.bias")}
    return common(entries, "Qwen3ForCausalLM") | rope(entries) | own | full_attention(entries)


def _phi_3(entries: Entries) -> Config:
    config = common(entries, "Phi3ForCausalLM") | rope(entries)
    config["sliding_window"] = entries.get("attention.sliding_window") or None
    if original := entries.get("rope.scaling.original_context_length"):
        config["original_max_position_embeddings"] = original
    return config


def _close_to_llama(architecture: str) -> Callable[[Entries], Config]:
    """Heads of a size of their own, and the biases that tensors tell."""

    def read(entries: Entries) -> Config:
        config = common(entries, architecture) | rope(entries) | {"head_dim": head_dim(entries)}
        found = biases(entries)
        return config | ({"use_bias": found["mlp_bias"]} if architecture == _WITH_ONE_SWITCH else found)

    return read


def _seed_oss(entries: Entries) -> Config:
    own = {"head_dim": head_dim(entries), "attention_out_bias": entries.has("blk.0.attn_output.bias")}
    return common(entries, "SeedOssForCausalLM") | rope(entries) | biases(entries) | own


def _exaone_4(entries: Entries) -> Config:
    """Norms stand behind both halves; the small model has no windows."""
    config = common(entries, "Exaone4ForCausalLM", norm="post_attention_norm") | rope(entries)
    config |= {"head_dim": head_dim(entries)}
    if entries.get("attention.sliding_window"):
        return config | windows_by_layer(entries)
    return config | {"sliding_window": None, "layer_types": ["full_attention"] * entries.num_layers}


def _mistral_3(entries: Entries) -> Config:
    """Ministral 3, whose queries grow with the position, and the text part of models that see."""
    config = common(entries, "MistralForCausalLM") | rope(entries) | {"head_dim": head_dim(entries)}
    config |= {"sliding_window": None}
    growth = entries.get("attention.temperature_scale")
    if growth is None:
        return config
    config["rope_parameters"]["llama_4_scaling_beta"] = growth
    return config | {"architectures": ["Ministral3ForCausalLM"]}


DENSE: dict[str, Callable[[Entries], Config]] = {
    "llama": _llama,
    "smollm3": _smollm_3,
    "olmo2": _olmo_2,
    "qwen2": _qwen_2,
    "qwen2vl": _qwen_2,
    "qwen3": _qwen_3,
    "qwen3vl": _qwen_3,
    "phi3": _phi_3,
    "mistral3": _mistral_3,
    "seed_oss": _seed_oss,
    "exaone4": _exaone_4,
    "arcee": _close_to_llama("ArceeForCausalLM"),
    "ernie4_5": _close_to_llama("Ernie4_5ForCausalLM"),
    "glm4": _close_to_llama("Glm4ForCausalLM"),
    "hunyuan-dense": _close_to_llama("HunYuanDenseV1ForCausalLM"),
}
