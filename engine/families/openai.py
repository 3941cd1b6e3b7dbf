"""OpenAI: gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import (
    SLIDING,
    Family,
    Fields,
    attention,
    checked,
    every,
    layer_types,
    model,
    number,
    real,
    sliding_window,
    sparse_mlp,
)
from engine.formats.product import Order
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.experts import ExpertTensors
from engine.spec.model import LayerSpec, ModelSpec

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
}
TENSORS = ExpertTensors(router=("mlp.router",), order=Order.INTERLEAVED_COLUMNS)
ALPHA = 1.702


def read_gpt_oss(fields: Fields) -> ModelSpec:
    """gpt-oss: sinks, a window in every second layer, experts with biases and a clamped activation."""
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields = fields.over({"rope_parameters": YARN})
    fields = fields.over(GPT_OSS)
    fields.only("experts_per_token", number(fields, "num_experts_per_tok"))
    fields.ignore("initial_context_length")
    kinds = layer_types(fields, every(fields, 2))
    rule = RoutingRule(chosen=number(fields, "num_experts_per_tok"), score=Score.SOFTMAX_OF_CHOSEN)
    mlp = replace(
        sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS),
        router_bias=True,
        expert_bias=True,
        clamp=(ALPHA, real(fields, "swiglu_limit", 7.0)),
    )
    bias = bool(fields["attention_bias"])
    layers = {
        kind: LayerSpec(
            mixer=attention(
                fields,
                window=sliding_window(fields) if kind == SLIDING else 0,
                qkv_bias=bias,
                output_bias=bias,
                sinks=True,
            ),
            mlp=mlp,
        )
        for kind in set(kinds)
    }
    return model(fields, [layers[kind] for kind in kinds])


FAMILIES: dict[str, Family] = {
    "GptOssForCausalLM": read_gpt_oss,
}
