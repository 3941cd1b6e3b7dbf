"""Mistral AI: Mistral, Mixtral, Ministral and Mistral Small 4."""

from __future__ import annotations

from dataclasses import replace

from engine.families.deepseek import with_experts
from engine.families.reading import (
    ONE_EACH,
    SLIDING,
    W1_W3_W2,
    Family,
    Fields,
    attention,
    checked,
    gated_mlp,
    layer_types,
    magnitude,
    model,
    rope,
    rope_values,
    sliding_window,
    sparse_mlp,
    with_default_rope,
    with_defaults,
    without_rope,
)
from engine.kernels.experts.rule import GroupScore, RoutingRule
from engine.spec.experts import ExpertTensors
from engine.spec.mla import MLASpec
from engine.spec.model import LayerSpec, ModelSpec, UnsupportedModelError
from engine.spec.scaling import QueryGrowth

TENSORS = ExpertTensors(router=("block_sparse_moe.gate", "mlp.gate"), each=W1_W3_W2)


def read_mistral(fields: Fields) -> ModelSpec:
    """Mistral 7B to Large: one kind of layer, with a window or without."""
    fields = with_defaults(fields, "mistral")
    layer = LayerSpec(mixer=attention(fields, window=sliding_window(fields)), mlp=gated_mlp(fields))
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def read_ministral(fields: Fields) -> ModelSpec:
    """Ministral: a window on some layers."""
    fields = with_defaults(fields, "mistral")
    window, mlp = sliding_window(fields), gated_mlp(fields)
    kinds = layer_types(fields, [SLIDING if window else "full_attention"] * fields.number("num_hidden_layers"))
    layers = [LayerSpec(mixer=attention(fields, window=window if kind == SLIDING else 0), mlp=mlp) for kind in kinds]
    return model(fields, layers)


def read_ministral3(fields: Fields) -> ModelSpec:
    """Ministral 3: queries grow with the position."""
    fields = with_defaults(fields, "ministral3")
    rotation = rope(fields, others=("llama_4_scaling_beta",))
    mixer = attention(fields, rope=rotation, window=sliding_window(fields), query_growth=_query_growth(fields))
    return model(fields, [LayerSpec(mixer=mixer, mlp=gated_mlp(fields))] * fields.number("num_hidden_layers"))


def _query_growth(fields: Fields) -> QueryGrowth | None:
    """Read the rope's `llama_4_scaling_beta`."""
    _, values = rope_values(fields)
    beta = values.get("llama_4_scaling_beta")
    if not beta:
        return None
    original = values.get("original_max_position_embeddings") or fields.number("max_position_embeddings")
    return QueryGrowth(scale=float(beta), every=int(original))


def read_mixtral(fields: Fields) -> ModelSpec:
    """Mixtral: Mistral's attention, experts in every layer."""
    rule = checked(fields, RoutingRule(chosen=fields.number("num_experts_per_tok"), renormalised=True))
    layer = LayerSpec(
        mixer=attention(fields, window=sliding_window(fields)),
        mlp=sparse_mlp(fields, rule, size_field="intermediate_size", tensors=TENSORS),
    )
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def read_mistral4(fields: Fields) -> ModelSpec:
    """Mistral Small 4: DeepSeek-V3's layers, routing by softmax, and queries that grow with the position."""
    fields = with_defaults(fields, "mistral4")
    fields = with_default_rope(fields, "mistral4")
    rule = RoutingRule(
        chosen=fields.number("num_experts_per_tok"),
        num_groups=fields.count("n_group") or 1,
        groups_kept=fields.count("topk_group") or 1,
        group_score=GroupScore.TWO_BEST,
        renormalised=fields.flag("norm_topk_prob"),
        scale=fields.real("routed_scaling_factor", 1.0),
    )
    mixers = [_attention_of_mistral4(fields)] * fields.number("num_hidden_layers")
    return with_experts(fields, mixers, checked(fields, rule), ONE_EACH)


def _attention_of_mistral4(fields: Fields) -> MLASpec:
    mixer = without_rope(fields, value_dim=fields.number("v_head_dim"))
    name, values = rope_values(fields)
    share = values.get("partial_rotary_factor")
    if share is not None and round(share * mixer.sizes.query) != mixer.sizes.rotated:
        raise UnsupportedModelError(
            f"config.json: {name}.partial_rotary_factor = {share!r:.40} is not what qk_rope_head_dim says"
        )
    rotation = rope(fields, interleaved=fields.flag("rope_interleave"), others=("llama_4_scaling_beta",))
    # The share is of a whole head; the part outside the latents is rotated whole.
    rotation, scale = replace(rotation, share=1.0), mixer.scale * magnitude(fields) ** 2
    return replace(mixer, rope=rotation, scale=scale, query_growth=_query_growth(fields))


FAMILIES: dict[str, Family] = {
    "MistralForCausalLM": read_mistral,
    "MinistralForCausalLM": read_ministral,
    "Ministral3ForCausalLM": read_ministral3,
    "Mistral4ForCausalLM": read_mistral4,
    "MixtralForCausalLM": read_mixtral,
}
