"""GLM (Z.ai): GLM-4 to 5, dense and with experts, and the text models of the V series.

The three positions that images have are one in text.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.deepseek import over_sparse, sparse_attention, with_experts, with_one_attention
from engine.families.reading import (
    CORRECTED,
    OF_IMAGES,
    VISUAL,
    Family,
    Fields,
    attention,
    gated_mlp,
    model,
    rope,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
    text_of,
    with_defaults,
    without_predictions,
)
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.mla import SparseSpec
from engine.spec.model import BEFORE_MIXER, BEFORE_MLP, BranchSpec, LayerSpec, ModelSpec, UnsupportedModelError

AROUND_MIXER = BranchSpec(before="input_layernorm", after="post_self_attn_layernorm")
AROUND_MLP = BranchSpec(before="post_attention_layernorm", after="post_mlp_layernorm")
_OWN, _SHARED = "full", "shared"
_LETTERS = {"F": _OWN, "S": _SHARED}


def read_glm(fields: Fields) -> ModelSpec:
    """GLM-4 9B: half of each head is rotated, in interleaved pairs."""
    return _read(fields, BEFORE_MIXER, BEFORE_MLP)


def read_glm4(fields: Fields) -> ModelSpec:
    """GLM-4-0414: GLM-4 with norms around both halves."""
    return _read(fields, AROUND_MIXER, AROUND_MLP)


def _text_of_glm4(fields: Fields, others: tuple[str, ...]) -> ModelSpec:
    """GLM-4-0414 with all fields given; `others` are ignored keys of its rope."""
    mixer = attention(
        fields, rope=rope(fields, interleaved=True, others=others), qkv_bias=fields.flag("attention_bias")
    )
    return _model(fields, mixer, AROUND_MIXER, AROUND_MLP)


def _read(fields: Fields, around_mixer: BranchSpec, around_mlp: BranchSpec) -> ModelSpec:
    fields = with_defaults(fields, "glm4")
    mixer = attention(fields, rope=rope(fields, interleaved=True), qkv_bias=fields.flag("attention_bias"))
    return _model(fields, mixer, around_mixer, around_mlp)


def _model(fields: Fields, mixer: AttentionSpec, around_mixer: BranchSpec, around_mlp: BranchSpec) -> ModelSpec:
    mlp = gated_mlp(fields, fused="mlp.gate_up_proj")
    layer = LayerSpec(mixer=mixer, mlp=mlp, around_mixer=around_mixer, around_mlp=around_mlp)
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def read_glm4_moe(fields: Fields) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7: partly rotated heads; sigmoid routing with a correction, and an expert that all tokens share."""
    return _text_of_glm4_moe(fields)


def _text_of_glm4_moe(fields: Fields, others: tuple[str, ...] = ()) -> ModelSpec:
    """GLM-4.5; `others` are ignored keys of its rope."""
    fields = with_defaults(fields, "glm4_moe")
    dense, stored = gated_mlp(fields), without_predictions(fields)
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=CORRECTED, shared=shared_experts(fields))
    qk_norm = QkNorm() if fields.flag("use_qk_norm") else None
    rotation = rope(fields, others=others)
    mixer = attention(fields, rope=rotation, qkv_bias=fields.flag("attention_bias"), qk_norm=qk_norm)
    num_dense = fields.count("first_k_dense_replace")
    layers = [
        LayerSpec(mixer=mixer, mlp=dense if layer < num_dense else sparse)
        for layer in range(fields.number("num_hidden_layers"))
    ]
    return model(fields, layers, stored=stored)


def read_glm4_flash(fields: Fields) -> ModelSpec:
    """GLM-4.7-Flash: DeepSeek-V3's layers, smaller."""
    fields = with_defaults(fields, "glm4_moe_lite")
    return with_one_attention(fields, sigmoid_rule(fields), CORRECTED, interleaved=fields.flag("rope_interleave"))


def read_glm5(fields: Fields) -> ModelSpec:
    """GLM-5: DeepSeek-V3.2's layers; some have no indexer, and attend to what the one before them chose."""
    fields = over_sparse(fields, "glm_moe_dsa")
    fields.only("indexer_rope_interleave", True)
    fields.ignore("index_share_for_mtp_iteration")  # layers that predict further tokens
    mixer, kinds = sparse_attention(fields, interleaved=True), _indexer_types(fields)
    follower = replace(mixer, sparse=SparseSpec(most=fields.number("index_topk")))
    mixers = [mixer if kind == _OWN else follower for kind in kinds]
    spec = with_experts(fields, mixers, sigmoid_rule(fields), CORRECTED)
    # A checkpoint may also have indexers of layers that don't use them.
    unread = tuple(f"model.layers.{layer}.self_attn.indexer." for layer, kind in enumerate(kinds) if kind == _SHARED)
    return replace(spec, stored=replace(spec.stored, ignored=(*spec.stored.ignored, *unread)))


def _indexer_types(fields: Fields) -> list[str]:
    """Read each layer's kind: `indexer_types`, `index_topk_pattern`, or `index_topk_freq` after `index_skip_topk_offset`."""
    num_layers, every = fields.number("num_hidden_layers"), fields.count("index_topk_freq") or 1
    offset = 2 if fields.get("index_skip_topk_offset") is None else fields.count("index_skip_topk_offset")
    name, pattern, said = "indexer_types", fields.get("index_topk_pattern"), fields.get("indexer_types")
    if said is None and pattern is not None:
        name, said = "index_topk_pattern", pattern
    if said is None:
        said = [_SHARED if max(layer - offset + 1, 0) % every else _OWN for layer in range(num_layers)]
    kinds = [str(kind) for kind in said] if isinstance(said, str | list) else []
    if said is pattern:
        kinds = [_LETTERS.get(kind, kind) for kind in kinds]
    if set(kinds) - {_OWN, _SHARED} or len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"config.json: {name} = {said!r:.80} is not supported: it must say full or shared for each of"
            f" {num_layers} layers"
        )
    if kinds[0] != _OWN:
        raise UnsupportedModelError(f"config.json: {name} begins with a shared layer, before any that chooses")
    return kinds


def read_glm4_vision(fields: Fields) -> ModelSpec:
    """GLM-4.1V: GLM-4-0414's text model in a checkpoint with a vision tower."""
    fields = text_of(fields, "glm4v_text")
    fields.only("attention_bias", True)
    return _text_of_glm4(fields, OF_IMAGES).with_names(VISUAL)


def read_glm4_moe_vision(fields: Fields) -> ModelSpec:
    """GLM-4.5V and 4.6V: GLM-4.5's text model in a checkpoint with a vision tower."""
    return _text_of_glm4_moe(text_of(fields, "glm4v_moe_text"), OF_IMAGES).with_names(VISUAL)


def read_glm4_6_vision(fields: Fields) -> ModelSpec:
    """GLM-4.6V Flash: the text model is one of the two."""
    text = fields.get("text_config") or {}
    kind = text.get("model_type", "glm4v_text")
    if kind not in ("glm4v_text", "glm4v_moe_text"):
        raise UnsupportedModelError(f"config.json: text_config.model_type = {kind!r:.40} is not supported")
    return (read_glm4_vision if kind == "glm4v_text" else read_glm4_moe_vision)(fields)


FAMILIES: dict[str, Family] = {
    "GlmForCausalLM": read_glm,
    "Glm4ForCausalLM": read_glm4,
    "Glm4MoeLiteForCausalLM": read_glm4_flash,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "GlmMoeDsaForCausalLM": read_glm5,
    "Glm4vForConditionalGeneration": read_glm4_vision,
    "Glm46VForConditionalGeneration": read_glm4_6_vision,
    "Glm4vMoeForConditionalGeneration": read_glm4_moe_vision,
}
