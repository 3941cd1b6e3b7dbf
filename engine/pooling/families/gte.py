"""GTE's own encoder (`NewModel`, Snowflake's `GteModel`): BERT with rotated heads and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping

from engine.families.reading import Fields, dtype_of
from engine.pooling.families.reading import activation_of, heads_of, names_of, rope_of, tokens_of
from engine.pooling.spec import (
    ClassifierSpec,
    EncoderAttentionSpec,
    EncoderLayerSpec,
    EncoderSpec,
    FeedForwardSpec,
)
from engine.spec.ends import NormSpec
from engine.spec.model import UnsupportedModelError
from engine.spec.scaling import LinearScaling, RopeSpec
from modelfiles.late import has_gte_head
from modelfiles.scoring import num_labels


def read_gte(fields: Fields, is_headed: bool) -> EncoderSpec:
    """GTE: norms behind both halves, no learnt positions; the MLP's first product has no bias, and the gate's rows last."""
    fields.only("position_embedding_type", "rope")
    fields.only("layer_norm_type", "layer_norm")
    fields.only("logn_attention_scale", False)
    # Those of its code's speed, and of the scale that is off.
    fields.ignore("logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention")
    heads, head_dim = heads_of(fields)
    is_packed = fields.get("pack_qkv") is not False
    layer = EncoderLayerSpec(
        attention=EncoderAttentionSpec(
            num_heads=heads,
            head_dim=head_dim,
            inputs=("attention.qkv_proj",) if is_packed else tuple(f"attention.{each}_proj" for each in "qkv"),
            output="attention.o_proj",
            rope=_rope(fields, head_dim),
        ),
        mlp=FeedForwardSpec(
            inputs=("mlp.up_gate_proj",),
            output="mlp.down_proj",
            intermediate_size=fields.number("intermediate_size"),
            activation=activation_of(fields, "hidden_act"),
            is_gated=True,
            has_bias=False,
            has_output_bias=True,
            is_up_first=True,
        ),
        norms=("attn_ln", "mlp_ln"),
    )
    types = fields.count("type_vocab_size") if "type_vocab_size" in fields else 1
    ignored = () if is_headed else ("pooler.",) if has_gte_head(fields) else ("pooler.", "classifier.")
    head = ClassifierSpec(dense="pooler.dense", output="classifier", num_labels=num_labels(fields))
    return EncoderSpec(
        hidden_size=fields.number("hidden_size"),
        max_position_embeddings=fields.number("max_position_embeddings"),
        tokens=tokens_of(fields, norm="embeddings.LayerNorm", num_types=types),
        layers=(layer,) * fields.number("num_hidden_layers"),
        under="encoder.layer.{}.",
        norms=NormSpec(kind="layer", eps=fields.real("layer_norm_eps", 1e-12), has_bias=True),
        classifier=head if is_headed else None,
        dtype=dtype_of(fields),
        stored=names_of("new.", *ignored),
    )


def _rope(fields: Fields, head_dim: int) -> RopeSpec:
    """The plain rotation, or its stretched form "ntk": another base, and every angle by the same factor less."""
    theta = fields.real("rope_theta", 10_000.0)
    said = fields.get("rope_scaling")
    if not said:
        return rope_of(fields, "", theta)
    given = Fields(said) if isinstance(said, Mapping) else Fields({})
    factor = given.real("factor", 0.0)
    if given.get("type", given.get("rope_type")) != "ntk" or factor < 1 or given.get("mixed_b") is not None:
        raise UnsupportedModelError(
            f"config.json: rope_scaling = {said!r:.80} is not computed: the type ntk with a factor of at least 1, and no mixed_b"
        )
    return RopeSpec(theta=theta * factor, scaling=LinearScaling(factor=factor ** (2 / head_dim)))
