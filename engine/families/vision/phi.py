"""Phi-3 and 3.5 Vision, and Phi-4-multimodal: Phi-3's text model. What else they hold works on images and sound alone."""

from __future__ import annotations

from collections.abc import Iterator

from engine.families.dense import phi
from engine.families.fields import Fields, number
from engine.spec.model import ModelSpec
from engine.weights.names import StoredNames

OF_OTHERS = ("embd_layer", "img_processor", "audio_processor", "audio_config", "vision_config")
PHI_4 = phi.PHI_3 | {"vocab_size": 200064, "num_key_value_heads": 8, "max_position_embeddings": 131072}
ADAPTED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def read_3_vision(fields: Fields) -> ModelSpec:
    """Phi-3 and 3.5 Vision: Phi-3's text model in a checkpoint with a vision tower."""
    fields.ignore(*OF_OTHERS)
    return phi.read_3(fields).with_names(StoredNames(ignored=("model.vision_embed_tokens.",)))


def read_4(fields: Fields) -> ModelSpec:
    """Phi-4-multimodal: Phi-4-mini's text model, beside adapters that only images and sound switch on."""
    fields = fields.over(PHI_4)
    fields.ignore(*OF_OTHERS, "vision_lora", "speech_lora")
    modules = list(_adapted(number(fields, "num_hidden_layers")))
    names = StoredNames(
        renamed={f"{module}.base_layer.": f"{module}." for module in modules},
        ignored=("model.embed_tokens_extend.", *(f"{module}.lora_" for module in modules)),
    )
    return phi.read_3(fields).with_names(names)


def _adapted(num_layers: int) -> Iterator[str]:
    for layer in range(num_layers):
        for module in ADAPTED:
            yield f"model.layers.{layer}.{module}"
