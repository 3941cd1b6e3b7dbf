"""BigCode: StarCoder2."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, model, sliding_window, with_defaults
from engine.spec.ends import NormSpec
from engine.spec.model import LayerSpec, ModelSpec, PlainMlpSpec


def read_starcoder2(fields: Fields) -> ModelSpec:
    """StarCoder2: LayerNorm, biases everywhere, an MLP without a gate."""
    fields = with_defaults(fields, "starcoder2")
    fields.only("hidden_act", "gelu_pytorch_tanh")
    fields.only("norm_type", "layer_norm")
    fields.only("mlp_type", "default")
    fields.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    fields.only("scale_attn_weights", True)
    fields.ignore("layer_norm_epsilon")  # `norm_epsilon` is read instead
    bias = fields.flag("use_bias")
    mixer = attention(fields, window=sliding_window(fields), qkv_bias=bias, output_bias=bias)
    mlp = PlainMlpSpec(
        size=fields.number("intermediate_size"), bias=bias, activation="gelu_tanh", up="mlp.c_fc", down="mlp.c_proj"
    )
    layers = [LayerSpec(mixer=mixer, mlp=mlp)] * fields.number("num_hidden_layers")
    return model(fields, layers, eps="norm_epsilon", norms=NormSpec(kind="layer", has_bias=True))


FAMILIES: dict[str, Family] = {
    "Starcoder2ForCausalLM": read_starcoder2,
}
