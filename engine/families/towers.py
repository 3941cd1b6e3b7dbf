"""Checkpoints with vision or audio towers beside a text model of another family."""

from __future__ import annotations

from collections.abc import Mapping

from engine.families.cohere import read_cohere2, read_cohere2_moe
from engine.families.google import gemma
from engine.families.ibm import read_granite
from engine.families.lg import read_exaone4
from engine.families.liquid import read_lfm2, read_lfm2_moe
from engine.families.meta import read_llama
from engine.families.microsoft import read_phi3
from engine.families.mistral import read_ministral3, read_mistral, read_mistral4
from engine.families.openai import read_gpt_oss
from engine.families.qwen import read_qwen2, read_qwen3, read_qwen3_5, read_qwen3_moe
from engine.families.reading import Family, Fields
from engine.spec.model import ModelSpec, UnsupportedModelError
from engine.weights.names import StoredNames

# `model_type` of a `text_config` -> family of the text model.
TEXTS: dict[str, Family] = {
    "cohere2": read_cohere2,
    "cohere2_moe": read_cohere2_moe,
    "exaone4": read_exaone4,
    "gemma2": gemma.read_2,
    "gpt_oss": read_gpt_oss,
    "granite": read_granite,
    "lfm2": read_lfm2,
    "lfm2_moe": read_lfm2_moe,
    "llama": read_llama,
    "ministral3": read_ministral3,
    "mistral": read_mistral,
    "mistral4": read_mistral4,
    "phi3": read_phi3,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "qwen3_5_text": read_qwen3_5,
    "qwen3_moe": read_qwen3_moe,
}
# Modules of the other parts, beside the text model.
_OTHERS = """
audio_tower connector encoder image_newline image_tower merger mlp1 multi_modal_projector projector video_tower
vision_model vision_tower visual visual_embeddings_table
"""
_MODULES = [f"{name}{'' if name == 'image_newline' else '.'}" for name in _OTHERS.split()]
NAMES = StoredNames(
    renamed={
        "language_model.model.model.": "model.",  # as transformers 5.17 saves some
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "model.text_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    ignored=(*_MODULES, *(f"model.{name}" for name in _MODULES), "mtp."),
)
# Fields of the other parts, or decided by `text_config`.
_FIELDS = """
adapter_layer_norm_eps alignment_intermediate_size audio_config audio_frame_step downsample_factor downsample_mode
downsample_rate downsample_ratio drop_vision_last_layer dynamic_image_size encoder_config force_image_size has_lora_adapter
hidden_size ignore_index image_fold image_grid_pinpoints image_seq_length image_size insert_layer_id max_dynamic_patch
merge_kernel_size merger_times min_dynamic_patch multimodal_projector_bias patch_size perceiver_config
projection_pooling_ratio projector_bias projector_config projector_hidden_act projector_hidden_size projector_layernorm_eps
projector_use_layernorm ps_version scale_factor select_layer spatial_merge_size spatial_pool_mode spatial_pool_stride template
use_backbone_lora use_cls_token use_image_newline_parameter use_llm_lora use_thumbnail video_seq_length vision_aspect_ratio
vision_config vision_feature_layer vision_feature_layers vision_feature_select_strategy vision_use_cls_token
visual_indicator_token_ids vocab_size window_size
"""


class Wrapper:
    """The reader of the text part of one class.

    `text`: its kind where nothing says one; `under`: the field that describes it; `ties`: whether the head is tied where nothing
    says it; `either_ties`: where the text's fields say so it is, whatever the others say.
    """

    def __init__(
        self, what: str, text: str, *, under: str = "text_config", ties: bool = False, either_ties: bool = False
    ) -> None:
        self.__doc__ = what
        self._text, self._under = text, under
        self._ties, self._either_ties = ties, either_ties

    def __call__(self, fields: Fields) -> ModelSpec:
        inner = fields.get(self._under)
        if not isinstance(inner, Mapping):
            raise UnsupportedModelError(f"config.json: {self._under} must say what the text model is")
        fields = fields.with_values(text_config=inner)
        if self._either_ties and inner.get("tie_word_embeddings"):
            fields = fields.with_values(tie_word_embeddings=True)
        of_tokens = (name for name in fields if name.endswith(("_token_id", "_token_index")))
        fields.ignore(self._under, *_FIELDS.split(), *of_tokens)
        text = fields.text()
        kind = text.get("model_type", self._text)
        if kind not in TEXTS:
            raise UnsupportedModelError(
                f"config.json: {self._under}.model_type = {kind!r:.40} is not supported; supported: {', '.join(TEXTS)}"
            )
        read = TEXTS[kind]
        return read(text.over({"tie_word_embeddings": True}) if self._ties else text).with_names(NAMES)


FAMILIES: dict[str, Family] = {
    "AudioFlamingo3ForConditionalGeneration": Wrapper("Audio Flamingo 3: the text part, Qwen2.", "qwen2"),
    "AyaVisionForConditionalGeneration": Wrapper("Aya Vision: the text part, Cohere 2.", "cohere2", ties=True),
    "Cohere2VisionForConditionalGeneration": Wrapper(
        "Command A Vision and Command A+: the text part, Cohere 2 with experts or without.", "cohere2", ties=True
    ),
    "Exaone4_5_ForConditionalGeneration": Wrapper("EXAONE 4.5: the text part, EXAONE 4.", "exaone4"),
    "FastVlmForConditionalGeneration": Wrapper("FastVLM: the text part, Qwen2.", "qwen2"),
    "GraniteSpeechForConditionalGeneration": Wrapper("Granite Speech: the text part, Granite.", "granite", ties=True),
    "Idefics2ForConditionalGeneration": Wrapper("Idefics 2: the text part, Mistral.", "mistral"),
    "Idefics3ForConditionalGeneration": Wrapper("Idefics 3: the text part, Llama.", "llama"),
    "InternS1ForConditionalGeneration": Wrapper(
        "Intern-S1: the text part, Qwen3 with experts or without.", "qwen3", ties=True
    ),
    "InternVLForConditionalGeneration": Wrapper(
        "InternVL 3 and 3.5: the text part, Qwen2, Qwen3 with experts or without, or gpt-oss.", "qwen2", ties=True
    ),
    "InternVLChatModel": Wrapper(
        "InternVL 2 to 3.5 as its makers store it: the text part.", "qwen2", under="llm_config"
    ),
    "Lfm2VlForConditionalGeneration": Wrapper("LFM2-VL: the text part, LFM2.", "lfm2", ties=True),
    "LlavaForConditionalGeneration": Wrapper("LLaVA 1.5, Pixtral 12B: the text part, Llama or Mistral.", "llama"),
    "LlavaNextForConditionalGeneration": Wrapper(
        "LLaVA-NeXT, Granite Vision: the text part, Llama, Mistral or Granite.", "llama"
    ),
    "LlavaNextVideoForConditionalGeneration": Wrapper("LLaVA-NeXT-Video: the text part, Llama.", "llama"),
    "LlavaOnevisionForConditionalGeneration": Wrapper(
        "LLaVA-OneVision: the text part, Qwen2.", "qwen2", either_ties=True
    ),
    "MiniCPMV4_6ForConditionalGeneration": Wrapper("MiniCPM-V 4.6: the text part, Qwen3.5.", "qwen3_5_text"),
    "Mistral3ForConditionalGeneration": Wrapper(
        "Mistral Small 3.1 and later, Ministral 3, Mistral Small 4: the text part.", "mistral", ties=True
    ),
    "Ovis2ForConditionalGeneration": Wrapper("Ovis 2: the text part, Qwen2.", "qwen2", ties=True),
    "PerceptionLMForConditionalGeneration": Wrapper("Perception LM: the text part, Llama.", "llama"),
    "Qwen2AudioForConditionalGeneration": Wrapper("Qwen2-Audio: the text part, Qwen2.", "qwen2"),
    "SmolVLMForConditionalGeneration": Wrapper("SmolVLM 1 and 2: the text part, Llama.", "llama"),
    "VideoLlama3ForConditionalGeneration": Wrapper("VideoLLaMA 3: the text part, Qwen2.", "qwen2"),
    "VipLlavaForConditionalGeneration": Wrapper("ViP-LLaVA: the text part, Llama.", "llama"),
    "VoxtralForConditionalGeneration": Wrapper("Voxtral: the text part, Llama.", "llama"),
}
