"""Andrej Karpathy: NanoChat."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import Family, Fields, attention, model, rope, with_defaults
from engine.spec.attention import QkNorm
from engine.spec.ends import EmbeddingSpec, HeadSpec, NormSpec
from engine.spec.model import LayerSpec, ModelSpec, PlainMlpSpec


def read_nanochat(fields: Fields) -> ModelSpec:
    """NanoChat: norms without weights, also of embeddings and of rotated heads, which rotate backwards; relu² without a gate."""
    fields = with_defaults(fields, "nanochat")
    fields.only("hidden_act", "relu2")
    bias, normed = fields.flag("attention_bias"), QkNorm(has_weight=False, after_rope=True)
    rotation, size = replace(rope(fields), backwards=True), fields.number("intermediate_size")
    layer = LayerSpec(
        mixer=attention(fields, rope=rotation, qk_norm=normed, qkv_bias=bias, output_bias=bias),
        mlp=PlainMlpSpec(size=size, bias=False, activation="relu2", up="mlp.fc1", down="mlp.fc2"),
    )
    return model(
        fields,
        [layer] * fields.number("num_hidden_layers"),
        norms=NormSpec(has_weight=False),
        embedding=EmbeddingSpec(norm="model.norm"),
        head=HeadSpec(softcap=fields.real("final_logit_softcapping", 0.0)),
    )


FAMILIES: dict[str, Family] = {
    "NanoChatForCausalLM": read_nanochat,
}
