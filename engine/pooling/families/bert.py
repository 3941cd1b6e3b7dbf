"""BERT and its kin: learnt positions, norms behind both halves."""

from __future__ import annotations

from engine.families.reading.fields import Fields
from engine.pooling.families.reading import activation_of, dtype_of, heads_of, names_of, num_labels
from engine.pooling.spec import (
    BiasSpec,
    ClassifierSpec,
    EncoderAttentionSpec,
    EncoderLayerSpec,
    EncoderSpec,
    FeedForwardSpec,
    TokensSpec,
)
from engine.spec.ends import NormSpec
from engine.weights.names import StoredNames
from modelfiles.pooling import first_position

_LAYER = "encoder.layer.{}."


def _like_bert(
    fields: Fields,
    *,
    parts: tuple[str, str, str, str],
    norm_of_attention: str,
    tokens: TokensSpec,
    classifier: ClassifierSpec | None,
    stored: StoredNames,
    distances: BiasSpec | None = None,
) -> EncoderSpec:
    """BERT's layer: norms behind both halves, biases everywhere. `parts`: queries, keys, values and output of attention."""
    heads, head_dim = heads_of(fields)
    layer = EncoderLayerSpec(
        attention=EncoderAttentionSpec(num_heads=heads, head_dim=head_dim, inputs=parts[:3], output=parts[3]),
        mlp=FeedForwardSpec(
            inputs=("intermediate.dense",),
            output="output.dense",
            intermediate_size=fields.number("intermediate_size"),
            activation=activation_of(fields, "hidden_act"),
        ),
        norms=(norm_of_attention, "output.LayerNorm"),
    )
    return EncoderSpec(
        hidden_size=fields.number("hidden_size"),
        max_position_embeddings=tokens.num_positions - tokens.first_position,
        tokens=tokens,
        layers=(layer,) * fields.number("num_hidden_layers"),
        under=_LAYER,
        norms=NormSpec(kind="layer", eps=fields.real("layer_norm_eps", 1e-12), has_bias=True),
        classifier=classifier,
        distances=distances,
        dtype=dtype_of(fields),
        stored=stored,
    )


def _tables(fields: Fields, *, num_types: int) -> TokensSpec:
    fields.only("position_embedding_type", "absolute")
    return TokensSpec(
        words="embeddings.word_embeddings",
        vocab_size=fields.number("vocab_size"),
        norm="embeddings.LayerNorm",
        positions="embeddings.position_embeddings",
        num_positions=fields.number("max_position_embeddings"),
        first_position=first_position(fields),
        types="embeddings.token_type_embeddings" if num_types else "",
        num_types=num_types,
    )


_OF_BERT = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
)  # fmt: skip


def read_bert(fields: Fields, is_headed: bool) -> EncoderSpec:
    """BERT: positions and types are learnt; a head reads the pooler's vector."""
    head = ClassifierSpec(output="classifier", num_labels=num_labels(fields), dense="pooler.dense")
    unused = ("embeddings.position_ids",) if is_headed else ("embeddings.position_ids", "pooler.")
    return _like_bert(
        fields,
        parts=_OF_BERT,
        norm_of_attention="attention.output.LayerNorm",
        tokens=_tables(fields, num_types=fields.count("type_vocab_size") or 2),
        classifier=head if is_headed else None,
        stored=names_of("bert.", *unused),
    )


def read_roberta(fields: Fields, is_headed: bool) -> EncoderSpec:
    """RoBERTa and XLM-R: BERT whose positions count from the one behind the padding's."""
    head = ClassifierSpec(output="classifier.out_proj", num_labels=num_labels(fields), dense="classifier.dense")
    return _like_bert(
        fields,
        parts=_OF_BERT,
        norm_of_attention="attention.output.LayerNorm",
        tokens=_tables(fields, num_types=fields.count("type_vocab_size") or 1),
        classifier=head if is_headed else None,
        stored=names_of("roberta.", "embeddings.position_ids", "pooler."),
    )


def read_mpnet(fields: Fields, is_headed: bool) -> EncoderSpec:
    """MPNet: RoBERTa without types, whose scores have a bias by distance."""
    head = ClassifierSpec(output="classifier.out_proj", num_labels=num_labels(fields), dense="classifier.dense")
    return _like_bert(
        fields,
        parts=("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o"),
        norm_of_attention="attention.LayerNorm",
        tokens=_tables(fields, num_types=0),
        classifier=head if is_headed else None,
        stored=names_of("mpnet.", "embeddings.position_ids", "pooler."),
        distances=BiasSpec(
            table="encoder.relative_attention_bias", buckets=fields.count("relative_attention_num_buckets") or 32
        ),
    )
