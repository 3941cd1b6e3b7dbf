"""Text models of other families in checkpoints that see, too."""

from __future__ import annotations

from tests.unit.engine.families import wrapped
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.experts import EXPERTS
from tests.unit.engine.families.latents import GROUPED, LATENT, TWO_MAGNITUDES
from tests.unit.engine.families.wrapped import HEARING, TOWER

SMALL_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
MROPE = {"rope_type": "default", "rope_theta": 5e6}
OF_QWEN = MROPE | {"mrope_section": [6, 5, 5]}
OF_GLM = MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
GLM_VISION = SMALL_VISION | {"attention_bias": False, "patch_size": 8, "image_size": 16}

CASES: tuple[Case, ...] = (
    *wrapped.CASES,
    Case(
        name="qwen2_5_vl",
        config="Qwen2_5_VLTextConfig",
        fields={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        text_in="Qwen2_5_VLConfig",
        outer={
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 64,
            }
        },
    ),
    Case(
        name="qwen2_vl",
        config="Qwen2VLTextConfig",
        fields={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        text_in="Qwen2VLConfig",
        outer={"vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64}},
    ),
    Case(
        name="qwen3_vl",
        config="Qwen3VLTextConfig",
        fields={
            "head_dim": 32,
            "rope_parameters": OF_QWEN,
        },
        text_in="Qwen3VLConfig",
        outer={"vision_config": SMALL_VISION},
    ),
    Case(
        name="qwen3_vl_moe",
        config="Qwen3VLMoeTextConfig",
        fields={
            **EXPERTS,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "rope_parameters": OF_QWEN,
        },
        text_in="Qwen3VLMoeConfig",
        outer={"vision_config": SMALL_VISION},
    ),
    Case(
        name="mistral4-vision",
        config="Mistral4Config",
        fields={
            **LATENT,
            **GROUPED,
            "q_lora_rank": 24,
            "rope_parameters": TWO_MAGNITUDES | {"llama_4_scaling_beta": 0.3},
        },
        text_in="Mistral3Config",
        outer={"vision_config": TOWER},
        is_long=True,
    ),
    Case(
        name="muse_glimmer",
        config="MuseGlimmerTextConfig",
        fields={
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [10_000.0, 0, 10_000.0],
            "final_logit_softcapping": 3.0,
            "output_multiplier": 0.4,
            "qk_scale_factor": 1.5,
            "post_norm_eps": 0.1,
        },
        text_in="MuseGlimmerConfig",
        outer={"vision_config": TOWER | {"layer_types": ["full_attention"]}, "out_hidden_size": 64},
    ),
    Case(
        name="phi4_multimodal",
        config="Phi4MultimodalConfig",
        fields={
            "vision_config": TOWER | {"crop_size": 28, "feature_layer": -1},
            "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2}
            | {"ext_pw_out_channel": 16, "nemo_conv_channels": 16},
        },
        is_long=True,
    ),
    Case(
        name="qwen2_5_omni",
        config="Qwen2_5OmniTextConfig",
        fields={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        text_in="Qwen2_5OmniThinkerConfig",
        outer={"vision_config": SMALL_VISION, "audio_config": HEARING, "vision_start_token_id": 7},
    ),
    Case(
        name="qwen3_omni",
        config="Qwen3OmniMoeTextConfig",
        fields={**EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        text_in="Qwen3OmniMoeThinkerConfig",
        outer={"vision_config": SMALL_VISION, "audio_config": HEARING, "vision_start_token_id": 7},
    ),
    Case(
        name="glm4v",
        config="Glm4vTextConfig",
        fields={"rope_parameters": OF_GLM},
        text_in="Glm4vConfig",
        outer={"vision_config": GLM_VISION},
    ),
    Case(
        name="glm4v_moe",
        config="Glm4vMoeTextConfig",
        fields={
            **GROUPED,
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": OF_GLM,
        },
        text_in="Glm4vMoeConfig",
        outer={"vision_config": GLM_VISION},
    ),
    Case(
        name="glm46v",
        config="Glm4vTextConfig",
        fields={"rope_parameters": OF_GLM},
        text_in="Glm46VConfig",
        outer={"vision_config": GLM_VISION},
    ),
    Case(
        name="kimi_k25",
        config="DeepseekV3Config",
        fields={**LATENT, **GROUPED, "q_lora_rank": 24},
        text_in="Kimi_K25Config",
        outer={
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
        },
    ),
)
