"""Readers of fields that families of encoders share."""

from __future__ import annotations

from collections.abc import Mapping

from engine.families.reading.fields import Fields
from engine.spec.model import UnsupportedModelError
from engine.spec.scaling import RopeSpec
from engine.weights.names import StoredNames

# Fields about training, or about how transformers computes the same.
HARMLESS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "position_embedding_type", "tie_word_embeddings", "num_labels",
    "sentence_transformers", "sbert_ce_default_activation_function", "use_flash_attn", "layer_norm_eps", "is_matryoshka",
    "matryoshka_dimensions", "gradient_checkpointing", "classifier_dropout", "output_past", "classifier_pooling",
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


def activation_of(fields: Fields, name: str) -> str:
    given = str(fields.get(name) or "gelu")
    if given not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: {name} = {given!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[given]


def num_labels(fields: Fields) -> int:
    labels = fields.get("id2label")
    return len(labels) if isinstance(labels, Mapping) and labels else fields.count("num_labels") or 2


def dtype_of(fields: Fields) -> str:
    return str(fields.get("dtype") or fields.get("torch_dtype") or "float32")


def heads_of(fields: Fields) -> tuple[int, int]:
    """Number and size of the heads."""
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    if hidden % heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads = {heads} does not divide hidden_size = {hidden}"
        )
    return heads, hidden // heads


def names_of(prefix: str, *unused: str) -> StoredNames:
    """A class with a head has its encoder under a prefix, and may bring what isn't asked for."""
    both = [before + name for name in unused for before in ("", prefix)]
    return StoredNames(renamed={prefix: ""}, ignored=(*both, "cls.", "lm_head."))


def rope_of(fields: Fields, kind: str, theta: float) -> RopeSpec:
    """The rotation of a kind of layer, plain as these models have it. Raises UnsupportedModelError for another one."""
    said = fields.get("rope_parameters") or {}
    own = said.get(kind) if isinstance(said, Mapping) and kind in said else said
    if not isinstance(own, Mapping) or own.get("rope_type", "default") != "default" or fields.get("rope_scaling"):
        raise UnsupportedModelError("config.json: rope_parameters: only the plain rotation is computed for encoders")
    return RopeSpec(theta=float(own.get("rope_theta", theta)))


def renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    """Fields by our names, where a configuration has others."""
    found = Fields({names.get(name, name): value for name, value in fields.items()})
    found.ignore(*HARMLESS)
    return found
