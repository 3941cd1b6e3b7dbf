"""Text models in checkpoints that see or hear, too, where the text model is another family's."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.fields import Fields
from engine.families.vision import glm, kimi, muse, phi, qwen, wrapped
from engine.spec.model import ModelSpec

_Family = Callable[[Fields], ModelSpec]
DENSE: dict[str, _Family] = {
    **wrapped.FAMILIES,
    "Qwen2VLForConditionalGeneration": qwen.read_2,
    "Qwen2_5_VLForConditionalGeneration": qwen.read_2,
    "Qwen2_5OmniForConditionalGeneration": qwen.read_omni_2,
    "Qwen2_5OmniModel": qwen.read_omni_2,
    "Qwen2_5OmniThinkerForConditionalGeneration": qwen.read_omni_2,
    "Qwen3VLForConditionalGeneration": qwen.read_3,
    "MuseGlimmerForCausalLM": muse.read,
    "MuseGlimmerForConditionalGeneration": muse.read,
    "Phi3VForCausalLM": phi.read_3_vision,
    "Phi4MMForCausalLM": phi.read_4,
    "Phi4MultimodalForCausalLM": phi.read_4,
    "Glm4vForConditionalGeneration": glm.read,
    "Glm46VForConditionalGeneration": glm.read_46,
}
WITH_EXPERTS: dict[str, _Family] = {
    "Qwen3VLMoeForConditionalGeneration": qwen.read_3_moe,
    "Qwen3OmniMoeForConditionalGeneration": qwen.read_omni_3,
    "Qwen3OmniMoeThinkerForConditionalGeneration": qwen.read_omni_3,
    "Glm4vMoeForConditionalGeneration": glm.read_moe,
    "KimiVLForConditionalGeneration": kimi.read,
    "KimiK25ForConditionalGeneration": kimi.read,
    "Kimi_K25ForConditionalGeneration": kimi.read,
}
FAMILIES = {**DENSE, **WITH_EXPERTS}
