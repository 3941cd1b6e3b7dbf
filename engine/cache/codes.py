"""`kv_cache_dtype` applied to a model: layers with quantised keys and values."""

from __future__ import annotations

from dataclasses import replace

from engine.config import KV_CACHE_DTYPES, CacheConfig
from engine.kernels.codes import Kind
from engine.spec.attention import AttentionSpec
from engine.spec.mla import MLASpec
from engine.spec.model import LayerSpec, ModelSpec, UnsupportedModelError

INT4_FEATURES = 8  # whose codes are one of the words that digests and copies count


def with_codes(model: ModelSpec, cache: CacheConfig, dtype: str) -> ModelSpec:
    """Return the model with KV quantised as `cache` or, with "auto", the checkpoint asks for.

    `dtype` is the one that the model computes in. Raises ValueError, naming the setting, for what can't be kept so.
    """
    asked = cache.kv_cache_dtype
    kind = KV_CACHE_DTYPES[(model.quantization.kv_cache or asked) if asked == "auto" else asked]
    if asked in ("bfloat16", "float32") and dtype != asked:
        raise ValueError(f"kv_cache_dtype = {asked}, but the model computes in {dtype}: give it dtype = {asked}")
    if kind == "float16" and dtype == "bfloat16" and asked != "auto":
        raise ValueError(
            "kv_cache_dtype = float16, but the model computes in bfloat16: leave it out, or give it dtype = float32"
        )
    if kind is None or (kind == "float16" and dtype != "float32"):
        return model
    layers = tuple(_with_codes(layer, kind, cache) for layer in model.layers)
    if layers == model.layers and asked != "auto":
        raise UnsupportedModelError(
            f"kv_cache_dtype = {asked} is not supported for this model: no layer keeps keys and values"
            f"{' but those with a window' if cache.kv_cache_dtype_skip_layers else ''}"
        )
    return replace(model, layers=layers)


def _with_codes(layer: LayerSpec, kind: Kind, cache: CacheConfig) -> LayerSpec:
    """Quantise keys and values; states stay, since every token changes them."""
    attention = layer.attention
    if attention is None or (attention.window and cache.kv_cache_dtype_skip_layers):
        return layer
    if kind == "int4" and (problem := _not_in_int4(attention)):
        raise UnsupportedModelError(
            f"kv_cache_dtype = int4 is not supported for this model: {problem}. Give it int8 or fp8"
        )
    if kind == "float16" and isinstance(attention, MLASpec):
        return layer
    return layer.with_attention(codes=kind)


def _not_in_int4(attention: AttentionSpec | MLASpec) -> str:
    """Reason for which int4 can't hold what a layer keeps, or ""."""
    if isinstance(attention, MLASpec):
        return "its heads share latents (MLA), of which there are codes of 8 bits alone"
    dim = attention.heads.head_dim
    return f"its heads have {dim} features, no multiple of {INT4_FEATURES}" if dim % INT4_FEATURES else ""
