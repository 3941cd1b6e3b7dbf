"""NAVER: HyperCLOVA X."""

from __future__ import annotations

from dataclasses import replace

from engine.families.ibm import multiplied_layer
from engine.families.reading import Family, Fields, attention, flag, gated_mlp, model, number, real, with_defaults
from engine.spec.ends import EmbeddingSpec, HeadSpec
from engine.spec.model import ModelSpec


def read_hyperclova_x(fields: Fields) -> ModelSpec:
    """HyperCLOVA X: Granite with norms after the halves, too, and logits that are multiplied."""
    fields = with_defaults(fields, "hyperclovax")
    bias = flag(fields, "attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias)
    scale = real(fields, "attention_multiplier", mixer.heads.head_dim**-0.5)
    mixer = replace(mixer, scores=replace(mixer.scores, scale=scale))
    layer = multiplied_layer(fields, mixer, gated_mlp(fields, bias=flag(fields, "mlp_bias")))
    if flag(fields, "use_post_norm"):
        around_mixer, around_mlp = (
            replace(layer.around_mixer, after="post_norm1"),
            replace(layer.around_mlp, after="post_norm2"),
        )
        layer = replace(layer, around_mixer=around_mixer, around_mlp=around_mlp)
    return model(
        fields,
        [layer] * number(fields, "num_hidden_layers"),
        embedding=EmbeddingSpec(multiplier=real(fields, "embedding_multiplier", 1.0)),
        head=HeadSpec(multiplier=real(fields, "logits_scaling", 1.0)),
    )


FAMILIES: dict[str, Family] = {
    "HyperCLOVAXForCausalLM": read_hyperclova_x,
}
