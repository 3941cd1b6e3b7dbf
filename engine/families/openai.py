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
    sliding_window,
    sparse_mlp,
    with_default_rope,
    with_defaults,
)
from engine.formats.product import Order
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.experts import ExpertTensors
from engine.spec.model import LayerSpec, ModelSpec

TENSORS = ExpertTensors(router=("mlp.router",), order=Order.INTERLEAVED_COLUMNS)
ALPHA = 1.702


def read_gpt_oss(fields: Fields) -> ModelSpec:
    """gpt-oss: sinks, a window in every second layer, experts with biases and a clamped activation."""
    fields = with_default_rope(fields, "gpt_oss")
    fields = with_defaults(fields, "gpt_oss")
    fields.only("experts_per_token", fields.number("num_experts_per_tok"))
    fields.ignore("initial_context_length")
    kinds = layer_types(fields, every(fields, 2))
    rule = RoutingRule(chosen=fields.number("num_experts_per_tok"), score=Score.SOFTMAX_OF_CHOSEN)
    mlp = replace(
        sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS, router_bias=True),
        expert_bias=True,
        clamp=(ALPHA, fields.real("swiglu_limit", 7.0)),
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
