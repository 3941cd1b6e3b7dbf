"""Decoders over whole texts, and encoders with their layers: Llama, Mistral, Qwen, EuroBERT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.families.reading import Fields, dtype_of, sliding_window
from engine.pooling.families.reading import names_of, rope_of, swiglu
from engine.pooling.spec import ClassifierSpec, EncoderAttentionSpec, EncoderLayerSpec, EncoderSpec, TokensSpec
from engine.spec.ends import NormSpec
from engine.spec.model import UnsupportedModelError
from modelfiles.scoring import num_labels

Read = Callable[[Fields, bool], EncoderSpec]
Windows = Callable[[Fields], Sequence[int]]


def no_windows(fields: Fields) -> list[int]:
    """Every layer sees all."""
    fields.only("sliding_window")
    return [0] * fields.number("num_hidden_layers")


def one_window(fields: Fields) -> list[int]:
    """Every layer has the same window (Mistral)."""
    return [sliding_window(fields)] * fields.number("num_hidden_layers")


def _labelled(fields: Fields) -> ClassifierSpec:
    """A row for each label, at the last token."""
    return ClassifierSpec(output="score", num_labels=num_labels(fields), pools="lasttoken", has_bias=False)


def with_reward(spec: EncoderSpec, *, labels: int) -> EncoderSpec:
    """The same with Qwen's head of rewards: two products, and relu between them."""
    head = ClassifierSpec(output="score.2", num_labels=labels, pools="lasttoken", dense="score.0", activation="relu")
    return replace(spec, classifier=head)


def with_words(spec: EncoderSpec, words: tuple[int, ...], *, is_tied: bool) -> EncoderSpec:
    """The same with logits of these words as its score."""
    output = spec.tokens.words if is_tied else "lm_head"
    head = ClassifierSpec(output=output, num_labels=1, pools="lasttoken", words=words)
    wanted = tuple(name for name in spec.stored.ignored if is_tied or name != "lm_head.")
    return replace(spec, classifier=head, stored=replace(spec.stored, ignored=wanted))


def read_decoder(
    *, has_qkv_bias: bool = False, head_norms: bool = False, is_causal: bool = True, windows: Windows = no_windows
) -> Read:
    """A reader of the family with these parts: norms before both halves, shared keys and values, a gated MLP."""

    def read(fields: Fields, is_headed: bool) -> EncoderSpec:
        if is_headed and not is_causal:
            raise UnsupportedModelError("config.json: a head of labels on this family is not computed")
        heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
        longest, rope = (
            fields.number("max_position_embeddings"),
            rope_of(fields, "", fields.real("rope_theta", 10_000.0)),
        )
        fields.only("mlp_bias", False)
        mlp = swiglu(fields, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

        def layer(window: int) -> EncoderLayerSpec:
            attention = EncoderAttentionSpec(
                num_heads=heads,
                head_dim=fields.count("head_dim") or hidden // heads,
                inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                output="self_attn.o_proj",
                has_bias=has_qkv_bias or fields.flag("attention_bias"),
                has_output_bias=fields.flag("attention_bias"),
                rope=rope,
                reach=window - 1 if 0 < window < longest else 0,
                num_kv_heads=fields.count("num_key_value_heads") or heads,
                head_norms=("self_attn.q_norm", "self_attn.k_norm") if head_norms else (),
                is_causal=is_causal and fields.get("is_causal") is not False,
            )
            norms = ("input_layernorm", "post_attention_layernorm")
            return EncoderLayerSpec(attention=attention, mlp=mlp, norms=norms, is_prenorm=True)

        return EncoderSpec(
            hidden_size=hidden,
            max_position_embeddings=longest,
            tokens=TokensSpec(words="embed_tokens", vocab_size=fields.number("vocab_size"), norm=""),
            layers=tuple(map(layer, windows(fields))),
            under="layers.{}.",
            norms=NormSpec(kind="rms", eps=fields.real("rms_norm_eps", 1e-6)),
            final_norm="norm",
            dtype=dtype_of(fields),
            classifier=_labelled(fields) if is_headed else None,
            stored=names_of("model.", "rotary_emb."),
        )

    return read


def read_eurobert(fields: Fields, is_headed: bool) -> EncoderSpec:
    """EuroBERT: Llama whose tokens see those behind them, too."""
    # Fields of heads, which are refused, and one that says the same.
    fields.ignore("clf_pooling", "classifier_pooling", "is_causal")
    return read_decoder(is_causal=False)(fields, is_headed)
