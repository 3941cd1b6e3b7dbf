"""Llama with LayerNorm: StarCoder2, Jais 2, Nemotron and StableLM."""

from __future__ import annotations

from engine.families.fields import Fields, attention, flag, gated_mlp, model, number, sliding_window
from engine.spec.attention import QkNorm
from engine.spec.model import BEFORE_MLP, BranchSpec, LayerSpec, ModelSpec, PlainMlpSpec

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
NEMOTRON = {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 32,
    "num_attention_heads": 48,
    "max_position_embeddings": 4096,
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
STABLELM = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}
BY_HEAD = QkNorm(over="each", q_name="self_attn.q_layernorm.norms.{}", k_name="self_attn.k_layernorm.norms.{}")


def read_starcoder2(fields: Fields) -> ModelSpec:
    """StarCoder2: LayerNorm, biases everywhere, an MLP without a gate."""
    fields = fields.over(STARCODER_2)
    fields.only("hidden_act", "gelu_pytorch_tanh")
    fields.only("norm_type", "layer_norm")
    fields.only("mlp_type", "default")
    fields.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    fields.only("scale_attn_weights", True)
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
    return model(fields, _squared_layers(fields), eps="layer_norm_eps", norm="layer", norm_bias=True)


def read_nemotron(fields: Fields) -> ModelSpec:
    """Nemotron and Minitron: LayerNorm of 1 + weight, half of each head rotated, an MLP of relu² without a gate."""
    fields = fields.over(NEMOTRON)
    return model(fields, _squared_layers(fields), eps="norm_eps", norm="layer_plus_one", norm_bias=True)


def _squared_layers(fields: Fields) -> list[LayerSpec]:
    """Layers with an MLP of relu² without a gate."""
    fields.only("hidden_act", "relu2")
    bias, size = flag(fields, "attention_bias"), number(fields, "intermediate_size")
    mlp = PlainMlpSpec(size=size, bias=flag(fields, "mlp_bias"), activation="relu2")
    layer = LayerSpec(mixer=attention(fields, qkv_bias=bias, output_bias=bias), mlp=mlp)
    return [layer] * number(fields, "num_hidden_layers")


def read_stablelm(fields: Fields) -> ModelSpec:
    """StableLM 3B and 2: LayerNorm, a quarter of each head rotated; heads normed and parallel halves in the 12B."""
    fields = fields.over(STABLELM)
    normed = BY_HEAD if flag(fields, "qk_layernorm") else None
    mixer = attention(fields, qk_norm=normed, qkv_bias=flag(fields, "use_qkv_bias"))
    around_mlp = BranchSpec(shares=True) if flag(fields, "use_parallel_residual") else BEFORE_MLP
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields), around_mlp=around_mlp)
    layers = [layer] * number(fields, "num_hidden_layers")
    return model(fields, layers, eps="layer_norm_eps", norm="layer", norm_bias=True)
