"""Readers of fields that families of encoders share."""

from __future__ import annotations

from collections.abc import Mapping

from engine.families.reading.fields import Fields
from engine.pooling.spec import EncoderAttentionSpec, FeedForwardSpec, TokensSpec
from engine.spec.model import UnsupportedModelError
from engine.spec.scaling import RopeSpec
from engine.weights.names import StoredNames

# Fields about training, or about how transformers computes the same.
HARMLESS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "position_embedding_type", "tie_word_embeddings", "num_labels",
    "sentence_transformers", "sbert_ce_default_activation_function", "use_flash_attn", "layer_norm_eps", "is_matryoshka",
    "matryoshka_dimensions", "output_past", "mask_token_id", "mask_token", "pad_token", "bos_token", "eos_token",
)  # fmt: skip
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


# Fields of `rope_parameters` that change nothing.
_PLAIN = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}


def activation_of(fields: Fields, name: str) -> str:
    given = str(fields.get(name) or "gelu")
    if given not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: {name} = {given!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[given]


def heads_of(fields: Fields) -> tuple[int, int]:
    """Number and size of the heads."""
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    if hidden % heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads = {heads} does not divide hidden_size = {hidden}"
        )
    return heads, hidden // heads


def tokens_of(fields: Fields, *, norm: str, num_types: int) -> TokensSpec:
    """BERT's tables of words and, if there are any, types, without learnt positions."""
    return TokensSpec(
        words="embeddings.word_embeddings",
        vocab_size=fields.number("vocab_size"),
        norm=norm,
        types="embeddings.token_type_embeddings" if num_types else "",
        num_types=num_types,
    )


def names_of(prefix: str, *unused: str) -> StoredNames:
    """A class with a head has its encoder under a prefix, and may bring what isn't asked for."""
    both = [before + name for name in unused for before in ("", prefix)]
    return StoredNames(renamed={prefix: ""}, ignored=(*both, "cls.", "lm_head."))


def rope_of(fields: Fields, kind: str, theta: float) -> RopeSpec:
    """The rotation of a kind of layer, plain as these models have it. Raises UnsupportedModelError for another one."""
    said = fields.get("rope_parameters") or {}
    own = said.get(kind, said) if isinstance(said, Mapping) else {"": said}
    if not isinstance(own, Mapping) or fields.get("rope_scaling") or not all(map(_is_plain, own.items())):
        raise UnsupportedModelError("config.json: rope_parameters: only the plain rotation is computed for encoders")
    return RopeSpec(theta=Fields(own).real("rope_theta", theta))


def _is_plain(field: tuple[str, object]) -> bool:
    name, value = field
    return name == "rope_theta" or value in (None, _PLAIN.get(name))


def renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    """Fields by our names, where a configuration has others."""
    found = Fields({names.get(name, name): value for name, value in fields.items()})
    found.ignore(*HARMLESS)
    return found


def packed_attention(
    fields: Fields, output: str, *, rope: RopeSpec, has_bias: bool = False, reach: int = 0
) -> EncoderAttentionSpec:
    """Rotated heads, whose queries, keys and values are one matrix."""
    heads, head_dim = heads_of(fields)
    return EncoderAttentionSpec(
        num_heads=heads,
        head_dim=head_dim,
        inputs=("attn.Wqkv",),
        output=output,
        has_bias=has_bias,
        has_output_bias=has_bias,
        rope=rope,
        reach=reach,
    )


def swiglu(fields: Fields, gate: str, up: str, down: str) -> FeedForwardSpec:
    """The MLP of Llama and its kin, without biases."""
    fields.only("hidden_act", "silu")
    return FeedForwardSpec(
        inputs=(gate, up),
        output=down,
        intermediate_size=fields.number("intermediate_size"),
        activation="silu",
        is_gated=True,
        has_bias=False,
    )
