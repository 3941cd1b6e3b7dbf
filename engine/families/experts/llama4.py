"""Llama 4's text model: most layers attend within chunks, with rotation and normed heads; the others see all, unrotated."""

from __future__ import annotations

from dataclasses import replace

from engine.families.experts.fields import checked, sparse_mlp
from engine.families.fields import (
    FULL,
    Fields,
    attention,
    flag,
    gated_mlp,
    layer_types,
    model,
    number,
    real,
    rope,
)
from engine.formats.product import Order
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.experts import ExpertTensors, SharedExpertSpec
from engine.spec.model import LayerSpec, ModelSpec
from engine.spec.scaling import QueryGrowth
from engine.weights.names import StoredNames

LLAMA_4 = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
CHUNKED = "chunked_attention"
TENSORS = ExpertTensors(
    router=("feed_forward.router",),
    all=(("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
    order=Order.COLUMNS,
)
VISION = StoredNames(
    renamed={"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    ignored=("vision_model.", "multi_modal_projector."),
)


def read_with_vision(fields: Fields) -> ModelSpec:
    """Llama 4's text model in a checkpoint with a vision tower."""
    fields.ignore("vision_config", "image_token_index", "boi_token_index", "eoi_token_index")
    fields.ignore("image_token_id", "boi_token_id", "eoi_token_id")
    return read(fields.text()).with_names(VISION)


def read(fields: Fields) -> ModelSpec:
    fields = fields.over(LLAMA_4)
    fields.ignore("for_llm_compressor")
    num_layers, every = number(fields, "num_hidden_layers"), number(fields, "no_rope_layer_interval")
    rotated = fields.get("no_rope_layers") or [(layer + 1) % every for layer in range(num_layers)]
    kinds = layer_types(fields, [CHUNKED if there else FULL for there in rotated], known=(CHUNKED, FULL))
    chunk = number(fields, "attention_chunk_size") if CHUNKED in kinds else 0
    size = number(fields, "intermediate_size")
    rule = RoutingRule(chosen=number(fields, "num_experts_per_tok"), score=Score.SIGMOID)
    shared = SharedExpertSpec(size=size, under="feed_forward.shared_expert")
    sparse = sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS, shared=shared)
    sparse = replace(sparse, weighs_inputs=True)
    dense = gated_mlp(fields, size="intermediate_size_mlp", under="feed_forward", down="feed_forward.down_proj")
    step = number(fields, "interleave_moe_layer_step")
    with_experts = fields.get("moe_layers") or range(step - 1, num_layers, step)
    return model(
        fields,
        [
            LayerSpec(
                mixer=_attention(fields, has_rope=bool(there), window=-chunk if kind == CHUNKED else 0),
                mlp=sparse if layer in with_experts else dense,
            )
            for layer, (kind, there) in enumerate(zip(kinds, rotated, strict=True))
        ],
    )


def _attention(fields: Fields, *, has_rope: bool, window: int) -> AttentionSpec:
    bias, rotation = flag(fields, "attention_bias"), rope(fields, theta=500_000.0, interleaved=True)
    growth = QueryGrowth(scale=real(fields, "attn_scale", 0.1), every=number(fields, "floor_scale"), shift=1)
    tuned = bool(fields.get("attn_temperature_tuning")) and not has_rope
    normed = flag(fields, "use_qk_norm") and has_rope
    return attention(
        fields,
        rope=rotation if has_rope else None,
        window=window,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QkNorm(has_weight=False, after_rope=True) if normed else None,
        query_growth=growth if tuned else None,
    )
