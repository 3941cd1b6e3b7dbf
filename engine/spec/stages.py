"""One stage's layers of a model: a range of them, the embedding before the first one and the head behind the last."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from engine.spec.attention import AttentionSpec
from engine.spec.mla import MLASpec
from engine.spec.model import ModelSpec, ShortcutSpec, StageSpec, UnsupportedModelError

FLAG = "--pipeline-parallel-size"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def for_stage(model: ModelSpec, number: int, count: int) -> ModelSpec:
    """Return the model as one of its stages computes it. Raises UnsupportedModelError where it can't be cut there.

    Layers are shared out evenly. The first stages have one more: their pools decide how many blocks there are, and the last
    one has the head. The first one has the drafter, which counts as layers, unless the model can't be cut so.
    """
    if count == 1:
        return model
    if why := _whole(model):
        raise UnsupportedModelError(f"{FLAG} {count}: {why} aren't cut into stages yet: take 1")
    refused = ""
    for drafting in dict.fromkeys((_worth(model), 0)):
        ranges = _ranges(model.num_layers, count, drafting)
        if not (refused := _refused(model, ranges)):
            return replace(model, stage=StageSpec(number, ranges))
    raise UnsupportedModelError(f"{FLAG} {count}: {refused}")


def _refused(model: ModelSpec, ranges: tuple[range, ...]) -> str:
    """The reason that the model can't be cut into these layers, and the remedy; "" if it can."""
    layers_alone = replace(model, draft=None)
    for layers in ranges:
        kept = [each for each in layers_alone.kept_within(layers) if each.per_token]
        if not kept:
            return f"a stage of {len(layers)} of {model.num_layers} layers keeps no keys and values: take fewer"
        if all(each.window for each in kept):
            return (
                "a stage has only layers with a sliding window: take fewer, or"
                " --disable-hybrid-kv-cache-manager for all workers of the model"
            )
        if why := _across(model, layers.start):
            return f"{why} before layer {layers.start}: take another number, or 1"
    return ""


def elsewhere(model: ModelSpec) -> Callable[[str], bool]:
    """Tell which tensors, by our names, are for other stages, unless this one declares them."""

    def is_elsewhere(name: str) -> bool:
        layer = _LAYER.match(name)
        is_further = layer is not None and int(layer[1]) >= model.num_layers  # a drafter's, or not computed
        if layer is None or is_further:
            return layer is None or model.own_draft is not model.draft
        return int(layer[1]) not in model.own_layers

    return is_elsewhere if model.stage is not None else lambda name: False


def _worth(model: ModelSpec) -> int:
    """The number of the model's layers that a drafter counts as: as many as its own, smaller ones by their hidden size."""
    if model.draft is None:
        return 0
    size = model.draft.hidden_size or model.hidden_size
    return max(1, round(len(model.draft.layers) * size / model.hidden_size))


def _ranges(num_layers: int, count: int, drafting: int) -> tuple[range, ...]:
    """The layers of each stage. The first one has one at least, beside a drafter that counts as so many."""
    while drafting and -(-(num_layers + drafting) // count) <= drafting:
        drafting -= 1
    ends = [max(0, -(-(num_layers + drafting) * number // count) - drafting) for number in range(count + 1)]
    return tuple(map(range, ends, ends[1:]))


def _whole(model: ModelSpec) -> str:
    """The part of the model that keeps it whole; "" if layers are all that it has."""
    if model.altup is not None:
        return "several residual streams"
    if model.embedding.layer_inputs is not None:
        return "inputs of each layer"
    return ""


def _across(model: ModelSpec, cut: int) -> str:
    """The reason that nothing is cut there: a later layer takes more of one before than the stream; "" if none does."""
    before, behind = model.layers[:cut], model.layers[cut:]
    mixers = [layer.mixer for layer in before if isinstance(layer.mixer, AttentionSpec)]
    lent = {mixer.sharing.lends for mixer in mixers} - {""}
    if any(isinstance(layer.mixer, AttentionSpec) and layer.mixer.sharing.borrows in lent for layer in behind):
        return "keys and values of a layer are read by one in a later stage"
    begun = sum(isinstance(layer.mlp, ShortcutSpec) - layer.ends_shortcut for layer in before)
    if begun:
        return "the output of a layer's experts is added in a later stage"
    first = next((layer.mixer for layer in behind if isinstance(layer.mixer, MLASpec)), None)
    if cut and first is not None and first.sparse and first.sparse.indexer is None:
        return "positions that a layer chose are read by one in a later stage"
    return ""
