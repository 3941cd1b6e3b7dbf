"""Rotary embeddings of a config.json, in the form of transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.families.reading.fields import Fields
from engine.spec.model import UnsupportedModelError
from engine.spec.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    Scaling,
    YarnScaling,
)

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
_MOST_POSITIONS = 1 << 31


def rope(
    fields: Fields,
    *,
    kind: str = "",
    theta: float = 10_000.0,
    interleaved: bool = False,
    others: tuple[str, ...] = (),
    legacy_type: str = "",
) -> RopeSpec:
    """Read the rope of layers of a `kind`, if kinds differ; `theta` is the default base.

    `others`: keys that the family reads itself. `legacy_type` is what any type with factors means in old checkpoints.
    """
    name, values = rope_values(fields, kind)
    theta = float(values.get("rope_theta") or fields.get("rope_theta") or theta)
    share = values.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    rope_type = _rope_type(values, others, legacy_type)
    if rope_type not in _SCALINGS:
        raise UnsupportedModelError(
            f"config.json: {name}.rope_type = {rope_type!r} is not supported; supported: {', '.join(_SCALINGS)}"
        )
    read, known = _SCALINGS[rope_type]
    if unknown := sorted(key for key in values.keys() - known - _COMMON - set(others) if values[key]):
        raise UnsupportedModelError(
            f"config.json: {name} of type {rope_type!r} has {unknown[0]}, which is not supported"
        )
    try:
        scaling = read(values, fields)
    except KeyError as error:
        raise UnsupportedModelError(f"config.json: {name} of type {rope_type!r} lacks {error}") from error
    if not (0 < float(share) <= 1 and theta > 1):
        raise UnsupportedModelError(
            f"config.json: {name} rotates {share!r:.40} of a head by {theta!r:.40}: at most all of it, by a number above 1"
        )
    share = 1.0 if isinstance(scaling, ProportionalScaling) else float(share)
    return RopeSpec(theta=theta, scaling=scaling, share=share, interleaved=interleaved)


def _rope_type(values: Mapping[str, Any], others: tuple[str, ...], legacy_type: str) -> str:
    rope_type: str = values.get("rope_type") or values.get("type") or "default"
    if legacy_type and rope_type in ("su", "yarn"):
        return legacy_type
    return "default" if rope_type == "mrope" and "mrope_section" in others else rope_type


def rope_values(fields: Fields, kind: str = "") -> tuple[str, Mapping[str, Any]]:
    """The field with the rope of such layers, and its value: as in transformers, `rope_scaling` first."""
    fields.ignore(*_BESIDE_SCALING)
    replacing, values = _object(fields, "rope_scaling"), _object(fields, "rope_parameters")
    name = "rope_parameters"
    if replacing:
        _check_replaced(fields, replacing, values)
        name, values = "rope_scaling", replacing
    if kind and isinstance(values.get(kind), Mapping):
        return f"{name}.{kind}", values[kind]
    if any(isinstance(value, Mapping) for value in values.values()):
        raise UnsupportedModelError(f"config.json: {name} differs between layers, which is not supported")
    return name, values


def _object(fields: Fields, name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"config.json: {name} must be an object, not {value!r:.40}")
    return value


def _check_replaced(fields: Fields, replacing: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError if `rope_scaling` hides keys that only `rope_parameters` has: nobody means that."""
    if any(isinstance(value, Mapping) for value in values.values()):
        raise UnsupportedModelError(
            "config.json: rope_scaling beside rope_parameters that differ between layers is not supported: write it into those"
        )
    for key in _BESIDE_SCALING:
        if not replacing.get(key) and values.get(key) not in (None, fields.get(key)):
            raise UnsupportedModelError(
                f"config.json: rope_scaling takes the place of rope_parameters and lacks its {key} = {values[key]!r:.40}:"
                " write all of them into rope_parameters"
            )


def _original(values: Mapping[str, Any], fields: Fields) -> int:
    """The original context length."""
    asked = fields.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    found = int(asked or fields["max_position_embeddings"])
    if not 1 <= found < _MOST_POSITIONS:
        raise UnsupportedModelError(
            f"config.json: original_max_position_embeddings = {asked!r:.40} is no context's length"
        )
    return found


def _llama3(values: Mapping[str, Any], fields: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_max_position_embeddings=_original(values, fields),
    )


def _yarn(values: Mapping[str, Any], fields: Fields) -> YarnScaling:
    original = _original(values, fields)
    factor = float(values.get("factor") or fields["max_position_embeddings"] / original)
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        one, all_ = values.get("mscale"), values.get("mscale_all_dim")
        attention_factor = _magnitude(factor, one) / _magnitude(factor, all_) if one and all_ else _magnitude(factor)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=bool(values.get("truncate", True)),
    )


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(values: Mapping[str, Any], fields: Fields) -> LongRopeScaling:
    original = _original(values, fields)
    factor = float(values.get("factor") or fields["max_position_embeddings"] / original)
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short_factor=_divisors(values, "short_factor"),
        long_factor=_divisors(values, "long_factor"),
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
    )


def _divisors(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    found = tuple(map(float, values[name]))
    if not all(0 < each < math.inf for each in found):
        raise UnsupportedModelError(f"config.json: {name} of type 'longrope' must hold positive numbers")
    return found


def _proportional(values: Mapping[str, Any], fields: Fields) -> ProportionalScaling:
    share, factor = values.get("partial_rotary_factor", 1.0), values.get("factor", 1.0)
    return ProportionalScaling(share=float(share), factor=float(factor))


# `rope_type` -> reader and its keys. "dynamic" has no effect up to max_position_embeddings, and no model goes beyond.
_Read = Callable[[Mapping[str, Any], Fields], Scaling | None]
_SCALINGS: dict[str, tuple[_Read, set[str]]] = {
    "default": (lambda values, fields: None, {"original_max_position_embeddings"}),
    "linear": (lambda values, fields: LinearScaling(factor=float(values["factor"])), {"factor"}),
    "dynamic": (lambda values, fields: None, {"factor", "original_max_position_embeddings"}),
    "llama3": (_llama3, {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": (
        _yarn,
        {"factor", "original_max_position_embeddings", "max_position_embeddings", "attention_factor", "mscale"}
        | {"mscale_all_dim", "beta_fast", "beta_slow", "truncate"},
    ),
    "longrope": (
        _longrope,
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
    ),
    "proportional": (_proportional, {"factor"}),
}
