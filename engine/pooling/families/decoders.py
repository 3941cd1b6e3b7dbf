"""Decoders over whole texts, and encoders with their layers: Llama, Mistral, Qwen, EuroBERT."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.reading.fields import Fields
from engine.pooling.families.reading import dtype_of, names_of, rope_of
from engine.pooling.spec import EncoderAttentionSpec, EncoderLayerSpec, EncoderSpec, FeedForwardSpec, TokensSpec
from engine.spec.ends import NormSpec
from engine.spec.model import UnsupportedModelError
from engine.weights.names import StoredNames

Read = Callable[[Fields, bool], EncoderSpec]


def _like_llama(
    fields: Fields, *, stored: StoredNames, is_causal: bool, has_qkv_bias: bool, head_norms: bool
) -> EncoderSpec:
    """A decoder's layers over whole texts: norms before both halves, shared keys and values, a gated MLP."""
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    head_dim = fields.count("head_dim") or hidden // heads
    longest, window = fields.number("max_position_embeddings"), fields.count("sliding_window")
    uses_window = window and fields.get("use_sliding_window") is not False and window < longest
    fields.only("mlp_bias", False)
    fields.only("hidden_act", "silu")
    fields.ignore("max_window_layers", "use_sliding_window", "layer_types", "is_causal", "rope_theta", "mask_token_id")
    layer = EncoderLayerSpec(
        attention=EncoderAttentionSpec(
            num_heads=heads,
            head_dim=head_dim,
            inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            output="self_attn.o_proj",
            has_bias=has_qkv_bias,
            has_output_bias=fields.flag("attention_bias"),
            rope=rope_of(fields, "", fields.real("rope_theta", 10_000.0)),
            reach=window - 1 if uses_window else 0,
            num_kv_heads=fields.count("num_key_value_heads") or heads,
            head_norms=("self_attn.q_norm", "self_attn.k_norm") if head_norms else (),
            is_causal=is_causal and fields.get("is_causal") is not False,
        ),
        mlp=FeedForwardSpec(
            inputs=("mlp.gate_proj", "mlp.up_proj"),
            output="mlp.down_proj",
            intermediate_size=fields.number("intermediate_size"),
            activation="silu",
            is_gated=True,
            has_bias=False,
            has_output_bias=False,
        ),
        norms=("input_layernorm", "post_attention_layernorm"),
        is_prenorm=True,
    )
    return EncoderSpec(
        hidden_size=hidden,
        max_position_embeddings=longest,
        tokens=TokensSpec(words="embed_tokens", vocab_size=fields.number("vocab_size"), norm=""),
        layers=(layer,) * fields.number("num_hidden_layers"),
        under="layers.{}.",
        norms=NormSpec(kind="rms", eps=fields.real("rms_norm_eps", 1e-6)),
        final_norm="norm",
        dtype=dtype_of(fields),
        stored=stored,
    )


def read_decoder(*, has_qkv_bias: bool = False, head_norms: bool = False, is_causal: bool = True) -> Read:
    """A reader of the family with these parts."""

    def read(fields: Fields, is_headed: bool) -> EncoderSpec:
        if is_headed:
            raise UnsupportedModelError("config.json: a decoder with a head of labels is not computed")
        biased = has_qkv_bias or fields.flag("attention_bias")
        stored = names_of("model.", "rotary_emb.")
        return _like_llama(fields, stored=stored, is_causal=is_causal, has_qkv_bias=biased, head_norms=head_norms)

    return read
