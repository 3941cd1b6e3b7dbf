"""Gemma 3's text model over whole texts: EmbeddingGemma, whose tokens see both ways."""

from __future__ import annotations

from engine.families.reading import Fields, dtype_of
from engine.families.reading.layers import FULL, SLIDING, every, layer_types
from engine.pooling.families.reading import activation_of, names_of, rope_of
from engine.pooling.spec import EncoderAttentionSpec, EncoderLayerSpec, EncoderSpec, FeedForwardSpec, TokensSpec
from engine.spec.ends import NormSpec
from engine.spec.model import UnsupportedModelError

THETAS = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


def read_gemma3(fields: Fields, is_headed: bool) -> EncoderSpec:
    """Gemma 3: norms around both halves, scaled rows, windows in most layers; both ways half a window on each side."""
    if is_headed:
        raise UnsupportedModelError("config.json: a head of labels on this family is not computed")
    for name in ("attn_logit_softcapping", "attention_bias", "mlp_bias"):
        fields.only(name, False)
    fields.ignore("final_logit_softcapping")  # the missing head's
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    window, is_causal = fields.number("sliding_window"), not fields.flag("use_bidirectional_attention")
    mlp = FeedForwardSpec(
        inputs=("mlp.gate_proj", "mlp.up_proj"),
        output="mlp.down_proj",
        intermediate_size=fields.number("intermediate_size"),
        activation=activation_of(fields, "hidden_activation"),
        is_gated=True,
        has_bias=False,
    )

    def layer(kind: str) -> EncoderLayerSpec:
        name, theta = THETAS[kind]
        attention = EncoderAttentionSpec(
            num_heads=heads,
            head_dim=fields.count("head_dim") or 256,
            inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            output="self_attn.o_proj",
            has_bias=False,
            has_output_bias=False,
            rope=rope_of(fields, kind, fields.real(name, theta)),
            reach=0 if kind == FULL else window - 1 if is_causal else window // 2,
            num_kv_heads=fields.count("num_key_value_heads") or heads,
            head_norms=("self_attn.q_norm", "self_attn.k_norm"),
            is_causal=is_causal,
            scale=fields.real("query_pre_attn_scalar", 256.0) ** -0.5,
        )
        return EncoderLayerSpec(
            attention=attention,
            mlp=mlp,
            norms=("input_layernorm", "pre_feedforward_layernorm"),
            after=("post_attention_layernorm", "post_feedforward_layernorm"),
            is_prenorm=True,
        )

    kinds = layer_types(fields, every(fields, fields.count("sliding_window_pattern") or 6))
    fields.ignore("sliding_window_pattern", *(name for name, _ in THETAS.values()))
    words = TokensSpec(words="embed_tokens", vocab_size=fields.number("vocab_size"), norm="", multiplier=hidden**0.5)
    return EncoderSpec(
        hidden_size=hidden,
        max_position_embeddings=fields.number("max_position_embeddings"),
        tokens=words,
        layers=tuple(map(layer, kinds)),
        under="layers.{}.",
        norms=NormSpec(kind="rms_plus_one", eps=fields.real("rms_norm_eps", 1e-6)),
        final_norm="norm",
        dtype=dtype_of(fields),
        stored=names_of("model.", "rotary_emb."),
        overflows=True,
    )
