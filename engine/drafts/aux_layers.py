"""Checks that a head was trained for this target, and that its hidden states can be read."""

from __future__ import annotations

from collections.abc import Iterable

from engine.families.reading import Fields
from engine.spec.model import ModelSpec, UnsupportedModelError


def check_target(fields: Fields, head: ModelSpec, target: ModelSpec, *, trained_for: str) -> None:
    """Raise UnsupportedModelError for a head of another target, which `trained_for` names, if known."""
    wanted = {
        "target_hidden_size": fields.count("target_hidden_size") or head.hidden_size,
        "vocab_size": head.vocab_size,
    }
    found = {"target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    for name, size in wanted.items():
        if size != found[name]:
            trained = f": it was trained for {trained_for}" if trained_for else ""
            raise UnsupportedModelError(f"config.json: {name} = {size}, and the model's is {found[name]}{trained}")


def check_aux_layers(name: str, told: Iterable[int], target: ModelSpec) -> tuple[int, ...]:
    """Return the layers whose input the head reads, the first one first, as vLLM collects them whatever their order in the file.

    Raises UnsupportedModelError.
    """
    layers = tuple(sorted(told))
    # The stream has sampled rows alone after `last_mixer`, and the end of the last layer is no layer's input.
    if len(set(layers)) != len(layers) or not all(0 <= layer <= target.last_mixer for layer in layers):
        raise UnsupportedModelError(f"config.json: {name} = {list(layers)} for a model of {target.num_layers} layers")
    return layers
