"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's layers, whose attention sees only positions that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.families.experts.fields import CORRECTED, sigmoid_rule
from engine.families.experts.with_latents.deepseek import V3, with_experts
from engine.families.fields import Fields, count, layer_types, number
from engine.families.latents import latent_attention
from engine.spec.latents import IndexerSpec, LatentAttentionSpec
from engine.spec.model import ModelSpec, UnsupportedModelError

SPARSE_ATTENTION = "deepseek_sparse_attention"
FULL, SHARED = "full", "shared"
_LETTERS = {"F": FULL, "S": SHARED}

COMMON = V3 | {
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 0,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
GLM_5 = COMMON | {
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
}


def read_deepseek(fields: Fields) -> ModelSpec:
    """DeepSeek-V3.2: DeepSeek-V3's layers, attention to the positions that each layer's indexer chooses."""
    fields = _over(fields, COMMON)
    fields.only("indexer_rope_interleave", False)
    mixers = [_mixer(fields, interleaved=False)] * number(fields, "num_hidden_layers")
    return with_experts(fields, mixers, sigmoid_rule(fields), CORRECTED)


def read_glm(fields: Fields) -> ModelSpec:
    """GLM-5: DeepSeek-V3.2's layers; some have no indexer, and attend to what the one before them chose."""
    fields = _over(fields, GLM_5)
    fields.only("indexer_rope_interleave", True)
    fields.ignore("index_share_for_mtp_iteration")  # layers that predict further tokens
    mixer, kinds = _mixer(fields, interleaved=True), _indexer_types(fields)
    mixers = [mixer if kind == FULL else replace(mixer, indexer=None) for kind in kinds]
    spec = with_experts(fields, mixers, sigmoid_rule(fields), CORRECTED)
    # A checkpoint may have indexers of the others, too.
    unread = tuple(f"model.layers.{layer}.self_attn.indexer." for layer, kind in enumerate(kinds) if kind == SHARED)
    return replace(spec, stored=replace(spec.stored, ignored=(*spec.stored.ignored, *unread)))


def _over(fields: Fields, defaults: Mapping[str, object]) -> Fields:
    if "num_local_experts" not in fields and "num_experts" not in fields:
        fields = fields.over({"n_routed_experts": 256})
    fields = fields.over(defaults)
    fields.only("mlp_bias", False)
    fields.only("rope_interleave", True)
    layer_types(fields, [SPARSE_ATTENTION] * number(fields, "num_hidden_layers"), known=(SPARSE_ATTENTION,))
    return fields


def _mixer(fields: Fields, *, interleaved: bool) -> LatentAttentionSpec:
    """`interleaved`: how the indexer's heads are rotated; the layer's own are always."""
    mixer = latent_attention(fields, interleaved=True, value_dim=number(fields, "v_head_dim"))
    rank, dim = number(fields, "q_lora_rank"), number(fields, "index_head_dim")
    if dim < mixer.rotated_dim:
        raise UnsupportedModelError(
            f"config.json: index_head_dim = {dim} is less than qk_rope_head_dim = {mixer.rotated_dim}, which it rotates"
        )
    indexer = IndexerSpec(num_heads=number(fields, "index_n_heads"), dim=dim, interleaved=interleaved)
    return replace(mixer, query_rank=rank, most=number(fields, "index_topk"), indexer=indexer)


def _indexer_types(fields: Fields) -> list[str]:
    """Read each layer's kind: `indexer_types`, `index_topk_pattern`, or `index_topk_freq` after `index_skip_topk_offset`."""
    num_layers, every = number(fields, "num_hidden_layers"), count(fields, "index_topk_freq") or 1
    offset = 2 if fields.get("index_skip_topk_offset") is None else count(fields, "index_skip_topk_offset")
    name, pattern, said = "indexer_types", fields.get("index_topk_pattern"), fields.get("indexer_types")
    if said is None and pattern is not None:
        name, said = "index_topk_pattern", pattern
    if said is None:
        said = [SHARED if max(layer - offset + 1, 0) % every else FULL for layer in range(num_layers)]
    kinds = [str(kind) for kind in said] if isinstance(said, str | list) else []
    if said is pattern:
        kinds = [_LETTERS.get(kind, kind) for kind in kinds]
    if set(kinds) - {FULL, SHARED} or len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"config.json: {name} = {said!r:.80} is not supported: it must say full or shared for each of"
            f" {num_layers} layers"
        )
    if kinds[0] != FULL:
        raise UnsupportedModelError(f"config.json: {name} begins with a shared layer, before any that chooses")
    return kinds
