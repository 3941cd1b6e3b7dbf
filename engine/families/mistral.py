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
    count,
    flag,
    gated_mlp,
    layer_types,
    magnitude,
    model,
    number,
    real,
    rope,
    rope_values,
    sliding_window,
    sparse_mlp,
    without_rope,
)
from engine.kernels.experts.rule import GroupScore, RoutingRule
from engine.spec.experts import ExpertTensors
from engine.spec.mla import MLASpec
from engine.spec.model import LayerSpec, ModelSpec, UnsupportedModelError
from engine.spec.scaling import QueryGrowth

MISTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
MINISTRAL_3 = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": 262144,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
TENSORS = ExpertTensors(router=("block_sparse_moe.gate", "mlp.gate"), each=W1_W3_W2)
MISTRAL_4 = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
# Default of `rope_parameters` where a config.json has none.
MISTRAL_4_ROPE = {
    "type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_mistral(fields: Fields) -> ModelSpec:
    """Mistral 7B to Large: one kind of layer, with a window or without."""
    fields = fields.over(MISTRAL)
    layer = LayerSpec(mixer=attention(fields, window=sliding_window(fields)), mlp=gated_mlp(fields))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_ministral(fields: Fields) -> ModelSpec:
    """Ministral: a window on some layers."""
    fields = fields.over(MISTRAL)
    window, mlp = sliding_window(fields), gated_mlp(fields)
    kinds = layer_types(fields, [SLIDING if window else "full_attention"] * number(fields, "num_hidden_layers"))
    layers = [LayerSpec(mixer=attention(fields, window=window if kind == SLIDING else 0), mlp=mlp) for kind in kinds]
    return model(fields, layers)


def read_ministral3(fields: Fields) -> ModelSpec:
    """Ministral 3: queries grow with the position."""
    fields = fields.over(MINISTRAL_3)
    rotation = rope(fields, others=("llama_4_scaling_beta",))
    mixer = attention(fields, rope=rotation, window=sliding_window(fields), query_growth=_query_growth(fields))
    return model(fields, [LayerSpec(mixer=mixer, mlp=gated_mlp(fields))] * number(fields, "num_hidden_layers"))


def _query_growth(fields: Fields) -> QueryGrowth | None:
    """Read `llama_4_scaling_beta` of the rotation."""
    _, values = rope_values(fields)
    beta = values.get("llama_4_scaling_beta")
    if not beta:
        return None
    original = values.get("original_max_position_embeddings") or number(fields, "max_position_embeddings")
    return QueryGrowth(scale=float(beta), every=int(original))


def read_mixtral(fields: Fields) -> ModelSpec:
    """Mixtral: Mistral's attention, experts in every layer."""
    rule = checked(fields, RoutingRule(chosen=number(fields, "num_experts_per_tok"), renormalised=True))
    layer = LayerSpec(
        mixer=attention(fields, window=sliding_window(fields)),
        mlp=sparse_mlp(fields, rule, size_field="intermediate_size", tensors=TENSORS),
    )
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_mistral4(fields: Fields) -> ModelSpec:
    """Mistral Small 4: DeepSeek-V3's layers, routing by softmax, and queries that grow with the position."""
    if "num_local_experts" not in fields:
        fields = fields.over({"n_routed_experts": 128})
    fields = fields.over(MISTRAL_4)
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields = fields.with_values(rope_parameters=MISTRAL_4_ROPE)
    rule = RoutingRule(
        chosen=number(fields, "num_experts_per_tok"),
        num_groups=count(fields, "n_group") or 1,
        groups_kept=count(fields, "topk_group") or 1,
        group_score=GroupScore.TWO_BEST,
        renormalised=flag(fields, "norm_topk_prob"),
        scale=real(fields, "routed_scaling_factor", 1.0),
    )
    mixers = [_attention_of_mistral4(fields)] * number(fields, "num_hidden_layers")
    return with_experts(fields, mixers, checked(fields, rule), ONE_EACH)


def _attention_of_mistral4(fields: Fields) -> MLASpec:
    mixer = without_rope(fields, value_dim=number(fields, "v_head_dim"))
    name, values = rope_values(fields)
    share = values.get("partial_rotary_factor")
    if share is not None and round(share * mixer.query_dim) != mixer.rotated_dim:
        raise UnsupportedModelError(
            f"config.json: {name}.partial_rotary_factor = {share!r:.40} is not what qk_rope_head_dim says"
        )
    rotation = rope(fields, interleaved=flag(fields, "rope_interleave"), others=("llama_4_scaling_beta",))
    # The share is of a whole head; all of the part beside the latents is rotated.
    rotation, scale = replace(rotation, share=1.0), mixer.scale * magnitude(fields) ** 2
    return replace(mixer, rope=rotation, scale=scale, query_growth=_query_growth(fields))


FAMILIES: dict[str, Family] = {
    "MistralForCausalLM": read_mistral,
    "MinistralForCausalLM": read_ministral,
    "Ministral3ForCausalLM": read_ministral3,
    "Mistral4ForCausalLM": read_mistral4,
    "MixtralForCausalLM": read_mixtral,
}
