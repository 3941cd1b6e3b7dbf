"""Llama with LayerNorm: StarCoder2 and Jais 2."""

from __future__ import annotations

from engine.model.families.fields import Fields, attention, flag, model, number, sliding_window
from engine.model.spec import LayerSpec, ModelSpec, PlainMlpSpec

STARCODER_2 = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "tie_word_embeddings": True,
}
JAIS_2 = {
    "vocab_size": 150272,
    "hidden_size": 3328,
    "intermediate_size": 26624,
    "num_hidden_layers": 32,
    "num_attention_heads": 26,
    "max_position_embeddings": 8192,
    "hidden_act": "relu2",
    "attention_bias": True,
    "mlp_bias": True,
    "layer_norm_eps": 1e-5,
}


def read_starcoder2(fields: Fields) -> ModelSpec:
    """StarCoder2: LayerNorm, biases everywhere, an MLP without a gate."""
    fields = fields.over(STARCODER_2)
    fields.only("hidden_act", "gelu_pytorch_tanh")
    fields.only("norm_type", "layer_norm")
    fields.only("mlp_type", "default")
    fields.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights")
    fields.ignore("layer_norm_epsilon")  # `norm_epsilon` is read instead
    bias = flag(fields, "use_bias")
    mixer = attention(fields, window=sliding_window(fields), qkv_bias=bias, output_bias=bias)
    mlp = PlainMlpSpec(
        size=number(fields, "intermediate_size"), bias=bias, activation="gelu_tanh", up="mlp.c_fc", down="mlp.c_proj"
    )
    layers = [LayerSpec(mixer=mixer, mlp=mlp)] * number(fields, "num_hidden_layers")
    return model(fields, layers, eps="norm_epsilon", norm="layer", norm_bias=True)


def read_jais2(fields: Fields) -> ModelSpec:
    """Jais 2: LayerNorm, biases everywhere, an MLP of relu² without a gate."""
    fields = fields.over(JAIS_2)
    fields.only("hidden_act", "relu2")
    bias, size = flag(fields, "attention_bias"), number(fields, "intermediate_size")
    mlp = PlainMlpSpec(size=size, bias=flag(fields, "mlp_bias"), activation="relu2")
    layer = LayerSpec(mixer=attention(fields, qkv_bias=bias, output_bias=bias), mlp=mlp)
    layers = [layer] * number(fields, "num_hidden_layers")
    return model(fields, layers, eps="layer_norm_eps", norm="layer", norm_bias=True)
