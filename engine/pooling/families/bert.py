"""BERT and its kin: learnt positions, norms behind both halves."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import Fields, dtype_of
from engine.pooling.families.reading import activation_of, heads_of, names_of, tokens_of
from engine.pooling.masks import BUCKETS
from engine.pooling.spec import (
    ClassifierSpec,
    EncoderAttentionSpec,
    EncoderLayerSpec,
    EncoderSpec,
    FeedForwardSpec,
    TokensSpec,
)
from engine.spec.ends import NormSpec
from engine.spec.model import UnsupportedModelError
from modelfiles.pooling import first_position
from modelfiles.scoring import num_labels

_OF_BERT = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
)  # fmt: skip


def _like_bert(
    fields: Fields,
    is_headed: bool,
    *,
    prefix: str,
    num_types: int,
    parts: tuple[str, str, str, str] = _OF_BERT,
    norm_of_attention: str = "attention.output.LayerNorm",
    dense: str = "classifier.dense",
    output: str = "classifier.out_proj",
    distances: str = "",
) -> EncoderSpec:
    """BERT's layer: norms behind both halves, biases everywhere. `parts`: queries, keys, values and output of attention."""
    fields.only("is_decoder", False)
    heads, head_dim = heads_of(fields)
    layer = EncoderLayerSpec(
        attention=EncoderAttentionSpec(
            num_heads=heads, head_dim=head_dim, inputs=parts[:3], output=parts[3], distances=distances
        ),
        mlp=FeedForwardSpec(
            inputs=("intermediate.dense",),
            output="output.dense",
            intermediate_size=fields.number("intermediate_size"),
            activation=activation_of(fields, "hidden_act"),
        ),
        norms=(norm_of_attention, "output.LayerNorm"),
    )
    tokens, head = _tables(fields, num_types=num_types), None
    if is_headed:
        head = ClassifierSpec(dense=dense, output=output, num_labels=num_labels(fields))
    unused = ("embeddings.position_ids", *(() if is_headed and dense.startswith(_POOLER) else (_POOLER,)))
    return EncoderSpec(
        hidden_size=fields.number("hidden_size"),
        max_position_embeddings=tokens.num_positions - tokens.first_position,
        tokens=tokens,
        layers=(layer,) * fields.number("num_hidden_layers"),
        under="encoder.layer.{}.",
        norms=NormSpec(kind="layer", eps=fields.real("layer_norm_eps", 1e-12), has_bias=True),
        classifier=head,
        dtype=dtype_of(fields),
        stored=names_of(prefix, *unused),
    )


_POOLER = "pooler."


def _tables(fields: Fields, *, num_types: int) -> TokensSpec:
    fields.only("position_embedding_type", "absolute")
    positions, first = fields.number("max_position_embeddings"), first_position(fields)
    if not 0 <= first < positions:
        raise UnsupportedModelError(
            f"config.json: pad_token_id = {first - 1} leaves none of max_position_embeddings = {positions}"
        )
    return replace(
        tokens_of(fields, norm="embeddings.LayerNorm", num_types=num_types),
        positions="embeddings.position_embeddings",
        num_positions=positions,
        first_position=first,
    )


def read_bert(fields: Fields, is_headed: bool) -> EncoderSpec:
    """BERT: positions and types are learnt; a head reads the pooler's vector."""
    types = fields.count("type_vocab_size") or 2
    return _like_bert(fields, is_headed, prefix="bert.", num_types=types, dense=f"{_POOLER}dense", output="classifier")


def read_colbert(fields: Fields, is_headed: bool) -> EncoderSpec:
    """ColBERT as its authors publish it: BERT, and a product of each token's vector that `VectorHead` declares."""
    fields.only("model_type", "bert")
    return read_bert(fields, is_headed)


def read_roberta(fields: Fields, is_headed: bool) -> EncoderSpec:
    """RoBERTa and XLM-R: BERT whose positions count from the one behind the padding's."""
    return _like_bert(fields, is_headed, prefix="roberta.", num_types=fields.count("type_vocab_size") or 1)


def read_mpnet(fields: Fields, is_headed: bool) -> EncoderSpec:
    """MPNet: RoBERTa without types, whose scores have a bias by distance."""
    fields.only("relative_attention_num_buckets", BUCKETS)
    return _like_bert(
        fields,
        is_headed,
        prefix="mpnet.",
        num_types=0,
        parts=("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o"),
        norm_of_attention="attention.LayerNorm",
        distances="encoder.relative_attention_bias",
    )
