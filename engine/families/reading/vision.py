"""Text models inside vision-language checkpoints: their fields, and names of their tensors."""

from __future__ import annotations

from engine.families.reading.defaults import with_defaults
from engine.families.reading.fields import Fields
from engine.weights.names import StoredNames

# Tensor names of the text model inside a vision-language checkpoint.
BESIDE_VISION = StoredNames(
    renamed={
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    ignored=("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector."),
)
VISUAL = StoredNames(renamed={"model.language_model.": "model."}, ignored=("model.visual.", "visual."))
OF_IMAGES = ("mrope_section", "mrope_interleaved", "interleaved")


def text_of(fields: Fields, model_type: str) -> Fields:
    """The text model's fields, which older checkpoints have beside `vision_config`."""
    of_images = ("vision_config", *(name for name in fields if name.endswith("_token_id")))
    fields.ignore(*of_images)
    inner = with_defaults(fields.text(), model_type)
    inner.ignore(*of_images)
    return inner
