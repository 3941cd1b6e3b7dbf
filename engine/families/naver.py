"""NAVER: HyperCLOVA X."""

from __future__ import annotations

from dataclasses import replace

from engine.families.ibm import multiplied_layer
from engine.families.reading import Family, Fields, attention, gated_mlp, model, with_defaults
from engine.spec.ends import EmbeddingSpec, HeadSpec
from engine.spec.model import ModelSpec


def read_hyperclova_x(fields: Fields) -> ModelSpec:
    """HyperCLOVA X: Granite with norms after the halves, too, and logits that are multiplied."""
    fields = with_defaults(fields, "hyperclovax")
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias)
    scale = fields.real("attention_multiplier", mixer.heads.head_dim**-0.5)
    mixer = replace(mixer, scores=replace(mixer.scores, scale=scale))
    layer = multiplied_layer(fields, mixer, gated_mlp(fields, bias=fields.flag("mlp_bias")))
    if fields.flag("use_post_norm"):
        around_mixer, around_mlp = (
            replace(layer.around_mixer, after="post_norm1"),
            replace(layer.around_mlp, after="post_norm2"),
        )
        layer = replace(layer, around_mixer=around_mixer, around_mlp=around_mlp)
    return model(
        fields,
        [layer] * fields.number("num_hidden_layers"),
        embedding=EmbeddingSpec(multiplier=fields.real("embedding_multiplier", 1.0)),
        head=HeadSpec(multiplier=fields.real("logits_scaling", 1.0)),
    )


FAMILIES: dict[str, Family] = {
    "HyperCLOVAXForCausalLM": read_hyperclova_x,
}
