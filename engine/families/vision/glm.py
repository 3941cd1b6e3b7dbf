"""GLM-4.1V, 4.5V and 4.6V, which may have experts. The three positions that images have are one in text."""

from __future__ import annotations

from engine.families.dense import glm
from engine.families.experts import glm4_moe
from engine.families.fields import Fields
from engine.families.vision.qwen import NAMES, OF_IMAGES, text_of
from engine.spec.model import ModelSpec, UnsupportedModelError

GLM_4_V = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
GLM_4_V_MOE = {"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True}


def read(fields: Fields) -> ModelSpec:
    """GLM-4.1V: GLM-4-0414's text model in a checkpoint with a vision tower."""
    fields = text_of(fields, GLM_4_V)
    fields.only("attention_bias", True)
    return glm.text_model(fields, OF_IMAGES).with_names(NAMES)


def read_moe(fields: Fields) -> ModelSpec:
    """GLM-4.5V and 4.6V: GLM-4.5's text model in a checkpoint with a vision tower."""
    return glm4_moe.text_model(text_of(fields, GLM_4_V_MOE), OF_IMAGES).with_names(NAMES)


def read_46(fields: Fields) -> ModelSpec:
    """GLM-4.6V Flash: the text model is one of the two."""
    text = fields.get("text_config") or {}
    kind = text.get("model_type", "glm4v_text")
    if kind not in ("glm4v_text", "glm4v_moe_text"):
        raise UnsupportedModelError(f"config.json: text_config.model_type = {kind!r:.40} is not supported")
    return (read if kind == "glm4v_text" else read_moe)(fields)
