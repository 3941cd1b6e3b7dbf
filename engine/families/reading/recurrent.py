"""Common readers of recurrent layers (the gated delta rule, Mamba-2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.families.reading.fields import Fields
from engine.families.reading.layers import FULL, layer_types
from engine.kernels.mamba import MambaHeads
from engine.kernels.mamba.heads import Norm
from engine.spec.model import UnsupportedModelError
from engine.spec.states import DeltaSpec, MambaSpec, Stored

LINEAR = "linear_attention"
# Fields of `MambaSpec` and its heads -> names in config.json.
MAMBA_NAMES = {
    "num_heads": "mamba_n_heads",
    "groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "taps": "mamba_d_conv",
    "taps_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
    "activation": "hidden_act",
    "chunk": "mamba_chunk_size",
}
_KINDS = {"mamba": LINEAR, LINEAR: LINEAR, "attention": FULL, FULL: FULL}


def delta(fields: Fields, *, stored: Stored, **switches: Any) -> DeltaSpec:
    """Read heads and convolution; `switches` are the family's further fields of the spec."""
    keys, values = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
    if values % keys:
        raise UnsupportedModelError(
            f"config.json: linear_num_value_heads = {values} is no multiple of linear_num_key_heads = {keys}"
        )
    taps = fields.number("linear_conv_kernel_dim")
    if taps < 2:
        raise UnsupportedModelError("config.json: linear_conv_kernel_dim = 1 is not supported")
    return DeltaSpec(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=fields.number("linear_key_head_dim"),
        value_dim=fields.number("linear_value_head_dim"),
        taps=taps,
        stored=stored,
        **switches,
    )


def mamba(
    fields: Fields,
    *,
    head_dim: int,
    norm: Norm = "after",
    norm_groups: int = 1,
    names: Mapping[str, str] = MAMBA_NAMES,
    **switches: Any,
) -> MambaSpec:
    """Read a mixer with heads of size `head_dim`; `switches` are the family's further fields of the spec."""
    num_heads, groups = fields.number(names["num_heads"]), fields.number(names["groups"])
    taps, bias = fields.number(names["taps"]), fields.flag(names["bias"])
    if num_heads % groups:
        raise UnsupportedModelError(
            f"config.json: {names['num_heads']} = {num_heads} is no multiple of {names['groups']} = {groups}"
        )
    if taps < 2:
        raise UnsupportedModelError(f"config.json: {names['taps']} = 1 is not supported")
    fields.only(names["activation"], "silu")
    # Fields of the chunk size, kernels, and the start of training.
    fields.ignore(
        names["chunk"], "use_mamba_kernels", *(f"time_step_{name}" for name in ("min", "max", "floor", "rank"))
    )
    shortest, longest = _limits(fields)
    heads = MambaHeads(
        num_heads=num_heads,
        head_dim=head_dim,
        groups=groups,
        state_size=fields.number(names["state_size"]),
        taps=taps,
        shortest=shortest,
        longest=longest,
        norm=norm,
        norm_groups=norm_groups,
    )
    spec = MambaSpec(heads=heads, taps_bias=fields.flag(names["taps_bias"]), in_bias=bias, out_bias=bias)
    return replace(spec, **switches)


def mamba_head_dim(fields: Fields, *, total: int | None = None) -> int:
    """Read `mamba_d_head`; all heads together have `total` features, or `mamba_expand` times the hidden size."""
    if total is None:
        total = fields.number("mamba_expand") * fields.number("hidden_size")
    num_heads = fields.number("mamba_n_heads")
    size = total // num_heads if fields.get("mamba_d_head", "auto") == "auto" else fields.number("mamba_d_head")
    if size * num_heads != total:
        raise UnsupportedModelError(
            f"config.json: mamba_n_heads = {num_heads} heads of mamba_d_head = {size} are not the inner size {total}"
        )
    return size


def kinds_of_layers(fields: Fields, default: Sequence[str]) -> list[str]:
    """For each layer, True for attention, under any name. Raises UnsupportedModelError if none has attention."""
    named = layer_types(fields, fields.get("layers_block_type") or default, known=tuple(_KINDS))
    kinds = [_KINDS[kind] for kind in named]
    if FULL not in kinds:
        raise UnsupportedModelError("config.json: layer_types without attention is not supported")
    return kinds


def _limits(fields: Fields) -> tuple[float, float]:
    """Bounds of the step size (dt)."""
    value = fields.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    limits = [_infinity(each) for each in value] if isinstance(value, list | tuple) else []
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise UnsupportedModelError(f"config.json: time_step_limit must be two rising numbers, not {value!r:.40}")
    return limits[0], limits[1]


def _infinity(value: Any) -> float:
    """Infinity, which transformers 5 writes as an object, since JSON lacks it."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
