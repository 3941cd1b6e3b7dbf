"""Liquid AI: LFM2, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterable

from engine.families.reading import (
    FULL,
    Family,
    Fields,
    attention,
    checked,
    layer_types,
    model,
    rope,
    sparse_mlp,
    with_defaults,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.ends import HeadSpec
from engine.spec.experts import ExpertTensors
from engine.spec.model import BranchSpec, GatedMlpSpec, LayerSpec, MlpSpec, ModelSpec, UnsupportedModelError
from engine.spec.states import ShortConvolutionSpec

CONVOLUTION = "conv"
# Fields that repeat others, or concern weight initialisation.
WRITTEN_TWICE = {"block_dim": "hidden_size", "conv_dim": "hidden_size", "conv_dim_out": "hidden_size"}
WRITTEN_TWICE |= {"num_heads": "num_attention_heads", "block_norm_eps": "norm_eps", "theta": "rope_theta"}
OF_TRAINING = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
QK_NORM = QkNorm(q_name="self_attn.q_layernorm", k_name="self_attn.k_layernorm")
AROUND_MIXER, AROUND_MLP = BranchSpec(before="operator_norm"), BranchSpec(before="ffn_norm")
FINAL_NORM = "model.embedding_norm"
EACH = ("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3", "feed_forward.experts.{}.w2")
TOGETHER = ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")


def read_lfm2(fields: Fields) -> ModelSpec:
    """LFM2: most layers are short convolutions between two gates, the others attention with QK-norm."""
    fields = _renamed(with_defaults(fields, "lfm2"), "block_ff_dim", "intermediate_size")
    fields = _renamed(fields, "tie_embedding", "tie_word_embeddings")
    if fields.get("layer_types") is None:
        layers, with_attention = range(fields.number("num_hidden_layers")), fields.get("full_attn_idxs")
        chosen = set(layers if with_attention is None else with_attention)
        fields = fields.with_values(layer_types=[FULL if layer in chosen else CONVOLUTION for layer in layers])
    fields.ignore("full_attn_idxs", "block_ff_dim")
    return _model(fields, [_gated(_adjusted(fields))] * fields.number("num_hidden_layers"))


def read_lfm2_moe(fields: Fields) -> ModelSpec:
    """LFM2 with experts behind a few dense layers: sigmoid routing, corrected."""
    fields = _renamed(with_defaults(fields, "lfm2_moe"), "tie_embedding", "tie_word_embeddings")
    rule = RoutingRule(
        chosen=fields.number("num_experts_per_tok"),
        score=Score.SIGMOID,
        renormalised=fields.flag("norm_topk_prob"),
        scale=fields.real("routed_scaling_factor", 1.0),
        smallest_sum=1e-6,  # added to sums near 1
    )
    correction = ("feed_forward.expert_bias",) if fields.flag("use_expert_bias") else ()
    tensors = ExpertTensors(router=("feed_forward.gate",), each=EACH, all=(TOGETHER,), correction=correction)
    sparse = sparse_mlp(fields, checked(fields, rule), tensors=tensors)
    dense, num_dense = _gated(fields.number("intermediate_size")), fields.count("num_dense_layers")
    layers = range(fields.number("num_hidden_layers"))
    return _model(fields, [dense if layer < num_dense else sparse for layer in layers])


def _renamed(fields: Fields, name: str, meant: str) -> Fields:
    """The same, with the value of another field if that is present."""
    value = fields.get(name)
    return fields if value is None else fields.with_values(**{meant: value})


def _model(fields: Fields, mlps: Iterable[MlpSpec]) -> ModelSpec:
    for name, other in WRITTEN_TWICE.items():
        if other in fields:
            fields.only(name, fields[other])
    fields.only("block_use_swiglu", True)
    fields.only("use_pos_enc", True)
    fields.ignore("tie_embedding", *OF_TRAINING)
    kinds = layer_types(fields, [], known=(FULL, CONVOLUTION))
    if FULL not in kinds:
        raise UnsupportedModelError(f"config.json: layer_types without {FULL} is not supported")
    taps = fields.number("conv_L_cache")
    if taps < 2:
        raise UnsupportedModelError("config.json: conv_L_cache = 1 is not supported")
    mixers: dict[str, AttentionSpec | ShortConvolutionSpec] = {
        FULL: attention(fields, rope=rope(fields, theta=1_000_000.0), qk_norm=QK_NORM, output="self_attn.out_proj"),
        CONVOLUTION: ShortConvolutionSpec(
            size=fields.number("hidden_size"), taps=taps, has_bias=fields.flag("conv_bias")
        ),
    }
    layers = [
        LayerSpec(mixer=mixers[kind], mlp=mlp, around_mixer=AROUND_MIXER, around_mlp=AROUND_MLP)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    return model(fields, layers, eps="norm_eps", head=HeadSpec(norm=FINAL_NORM))


def _adjusted(fields: Fields) -> int:
    """The width of an MLP: two thirds of the field, rounded up to a multiple, unless it is final."""
    size, multiple = fields.number("intermediate_size"), fields.number("block_multiple_of")
    factor = fields.get("block_ffn_dim_multiplier")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if factor is not None:
        size = -(-int(fields.real("block_ffn_dim_multiplier", 1.0) * size) // multiple) * multiple
    if size < 1:
        raise UnsupportedModelError(f"config.json: block_ffn_dim_multiplier = {factor!r:.40} leaves no MLP")
    return size


def _gated(size: int) -> GatedMlpSpec:
    return GatedMlpSpec(size=size, under="feed_forward", gate="w1", up="w3", down="feed_forward.w2")


FAMILIES: dict[str, Family] = {
    "Lfm2ForCausalLM": read_lfm2,
    "Lfm2MoeForCausalLM": read_lfm2_moe,
}
