"""Llama but for a switch: no gate, interleaved pairs, biases, layers without rope, windows."""

from __future__ import annotations

from engine.families.fields import (
    FULL,
    SLIDING,
    Fields,
    attention,
    flag,
    gated_mlp,
    layer_types,
    model,
    number,
    rope,
    sliding_window,
)
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, PlainMlpSpec, UnsupportedModelError
from engine.weights.names import StoredNames

ARCEE = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "relu2",
}
ERNIE = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
SEED_OSS = {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
}
CWM = {
    "vocab_size": 128256,
    "hidden_size": 6144,
    "intermediate_size": 21504,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8192,
}
CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
HELIUM = {
    "vocab_size": 48000,
    "hidden_size": 2560,
    "intermediate_size": 7040,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
}
SMOLLM3 = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2_000_000.0,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


def read_arcee(fields: Fields) -> ModelSpec:
    """Arcee: an MLP of relu² without a gate."""
    fields = fields.over(ARCEE)
    fields.only("hidden_act", "relu2")
    bias = flag(fields, "attention_bias")
    size = number(fields, "intermediate_size")
    mlp = PlainMlpSpec(size=size, bias=flag(fields, "mlp_bias"), activation="relu2")
    layer = LayerSpec(mixer=attention(fields, qkv_bias=bias, output_bias=bias), mlp=mlp)
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_ernie(fields: Fields) -> ModelSpec:
    """ERNIE 4.5 (dense): Llama with interleaved pairs."""
    fields = fields.over(ERNIE)
    bias = flag(fields, "use_bias")
    mixer = attention(fields, rope=rope(fields, interleaved=True), qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=bias))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_helium(fields: Fields) -> ModelSpec:
    """Helium: Llama with interleaved pairs."""
    fields = fields.over(HELIUM)
    rotation = rope(fields, theta=100_000.0, interleaved=True)
    mixer = attention(fields, rope=rotation, qkv_bias=flag(fields, "attention_bias"))
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias")))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_cwm(fields: Fields) -> ModelSpec:
    """CWM: Llama with a window on three layers of four."""
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields = fields.over({"rope_parameters": CWM_ROPE})
    fields = fields.over(CWM)
    window, mlp = sliding_window(fields), gated_mlp(fields, bias=flag(fields, "mlp_bias"))
    kinds = layer_types(
        fields, [SLIDING if layer % 4 else FULL for layer in range(number(fields, "num_hidden_layers"))]
    )
    layers = [LayerSpec(mixer=attention(fields, window=window if kind == SLIDING else 0), mlp=mlp) for kind in kinds]
    return model(fields, layers)


def read_internlm3(fields: Fields) -> ModelSpec:
    """InternLM 3: Llama with a size of heads of its own."""
    fields = fields.over({"rms_norm_eps": 1e-6})
    bias = flag(fields, "bias")
    mixer = attention(fields, qkv_bias=flag(fields, "qkv_bias"), output_bias=bias)
    return model(
        fields, [LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=bias))] * number(fields, "num_hidden_layers")
    )


def read_exaone(fields: Fields) -> ModelSpec:
    """EXAONE 3 and 3.5: Llama by other names."""
    fields = _renamed(fields, num_layers="num_hidden_layers", layer_norm_epsilon="rms_norm_eps")
    fields = _renamed(fields, activation_function="hidden_act")
    fields.ignore("embed_dropout")
    num_layers, mlp = (
        number(fields, "num_hidden_layers"),
        gated_mlp(fields, gate="c_fc_0", up="c_fc_1", down="mlp.c_proj"),
    )
    layer = LayerSpec(
        mixer=attention(fields, output="self_attn.out_proj"),
        mlp=mlp,
        around_mixer=BranchSpec(before="ln_1"),
        around_mlp=BranchSpec(before="ln_2"),
    )
    attentions = {
        f"transformer.h.{each}.attn.attention.": f"model.layers.{each}.self_attn." for each in range(num_layers)
    }
    others = {
        "transformer.h.": "model.layers.",
        "transformer.wte.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
    }
    names = StoredNames(renamed=attentions | others, ignored=tuple(f"{name}rotary." for name in attentions))
    return model(fields, [layer] * num_layers, stored=names)


def _renamed(fields: Fields, **names: str) -> Fields:
    """The same with fields under the names that others have for them."""
    fields.ignore(*names)
    return fields.with_values(**{ours: fields[theirs] for theirs, ours in names.items() if theirs in fields})


def read_seed_oss(fields: Fields) -> ModelSpec:
    """Seed-OSS: Llama with biases of queries, keys and values."""
    fields = fields.over(SEED_OSS)
    mixer = attention(fields, qkv_bias=flag(fields, "attention_bias"), output_bias=flag(fields, "attention_out_bias"))
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias")))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_smollm3(fields: Fields) -> ModelSpec:
    """SmolLM3: every fourth layer has no rope."""
    fields = fields.over(SMOLLM3)
    num_layers, interval = number(fields, "num_hidden_layers"), number(fields, "no_rope_layer_interval")
    rotated = fields.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(num_layers)]
    if len(rotated) != num_layers:
        raise UnsupportedModelError(f"config.json: no_rope_layers names {len(rotated)} layers of {num_layers}")
    window = sliding_window(fields) if flag(fields, "use_sliding_window") else 0
    fields.ignore("sliding_window", "max_window_layers")
    kinds = layer_types(fields, ["full_attention" if each or not window else SLIDING for each in rotated])
    bias, mlp = flag(fields, "attention_bias"), gated_mlp(fields, bias=flag(fields, "mlp_bias"))
    layers = [
        LayerSpec(
            mixer=attention(
                fields,
                rope=rope(fields) if is_rotated else None,
                window=window if kind == SLIDING else 0,
                qkv_bias=bias,
                output_bias=bias,
            ),
            mlp=mlp,
        )
        for kind, is_rotated in zip(kinds, rotated, strict=True)
    ]
    return model(fields, layers)
