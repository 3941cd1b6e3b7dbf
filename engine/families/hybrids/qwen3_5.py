"""Qwen3.5 and 3.6: three layers of four keep a state; dense, or with experts and one that is shared.

Of a checkpoint with vision the text part, and nothing of the layer that predicts further tokens.
"""

from __future__ import annotations

from engine.families.fields import Fields, gated_mlp, number
from engine.families.hybrids.fields import DEFAULTS, experts, hybrid
from engine.spec.model import MlpSpec, ModelSpec
from engine.weights.names import StoredNames

QWEN_3_5 = DEFAULTS | {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
QWEN_3_5_MOE = DEFAULTS | {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "intermediate_size": 5632,  # layers without experts, of which there are none
    "num_hidden_layers": 40,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
NAMES = StoredNames(renamed={"model.language_model.": "model."}, ignored=("model.visual.", "mtp."))


def read(fields: Fields) -> ModelSpec:
    fields = _text(fields).over(QWEN_3_5)
    return _model(fields, gated_mlp(fields))


def read_moe(fields: Fields) -> ModelSpec:
    fields = _text(fields).over(QWEN_3_5_MOE)
    fields.only("mlp_only_layers", [])
    fields = fields.with_values(norm_topk_prob=True)
    return _model(fields, experts(fields))


def _model(fields: Fields, mlp: MlpSpec) -> ModelSpec:
    fields.only("attn_output_gate", True)
    fields.only("output_gate_type", "swish")
    fields.only("mamba_ssm_dtype", "float32")
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    return hybrid(fields, [mlp] * number(fields, "num_hidden_layers"), stored="by_kind").with_names(NAMES)


def _text(fields: Fields) -> Fields:
    vision = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    fields.ignore("vision_config", "language_model_only", *vision)
    return fields.text()
