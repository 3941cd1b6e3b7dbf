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

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0],
}
LONGROPE_3 = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 9.0],
    "original_max_position_embeddings": 512,
}
MINICPM_3 = {
    "tie_word_embeddings": True,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "num_key_value_heads": 4,
    "scale_emb": 6,
    "scale_depth": 1.1,
    "dim_model_base": 40,
}
NEVER_LONG = {"max_position_embeddings": 512, "original_max_position_embeddings": 256}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "num_hidden_layers": 3}
GEMMA_3 = GEMMA | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA_4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 512,
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
GEMMA_3N = {
    "head_dim": 16,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 512,
    "tie_word_embeddings": True,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
    "num_kv_shared_layers": 3,
    "sliding_window": 20,
    "laurel_rank": 8,
}
BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
}
MULTIPLIED = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
TWO_KINDS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
NO_VISION = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
}

CASES = (
    Case(name="llama", config="LlamaConfig", fields={"attention_bias": True, "mlp_bias": True}),
    Case(name="llama3", config="LlamaConfig", fields={"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    Case(name="llama-yarn", config="LlamaConfig", fields={"rope_parameters": YARN, "head_dim": 32}),
    Case(
        name="llama-linear",
        config="LlamaConfig",
        fields={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    Case(
        name="llama-dynamic",
        config="LlamaConfig",
        fields={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    Case(name="mistral", config="MistralConfig", fields={"sliding_window": 24}),
    Case(
        name="ministral",
        config="MinistralConfig",
        fields=TWO_KINDS | {"head_dim": 16},
    ),
    Case(
        name="ministral3",
        config="Ministral3Config",
        fields={
            "head_dim": 32,
            "rope_parameters": YARN
            | {
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    Case(
        name="mistral3-vision",
        config="MistralConfig",
        fields={"head_dim": 32, "sliding_window": None},
        text_in="Mistral3Config",
        outer=NO_VISION,
    ),
    Case(name="qwen2", config="Qwen2Config", fields={"tie_word_embeddings": True}),
    Case(name="qwen3", config="Qwen3Config", fields={"head_dim": 32}),
    Case(name="arcee", config="ArceeConfig", fields={"head_dim": 16, "mlp_bias": True}),
    Case(
        name="ernie4_5", config="Ernie4_5Config", fields={"head_dim": 32, "use_bias": True, "tie_word_embeddings": True}
    ),
    Case(name="seed_oss", config="SeedOssConfig", fields={"head_dim": 32, "attention_out_bias": True}),
    Case(name="smollm3", config="SmolLM3Config", fields={"no_rope_layers": [1, 0]}),
    Case(name="cohere", config="CohereConfig", fields={"tie_word_embeddings": True, "logit_scale": 0.3}),
    Case(name="cohere-plus", config="CohereConfig", fields={"tie_word_embeddings": True, "use_qk_norm": True}),
    Case(name="cohere2", config="Cohere2Config", fields=TWO_KINDS | {"tie_word_embeddings": True, "logit_scale": 0.3}),
    Case(name="exaone4", config="Exaone4Config", fields=TWO_KINDS),
    Case(name="gemma", config="GemmaConfig", fields={"head_dim": 32, "tie_word_embeddings": True}),
    Case(
        name="gemma2",
        config="Gemma2Config",
        fields=GEMMA
        | {"sliding_window": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention_bias": True},
    ),
    Case(
        name="gemma3",
        config="Gemma3TextConfig",
        fields=GEMMA_3 | {"rope_parameters": BY_KIND, "final_logit_softcapping": 3.0},
    ),
    Case(
        name="gemma3-vision",
        config="Gemma3TextConfig",
        fields=GEMMA_3,
        text_in="Gemma3Config",
        outer=NO_VISION,
    ),
    Case(name="gemma4", config="Gemma4TextConfig", fields=GEMMA_4 | {"final_logit_softcapping": 3.0}),
    Case(
        name="gemma4-vision",
        config="Gemma4TextConfig",
        fields=GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        text_in="Gemma4Config",
        outer={"vision_config": None, "audio_config": None},
    ),
    Case(
        name="gemma4-experts",
        config="Gemma4TextConfig",
        fields=GEMMA_4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40},
    ),
    Case(
        name="gemma4-small",
        config="Gemma4TextConfig",
        fields=GEMMA_4
        | {
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
            "hidden_size_per_layer_input": 24,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    Case(
        name="gemma3n",
        config="Gemma3nTextConfig",
        fields=GEMMA_3N
        | {
            "intermediate_size": [96, 64] * 3 + [80],
            "activation_sparsity_pattern": [0.9, 0.5, 0.9] + [0.0] * 4,
            "final_logit_softcapping": 3.0,
        },
    ),
    Case(
        name="gemma3n, other streams",
        config="Gemma3nTextConfig",
        fields=GEMMA_3N
        | {
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "attention_bias": True,
            "rope_parameters": BY_KIND,
        },
    ),
    Case(
        name="gemma3n beside vision",
        config="Gemma3nTextConfig",
        fields=GEMMA_3N | {"vocab_size_per_layer_input": 470, "head_dim": 32},
        text_in="Gemma3nConfig",
        outer={
            "vision_config": {"hidden_size": 16, "vocab_size": 40, "vocab_offset": 470},
            "audio_config": {
                "hidden_size": 20,
                "vocab_size": 16,
                "vocab_offset": 500,
                "conf_num_hidden_layers": 1,
                "conf_num_attention_heads": 2,
                "sscp_conv_channel_size": [4, 4],
            },
        },
    ),
    Case(name="glm", config="GlmConfig", fields={"head_dim": 32}),
    Case(name="glm4", config="Glm4Config", fields={"head_dim": 32}),
    Case(name="granite", config="GraniteConfig", fields=MULTIPLIED | {"mlp_bias": True}),
    Case(name="hunyuan", config="HunYuanDenseV1Config", fields={"head_dim": 32}),
    Case(name="minicpm3", config="MiniCPM3Config", fields=MINICPM_3 | {"attention_bias": True, "mlp_bias": True}),
    Case(
        name="minicpm3, longrope",
        config="MiniCPM3Config",
        fields=MINICPM_3 | {"q_lora_rank": None, "v_head_dim": 24, "rope_parameters": LONGROPE_3 | {"factor": 1.0}},
    ),
    Case(
        name="minicpm3, long",
        config="MiniCPM3Config",
        fields=MINICPM_3 | {"rope_parameters": LONGROPE_3 | {"original_max_position_embeddings": 16, "factor": 32.0}},
        shortest=17,
    ),
    Case(name="olmo2", config="Olmo2Config", fields={"attention_bias": True}),
    Case(name="olmo3", config="Olmo3Config", fields=TWO_KINDS | {"rope_parameters": BY_KIND}),
    Case(name="phi", config="PhiConfig", fields={"partial_rotary_factor": 0.5}),
    Case(name="phi3", config="Phi3Config", fields={"sliding_window": 40}),
    Case(
        name="phi3-long",
        config="Phi3Config",
        fields={"original_max_position_embeddings": 16, "partial_rotary_factor": 0.75, "rope_parameters": LONGROPE},
        shortest=17,
    ),
    Case(
        name="phi3-short",
        config="Phi3Config",
        fields=NEVER_LONG | {"partial_rotary_factor": 0.75, "rope_parameters": LONGROPE},
        max_model_len=256,
    ),
    Case(name="starcoder2", config="Starcoder2Config", fields={"sliding_window": 24, "tie_word_embeddings": True}),
    Case(name="cwm", config="CwmConfig", fields=TWO_KINDS | {"head_dim": 16, "rope_parameters": LLAMA3}),
    Case(name="helium", config="HeliumConfig", fields={"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    Case(
        name="hyperclovax",
        config="HyperCLOVAXConfig",
        fields=MULTIPLIED | {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    Case(
        name="granite_swa",
        config="GraniteSWAConfig",
        fields=MULTIPLIED | TWO_KINDS | {"layer_rope_theta": [1000.0, 0], "mlp_bias": True},
    ),
    Case(name="vaultgemma", config="VaultGemmaConfig", fields=GEMMA | {"sliding_window": 20, "num_hidden_layers": 2}),
    Case(name="jais2", config="Jais2Config", fields={"head_dim": 16}),
    Case(
        name="gemma4-unified",
        config="Gemma4UnifiedTextConfig",
        fields={**GEMMA_4, "hidden_size_per_layer_input": None, "vocab_size_per_layer_input": None},
    ),
    Case(name="apertus", config="ApertusConfig", fields={"attention_bias": True, "rope_parameters": LLAMA3}),
    Case(name="nanochat", config="NanoChatConfig", fields={"final_logit_softcapping": 3.0, "attention_bias": True}),
    Case(
        name="nemotron",
        config="NemotronConfig",
        fields={"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    Case(name="stablelm", config="StableLmConfig", fields={"use_qkv_bias": True}),
    Case(name="stablelm-12b", config="StableLmConfig", fields={"use_parallel_residual": True, "qk_layernorm": True}),
    Case(name="olmo", config="OlmoConfig", fields={"clip_qkv": 0.7}),
)
