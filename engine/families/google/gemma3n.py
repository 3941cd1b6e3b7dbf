"""Gemma 3n: four residual streams, a residual of low rank, inputs of each layer, sparse gates, shared keys and values.

Of a checkpoint with vision and audio, the text part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.families.google.gemma import AROUND_MLP, ropes_by_kind
from engine.families.google.gemma4 import lenders_of
from engine.families.reading import (
    SLIDING,
    Fields,
    attention,
    every,
    gated_mlp,
    layer_types,
    model,
    sliding_window,
    with_defaults,
)
from engine.spec.attention import KVSharing, QkNorm, ValueSpec
from engine.spec.ends import EmbeddingSpec, HeadSpec
from engine.spec.halves import AltUpSpec, LaurelSpec, LayerInputsSpec, PlaceholderSpec
from engine.spec.model import BranchSpec, GatedMlpSpec, LayerSpec, ModelSpec, UnsupportedModelError
from engine.weights.names import AS_OURS, StoredNames

AROUND_MIXER = BranchSpec(shares=True, after="post_attention_layernorm", scale=2**-0.5)
NAMES = StoredNames(
    renamed={"model.language_model.": "model."},
    ignored=(
        *("model.vision_tower.", "model.audio_tower."),
        *("model.embed_vision.soft_embedding_norm.", "model.embed_audio.soft_embedding_norm."),
    ),
)
# Defaults of a deeper model (`num_hidden_layers`) whose config.json has no sparsity pattern.
SPARSE_LAYERS, SPARSITY = 10, 0.95


def read(fields: Fields) -> ModelSpec:
    """Gemma 3n: four residual streams, a residual of low rank, inputs of each layer, sparse gates, shared keys and values."""
    fields = with_defaults(fields, "gemma3n_text")
    # Fields for training, and a scale of scores that is always 1.
    fields.ignore("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")
    kinds = layer_types(fields, every(fields, 5))
    lenders, first = lenders_of(fields, kinds)
    ropes, window, bias = ropes_by_kind(fields), sliding_window(fields), fields.flag("attention_bias")
    laurel = LaurelSpec(rank=fields.number("laurel_rank"), before="input_layernorm", after="laurel.post_laurel_norm")
    mlps = _mlps(fields)
    layers = [
        LayerSpec(
            mixer=attention(
                fields,
                rope=ropes[kind],
                window=window if kind == SLIDING else 0,
                qk_norm=QkNorm(),
                values=ValueSpec(norm=True),
                qkv_bias=bias,
                output_bias=bias,
                scale=1.0,
                sharing=KVSharing(lends=kind if index in lenders else "", borrows=kind if index >= first else ""),
            ),
            mlp=mlps[index],
            around_mixer=AROUND_MIXER,
            around_mlp=AROUND_MLP,
            laurel=laurel,
        )
        for index, kind in enumerate(kinds)
    ]
    return model(
        fields,
        layers,
        altup=_altup(fields),
        stored=AS_OURS.without_keys(range(first, len(kinds))),
        embedding=EmbeddingSpec(
            multiplier=fields.number("hidden_size") ** 0.5,
            layer_inputs=LayerInputsSpec(
                vocab_size=fields.number("vocab_size_per_layer_input"),
                size=fields.number("hidden_size_per_layer_input"),
                activation=mlps[0].activation,
            ),
        ),
        head=HeadSpec(softcap=fields.real("final_logit_softcapping", 0.0)),
    )


def read_beside_others(fields: Fields) -> ModelSpec:
    """Gemma 3n: the text part of a checkpoint with vision and audio."""
    fields.ignore("audio_soft_tokens_per_image", "vision_soft_tokens_per_image")
    fields.ignore(*(name for name in fields if name.endswith(("_token_id", "_token_index"))))
    parts = {
        "embed_vision": _part(fields, "vision_config", "gemma3n_vision"),
        "embed_audio": _part(fields, "audio_config", "gemma3n_audio"),
    }
    spec = read(fields.text())
    placeholders = _placeholders(parts, spec.vocab_size)
    unused = tuple(f"model.{part}." for part in parts if not any(part in each.under for each in placeholders))
    names = replace(NAMES, ignored=(*NAMES.ignored, *unused))
    return replace(spec, embedding=replace(spec.embedding, placeholders=placeholders)).with_names(names)


def _part(fields: Fields, name: str, model_type: str) -> Fields:
    """Fields of another modality; its tower is not computed."""
    values = fields.get(name) or {}
    if not isinstance(values, Mapping):
        raise UnsupportedModelError(f"config.json: {name} must be an object, not {values!r:.40}")
    return with_defaults(Fields(values), model_type)


def _placeholders(parts: Mapping[str, Fields], vocab_size: int) -> tuple[PlaceholderSpec, ...]:
    """Token ranges of each modality: one ends where the next begins, or at the vocabulary's end."""
    begins = [part.number("vocab_offset") for part in parts.values()]
    found = []
    for (name, part), begin, end in zip(parts.items(), begins, [*begins[1:], vocab_size], strict=True):
        rows, count = part.number("vocab_size"), min(end, vocab_size) - begin
        if end < begin or count > rows:
            raise UnsupportedModelError(
                f"config.json: vocab_offset = {begin} and vocab_size = {rows} of {name} don't reach up to {end}"
            )
        if count > 0:
            size, eps = part.number("hidden_size"), part.real("rms_norm_eps", 1e-6)
            found.append(
                PlaceholderSpec(under=f"model.{name}", first=begin, count=count, stored_rows=rows, size=size, eps=eps)
            )
    return tuple(found)


def _altup(fields: Fields) -> AltUpSpec:
    num_streams, active = fields.number("altup_num_inputs"), fields.get("altup_active_idx")
    if not (isinstance(active, int) and 0 <= active < num_streams):
        raise UnsupportedModelError(f"config.json: altup_active_idx = {active!r} of altup_num_inputs = {num_streams}")
    if num_streams < 2:
        raise UnsupportedModelError(f"config.json: altup_num_inputs = {num_streams} is not supported: at least 2")
    return AltUpSpec(num_streams=num_streams, active=active, scales_output=fields.flag("altup_correct_scale"))


def _mlps(fields: Fields) -> list[GatedMlpSpec]:
    """Each layer's MLP, with its own size and sparsity."""
    num_layers, sizes = fields.number("num_hidden_layers"), fields.get("intermediate_size")
    sizes = list(sizes) if isinstance(sizes, list | tuple) else [sizes] * num_layers
    sparsities = fields.get("activation_sparsity_pattern")
    if sparsities is None:
        sparse = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
        sparsities = [SPARSITY] * sparse + [0.0] * (num_layers - sparse)
    for name, values in {"intermediate_size": sizes, "activation_sparsity_pattern": list(sparsities)}.items():
        if len(values) != num_layers:
            raise UnsupportedModelError(f"config.json: {name} names {len(values)} layers of {num_layers}")
    if wrong := [each for each in sparsities if isinstance(each, bool) or not 0 <= each < 1]:
        raise UnsupportedModelError(
            f"config.json: activation_sparsity_pattern has {wrong[0]!r:.40}: 0 or more, below 1"
        )
    alike = gated_mlp(fields, size="hidden_size")
    return [
        replace(alike, size=Fields({"intermediate_size": size}).number("intermediate_size"), sparsity=float(share))
        for size, share in zip(sizes, sparsities, strict=True)
    ]
