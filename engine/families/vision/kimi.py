"""Kimi-VL and Kimi K2.5: DeepSeek-V3's text model in a checkpoint with a vision tower."""

from __future__ import annotations

from engine.families.experts.with_latents import deepseek
from engine.families.fields import Fields
from engine.spec.model import ModelSpec
from engine.weights.names import StoredNames

OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "mm_projector.")
NAMES = StoredNames(
    renamed={
        "language_model.model.blocks.": "model.layers.",  # as transformers 5.17 saves them
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    ignored=(*OTHER_PARTS, *(f"model.{part}" for part in OTHER_PARTS)),
)
OF_IMAGES = ("vision_config", "projection_hidden_size", "projection_hidden_act", "projection_layer_norm_eps")


def read(fields: Fields) -> ModelSpec:
    """Kimi-VL and Kimi K2.5: DeepSeek-V3's text model in a checkpoint with a vision tower."""
    fields.ignore(*OF_IMAGES, "video_placeholder", "media_placeholder_token_id", "ignore_index")
    fields.ignore(*(name for name in fields if name.endswith("_token_id")))
    text = fields.text()
    text.only("model_type", "deepseek_v3", "kimi_k2")
    return deepseek.read_v3(text).with_names(NAMES)
