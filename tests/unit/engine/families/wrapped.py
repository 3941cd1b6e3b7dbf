"""Checkpoints with towers beside a text model that another family computes as it is."""

from __future__ import annotations

from typing import Any

from tests.unit.engine.families.case import Case
from tests.unit.engine.families.experts import EXPERTS

TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
HEARING: dict[str, Any] = {
    "d_model": 16,
    "hidden_size": 16,
    "intermediate_size": 64,
    "encoder_attention_heads": 2,
    "num_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "encoder_layers": 1,
    "num_hidden_layers": 1,
    "num_mel_bins": 8,
    "max_source_positions": 8,
}


# What a tower's answers pass through.
THROUGH: dict[str, Any] = {
    "resampler_n_latents": 2,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 8,
    "num_key_value_heads": 1,
    "hidden_size": 64,
}
CONFORMER = {"hidden_dim": 16, "input_dim": 8, "num_layers": 1, "num_heads": 2, "dim_head": 8, "output_dim": 8}
QUERIES = {"model_type": "blip_2_qformer", "encoder_hidden_size": 16} | TOWER
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def beside_images(
    name: str, text: str, whole: str, *, is_long: bool = False, outer: dict[str, Any] | None = None, **fields: Any
) -> Case:
    """`outer`: the whole's other fields."""
    return Case(
        name=name,
        config=text,
        fields=fields,
        text_in=whole,
        outer={"vision_config": TOWER} | (outer or {}),
        is_long=is_long,
    )


def beside_sound(name: str, text: str, whole: str, *, is_long: bool = False) -> Case:
    return Case(name=name, config=text, text_in=whole, outer={"audio_config": HEARING}, is_long=is_long)


CASES: tuple[Case, ...] = (
    beside_images("pixtral", "MistralConfig", "LlavaConfig", sliding_window=None),
    beside_images("llava_next", "LlamaConfig", "LlavaNextConfig", is_long=True),
    beside_images("llava_next_video", "LlamaConfig", "LlavaNextVideoConfig", is_long=True),
    beside_images("llava_onevision", "Qwen2Config", "LlavaOnevisionConfig", tie_word_embeddings=True),
    beside_images("vipllava", "LlamaConfig", "VipLlavaConfig", is_long=True),
    beside_images("internvl", "Qwen3MoeConfig", "InternVLConfig", **EXPERTS, head_dim=32),
    # Without what multiplies logits: transformers' classes with towers forget it.
    beside_images("aya_vision", "Cohere2Config", "AyaVisionConfig", is_long=True, logit_scale=1.0),
    beside_images("cohere2_vision", "Cohere2Config", "Cohere2VisionConfig", logit_scale=1.0),
    beside_images("lfm2_vl", "Lfm2Config", "Lfm2VlConfig", layer_types=["conv", "full_attention"]),
    beside_images("smolvlm", "LlamaConfig", "SmolVLMConfig"),
    beside_images("idefics3", "LlamaConfig", "Idefics3Config", is_long=True),
    beside_images("video_llama_3", "Qwen2Config", "VideoLlama3Config", is_long=True),
    beside_images(
        "exaone4_5",
        "Exaone4Config",
        "Exaone4_5_Config",
        is_long=True,
        outer={"vision_config": TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_key_value_heads": 2}},
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention"],
    ),
    beside_images("ovis2", "Qwen2Config", "Ovis2Config", is_long=True, outer={"hidden_size": 64, "vocab_size": 20}),
    beside_images("idefics2", "MistralConfig", "Idefics2Config", is_long=True, outer={"perceiver_config": THROUGH}),
    beside_images(
        "minicpmv4_6", "Qwen3_5TextConfig", "MiniCPMV4_6Config", is_long=True, outer={"insert_layer_id": 0}, **DELTA
    ),
    Case(
        name="granite_speech",
        config="GraniteConfig",
        text_in="GraniteSpeechConfig",
        outer={"encoder_config": CONFORMER, "projector_config": QUERIES},
        is_long=True,
    ),
    beside_sound("voxtral", "LlamaConfig", "VoxtralConfig"),
    beside_sound("qwen2_audio", "Qwen2Config", "Qwen2AudioConfig", is_long=True),
    beside_sound("audioflamingo3", "Qwen2Config", "AudioFlamingo3Config", is_long=True),
)
