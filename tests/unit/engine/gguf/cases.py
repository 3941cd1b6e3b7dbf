"""Checkpoints that are compared with the files that llama.cpp's converter makes of them."""

from __future__ import annotations

from tests.unit.engine.families import dense, experts, hybrids, vision
from tests.unit.engine.families.case import Case

ONE_MAGNITUDE = dense.YARN | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
NO_LIMITS = hybrids.ODD_MAMBA | {"time_step_limit": None}
OF_V3 = next(case.fields for case in experts.CASES if case.name == "deepseek_v3")
# Its sizes are whole blocks of MXFP4 and Q8_0.
GPT_OSS = Case(
    name="gpt_oss",
    config="GptOssConfig",
    fields={
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
        "head_dim": 32,
        "sliding_window": 24,
    },
)
# What files can't say is left out of these: limits of Mamba's steps, and a second magnitude of yarn.
OWN: tuple[Case, ...] = (
    Case(
        name="ministral3, one magnitude",
        config="Ministral3Config",
        fields={"head_dim": 32, "rope_parameters": ONE_MAGNITUDE | {"llama_4_scaling_beta": 0.3}},
    ),
    Case(
        name="starcoder2, no window",
        config="Starcoder2Config",
        fields={"sliding_window": None, "tie_word_embeddings": True},
    ),
    Case(
        name="dots1, no windows",
        config="Dots1Config",
        fields={**experts.GROUPED, "attention_bias": False, "sliding_window": None},
    ),
    Case(
        name="exaone4, no windows",
        config="Exaone4Config",
        fields={"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    Case(
        name="cohere2, windows by default",
        config="Cohere2Config",
        fields={"num_hidden_layers": 5, "sliding_window": 20, "tie_word_embeddings": True, "logit_scale": 0.3},
    ),
    Case(
        name="llama4, as published",
        config="Llama4TextConfig",
        fields={**experts.LLAMA_4, "num_hidden_layers": 4, "interleave_moe_layer_step": 2},
    ),
    Case(
        name="afmoe, windows by default",
        config="AfmoeConfig",
        fields={**experts.EXPERTS, "head_dim": 16, "num_hidden_layers": 5, "sliding_window": 20, "mup_enabled": True},
    ),
    Case(name="phi, all heads", config="PhiConfig", fields={"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    Case(
        name="falcon_h1, no norm",
        config="FalconH1Config",
        fields=hybrids.FALCON_H1 | {"mamba_rms_norm": False, "head_dim": 16},
    ),
    Case(
        name="deepseek_v3, one magnitude",
        config="DeepseekV3Config",
        fields={**OF_V3, "rope_parameters": {**OF_V3["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    Case(
        name="granite4, odd states",
        config="GraniteMoeHybridConfig",
        fields=hybrids.GRANITE_4 | hybrids.NO_EXPERTS | NO_LIMITS | {"layer_types": hybrids.LAST_IS_LINEAR},
    ),
    Case(
        name="nemotron_h, experts of fewer features",
        config="NemotronHConfig",
        fields=hybrids.NEMOTRON_H
        | {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "moe_latent_size": 24},
    ),
)
# Rows of whole K blocks.
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
_STATE = next(case.fields for case in hybrids.CASES if case.name == "qwen3_5_moe")
WIDE: tuple[Case, ...] = (
    Case(
        name="qwen3_5_moe, wide",
        config="Qwen3_5MoeTextConfig",
        fields={
            **_STATE,
            **_WIDE,
            "head_dim": 64,
            "shared_expert_intermediate_size": 256,
            "linear_num_value_heads": 8,
            "linear_value_head_dim": 32,
        },
    ),
    Case(
        name="deepseek_v3, wide",
        config="DeepseekV3Config",
        fields={
            **OF_V3,
            **_WIDE,
            "kv_lora_rank": 256,
            "q_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "rope_parameters": {**OF_V3["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
)
CASES = {case.name: case for case in (*dense.CASES, *experts.CASES, *hybrids.CASES, *vision.CASES, *OWN, *WIDE)}
