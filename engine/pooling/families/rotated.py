"""Encoders whose heads are rotated: ModernBERT, NomicBert."""

from __future__ import annotations

from engine.families.reading import SLIDING, Fields, dtype_of, layer_types
from engine.families.reading.layers import FULL
from engine.pooling.families.reading import (
    activation_of,
    names_of,
    packed_attention,
    renamed,
    rope_of,
    swiglu,
    tokens_of,
)
from engine.pooling.spec import (
    ClassifierSpec,
    EncoderLayerSpec,
    EncoderSpec,
    ExpertsSpec,
    FeedForwardSpec,
    TokensSpec,
)
from engine.spec.ends import NormSpec
from engine.spec.model import UnsupportedModelError
from modelfiles.scoring import num_labels


def read_modern_bert(fields: Fields, is_headed: bool) -> EncoderSpec:
    """ModernBERT: norms before both halves, rotated heads, and in most layers a window on each side."""
    has_bias, reach = fields.flag("attention_bias"), (fields.count("local_attention") or 128) // 2
    every = fields.count("global_attn_every_n_layers") or 3
    kinds = layer_types(fields, [SLIDING if at % every else FULL for at in range(fields.number("num_hidden_layers"))])
    mlp = FeedForwardSpec(
        inputs=("mlp.Wi",),
        output="mlp.Wo",
        intermediate_size=fields.number("intermediate_size"),
        activation=activation_of(fields, "hidden_activation"),
        is_gated=True,
        has_bias=fields.flag("mlp_bias"),
    )
    own = {
        FULL: (0, rope_of(fields, FULL, fields.real("global_rope_theta", 160_000.0))),
        SLIDING: (reach, rope_of(fields, SLIDING, fields.real("local_rope_theta", 10_000.0))),
    }
    attentions = {
        kind: packed_attention(fields, "attn.Wo", rope=rope, has_bias=has_bias, reach=reach)
        for kind, (reach, rope) in own.items()
    }

    def layer(at: int, kind: str) -> EncoderLayerSpec:
        norms = ("attn_norm" if at else "", "mlp_norm")
        return EncoderLayerSpec(attention=attentions[kind], mlp=mlp, norms=norms, is_prenorm=True)

    fields.only("classifier_pooling", "cls", "mean")
    head = ClassifierSpec(
        dense="head.dense",
        output="classifier",
        num_labels=num_labels(fields),
        pools=str(fields.get("classifier_pooling") or "cls"),
        activation=activation_of(fields, "classifier_activation"),
        norm="head.norm",
        has_dense_bias=fields.flag("classifier_bias"),
    )
    fields.ignore(*_OF_MODERN_BERT)
    return EncoderSpec(
        hidden_size=fields.number("hidden_size"),
        max_position_embeddings=fields.number("max_position_embeddings"),
        tokens=TokensSpec(
            words="embeddings.tok_embeddings", vocab_size=fields.number("vocab_size"), norm="embeddings.norm"
        ),
        layers=tuple(layer(at, kind) for at, kind in enumerate(kinds)),
        under="layers.{}.",
        norms=NormSpec(kind="layer", eps=fields.real("norm_eps", 1e-5), has_bias=fields.flag("norm_bias")),
        final_norm="final_norm",
        classifier=head if is_headed else None,
        dtype=dtype_of(fields),
        stored=names_of("model.", "decoder.", *(() if is_headed else ("head.", "classifier."))),
    )


_OF_MODERN_BERT = (
    "decoder_bias", "deterministic_flash_attn", "initializer_cutoff_factor", "mlp_dropout", "sparse_pred_ignore_index",
    "sparse_prediction", "reference_compile", "cls_token_id", "repad_logits_with_grad",
)  # fmt: skip


def read_nomic_bert(fields: Fields, is_headed: bool) -> EncoderSpec:
    """NomicBert: BERT without learnt positions, with rotated heads; by the names of either configuration.

    The MLP is gated, or a plain one that experts replace in every so many layers, from the second on.
    """
    if is_headed:
        raise UnsupportedModelError("config.json: NomicBertForSequenceClassification is not computed")
    fields = renamed(fields, _OF_NOMIC)
    fields.only("activation_function", "swiglu", "gelu")
    fields.only("rotary_emb_fraction", 1.0)
    fields.only("scale_attn_weights", True)
    for name in _OFF_IN_NOMIC:
        fields.only(name, False, 0)
    fields.ignore(*_HARMLESS_OF_NOMIC)
    rope = rope_of(fields, "", fields.real("rotary_emb_base", 10_000.0))
    attention = packed_attention(fields, "attn.out_proj", rope=rope, has_bias=fields.flag("qkv_proj_bias"))
    mixed, plain = _experts_of_nomic(fields), _mlp_of_nomic(fields)
    every = fields.number("moe_every_n_layers") if mixed is not None else 0

    def layer(at: int) -> EncoderLayerSpec:
        mlp = mixed if mixed is not None and at % every == 1 % every else plain
        return EncoderLayerSpec(attention=attention, mlp=mlp, norms=("norm1", "norm2"))

    types = fields.count("type_vocab_size")
    found = EncoderSpec(
        hidden_size=fields.number("hidden_size"),
        max_position_embeddings=fields.number("max_position_embeddings"),
        tokens=tokens_of(fields, norm="emb_ln", num_types=types),
        layers=tuple(map(layer, range(fields.number("num_hidden_layers")))),
        under="encoder.layers.{}.",
        norms=NormSpec(kind="layer", eps=fields.real("layer_norm_eps", 1e-12), has_bias=True),
        dtype=dtype_of(fields),
        stored=names_of("bert.", "pooler."),
    )
    fields.check_all_known(remedy="")
    return found


def _mlp_of_nomic(fields: Fields) -> FeedForwardSpec:
    if fields.get("activation_function") != "gelu":
        for name in ("mlp_fc1_bias", "mlp_fc2_bias"):
            fields.only(name, False)
        return swiglu(fields, "mlp.fc12", "mlp.fc11", "mlp.fc2")
    return FeedForwardSpec(
        inputs=("mlp.fc1",),
        output="mlp.fc2",
        intermediate_size=fields.number("intermediate_size"),
        activation="gelu",
        has_bias=fields.flag("mlp_fc1_bias"),
        has_output_bias=fields.flag("mlp_fc2_bias"),
    )


def _experts_of_nomic(fields: Fields) -> ExpertsSpec | None:
    count = fields.count("num_experts")
    fields.ignore("moe_impl", "moe_resid_pdrop", "router_aux_loss_coef")
    if not count:
        fields.ignore("moe_every_n_layers", "moe_top_k")
        return None
    fields.only("activation_function", "gelu")
    for name, off in (
        ("moe_normalize_expert_weights", False),
        ("expert_choice_router", False),
        ("num_shared_experts", 0),
    ):
        fields.only(name, off)
    fields.only("ffn_div", 1)
    chosen = fields.number("moe_top_k")
    if chosen > count:
        raise UnsupportedModelError(f"config.json: moe_top_k = {chosen} of num_experts = {count} can't be chosen")
    return ExpertsSpec(
        router="mlp.router.layer",
        up="mlp.experts.mlp.w1",
        down="mlp.experts.mlp.w2",
        bias="mlp.experts.bias",
        count=count,
        chosen=chosen,
        intermediate_size=fields.number("intermediate_size"),
        activation="gelu",
    )


_OF_NOMIC = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
_OFF_IN_NOMIC = (
    "prenorm", "use_rms_norm", "parallel_block", "causal",
    "rotary_emb_interleaved", "rotary_emb_scale_base", "rotary_scaling_factor", "scale_attn_by_inverse_layer_idx",
)  # fmt: skip
_HARMLESS_OF_NOMIC = (
    "attn_pdrop", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "head_dim", "last_layer_subset",
    "mlp_checkpoint_lvl", "pad_vocab_size_multiple", "reorder_and_upcast_attn", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "use_xentropy",
    "max_trained_positions",
)  # fmt: skip
