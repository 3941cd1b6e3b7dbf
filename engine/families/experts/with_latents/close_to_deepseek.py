"""Models that differ from DeepSeek-V3 in one thing: Mistral Small 4 and A.X K1."""

from __future__ import annotations

from dataclasses import replace

from engine.families.dense.mistral import query_growth
from engine.families.experts.fields import CORRECTED, ONE_EACH, checked, sigmoid_rule
from engine.families.experts.with_latents.deepseek import V3, with_experts
from engine.families.fields import Fields, count, flag, number, real, rope
from engine.families.latents import latent_attention, magnitude, without_rope
from engine.families.ropes import rope_values
from engine.kernels.experts.rule import GroupScore, RoutingRule
from engine.spec.latents import LatentAttentionSpec
from engine.spec.model import BranchSpec, ModelSpec, UnsupportedModelError

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
ROTATION = {
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
AXK_1 = V3 | {
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32768,
    "num_nextn_predict_layers": 0,
}
NORMED = BranchSpec(before="post_attention_layernorm", after="post_mlp_layernorm")


def read_mistral(fields: Fields) -> ModelSpec:
    """Mistral Small 4: DeepSeek-V3's layers, routing by softmax, and queries that grow with the position."""
    if "num_local_experts" not in fields:
        fields = fields.over({"n_routed_experts": 128})
    fields = fields.over(MISTRAL_4)
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields = fields.with_values(rope_parameters=ROTATION)
    rule = RoutingRule(
        chosen=number(fields, "num_experts_per_tok"),
        num_groups=count(fields, "n_group") or 1,
        groups_kept=count(fields, "topk_group") or 1,
        group_score=GroupScore.TWO_BEST,
        renormalised=flag(fields, "norm_topk_prob"),
        scale=real(fields, "routed_scaling_factor", 1.0),
    )
    mixers = [_mistrals_attention(fields)] * number(fields, "num_hidden_layers")
    return with_experts(fields, mixers, checked(fields, rule), ONE_EACH)


def _mistrals_attention(fields: Fields) -> LatentAttentionSpec:
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
    return replace(mixer, rope=rotation, scale=scale, query_growth=query_growth(fields))


def read_axk(fields: Fields) -> ModelSpec:
    """A.X K1 (SK Telecom): DeepSeek-V3 with a norm behind its experts."""
    if "num_local_experts" not in fields:
        fields = fields.over({"n_routed_experts": 192})
    fields = fields.over(AXK_1)
    interleaved = flag(fields, "rope_interleave")
    mixer = latent_attention(fields, interleaved=interleaved, value_dim=number(fields, "v_head_dim"))
    mixers = [mixer] * number(fields, "num_hidden_layers")
    return with_experts(fields, mixers, sigmoid_rule(fields), CORRECTED, around_experts=NORMED)
