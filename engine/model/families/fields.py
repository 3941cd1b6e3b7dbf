"""Fields of a config.json that several families share, read into the values of `engine.model.spec`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.model.spec import (
    AttentionSpec,
    GatedMlpSpec,
    LayerSpec,
    Llama3Scaling,
    ModelSpec,
    RopeSpec,
    UnsupportedModelError,
)

Fields = Mapping[str, Any]  # parsed JSON


def model(fields: Fields, layers: Iterable[LayerSpec]) -> ModelSpec:
    """Read what is outside the layers."""
    return ModelSpec(
        vocab_size=number(fields, "vocab_size"),
        hidden_size=number(fields, "hidden_size"),
        max_position_embeddings=number(fields, "max_position_embeddings"),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        has_tied_head=flag(fields, "tie_word_embeddings"),
        dtype=_dtype(fields),
        layers=tuple(layers),
        quantization=_quantization(fields),
    )


def attention(
    fields: Fields,
    *,
    window: int = 0,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
) -> AttentionSpec:
    """Read heads and rope; the arguments are the families' own fields."""
    num_heads = number(fields, "num_attention_heads")
    num_kv_heads = fields.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads = {num_heads} is no multiple of num_key_value_heads = {num_kv_heads}"
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.get("head_dim") or number(fields, "hidden_size") // num_heads,
        rope=_rope(fields),
        window=window,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
    )


def gated_mlp(fields: Fields, *, bias: bool = False) -> GatedMlpSpec:
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"config.json: hidden_act = {activation!r} is not supported; supported: 'silu'")
    return GatedMlpSpec(size=number(fields, "intermediate_size"), bias=bias)


def number(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def flag(fields: Fields, name: str) -> bool:
    return bool(fields.get(name, False))


def sliding_window(fields: Fields) -> int:
    """Positions that a windowed layer attends to; 0: no windows."""
    return int(fields.get("sliding_window") or 0)


def windows_by_layer(fields: Fields) -> list[int]:
    """Each layer's window in Qwen: the layers that `layer_types` names, else those from `max_window_layers` on."""
    num_layers, window = number(fields, "num_hidden_layers"), sliding_window(fields)
    if not window or not flag(fields, "use_sliding_window"):
        return [0] * num_layers
    if kinds := fields.get("layer_types"):
        if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
            raise UnsupportedModelError(f"config.json: layer_types = {sorted(unknown)} is not supported")
        if len(kinds) != num_layers:
            raise UnsupportedModelError(f"config.json: layer_types names {len(kinds)} layers of {num_layers}")
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    first = int(fields.get("max_window_layers", 28))
    return [window if layer >= first else 0 for layer in range(num_layers)]


def _quantization(fields: Fields) -> str | None:
    config = fields.get("quantization_config")
    return str(config.get("quant_method", "unknown")) if config else None


def _dtype(fields: Fields) -> str:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError(
            f"config.json: dtype = {name!r} is not supported; supported: float32, bfloat16, float16"
        )
    return name


def _rope(fields: Fields) -> RopeSpec:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (transformers 4)."""
    field = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope: Fields = fields.get(field) or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError(f"config.json: {field} differs between layers, which is not supported")
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if (partial := rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor = {partial} is not supported")
    try:
        if kind == "default":
            return RopeSpec(theta=theta)
        if kind == "linear":
            return RopeSpec(theta=theta, linear_factor=float(rope["factor"]))
        if kind == "llama3":
            return RopeSpec(theta=theta, llama3=_llama3(rope))
    except KeyError as error:
        raise UnsupportedModelError(f"config.json: {field} of type {kind!r} lacks {error}") from error
    raise UnsupportedModelError(
        f"config.json: {field}.rope_type = {kind!r} is not supported; supported: default, linear, llama3"
    )


def _llama3(rope: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
