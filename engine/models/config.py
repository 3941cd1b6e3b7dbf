"""`config.json` -> `DecoderConfig`: everything that distinguishes Llama, Mistral, Qwen2 and Qwen3, as plain values.

What the decoder can't compute faithfully is refused here with the field's name; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Fields = Mapping[str, Any]  # parsed JSON


class UnsupportedModelError(ValueError):
    """The checkpoint's config.json asks for something that the engine doesn't compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Rope scaling of Llama 3.1: long wavelengths are slowed down by `factor`, short ones kept, smoothly in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, rotate-half layout over the whole head."""

    theta: float
    linear_factor: float = 1.0  # positions are divided by it
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape and variants of one decoder-only model. All sizes are element counts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of q and k, before rope
    windows: tuple[int, ...]  # for each layer: positions attended to, including the own one; 0 = all
    rope: RopeConfig
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Read `folder/config.json`. Raises UnsupportedModelError naming the field, or FileNotFoundError."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: is it a model folder in Hugging Face's format?")
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from error
    return decoder_config(fields)


def decoder_config(fields: Fields) -> DecoderConfig:
    """Translate the fields of a config.json, in the form of transformers 4 or 5."""
    architecture = _architecture(fields)
    _refuse_unknown_variants(fields)
    hidden_size = _number(fields, "hidden_size")
    num_heads = _number(fields, "num_attention_heads")
    num_layers = _number(fields, "num_hidden_layers")
    attention_bias = bool(fields.get("attention_bias", False)) and architecture in (
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
    )
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=_number(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_number(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads") or num_heads,
        head_dim=fields.get("head_dim") or hidden_size // num_heads,
        max_position_embeddings=_number(fields, "max_position_embeddings"),
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(fields, architecture, num_layers),
        rope=_rope(fields),
        dtype=_dtype(fields),
    )
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads = {num_heads} is no multiple of num_key_value_heads = {config.num_kv_heads}"
        )
    return config


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def _architecture(fields: Fields) -> str:
    named = fields.get("architectures") or ["none"]
    for name in named:
        if name in ARCHITECTURES:
            return str(name)
    raise UnsupportedModelError(
        f"config.json: architectures = {', '.join(map(str, named))} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def _refuse_unknown_variants(fields: Fields) -> None:
    if fields.get("quantization_config"):
        method = fields["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"config.json: quantization_config ({method}) is not supported; use unquantised weights"
        )
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"config.json: hidden_act = {activation!r} is not supported; supported: 'silu'")


def _number(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _dtype(fields: Fields) -> str:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError(
            f"config.json: dtype = {name!r} is not supported; supported: float32, bfloat16, float16"
        )
    return name


def _windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    """Sliding windows: Mistral's covers every layer, Qwen's those that `layer_types` or `max_window_layers` name."""
    window = int(fields.get("sliding_window") or 0)
    if architecture == "LlamaForCausalLM" or not window:
        return (0,) * num_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not fields.get("use_sliding_window", False):
        return (0,) * num_layers
    if kinds := fields.get("layer_types"):
        if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
            raise UnsupportedModelError(f"config.json: layer_types = {sorted(unknown)} is not supported")
        if len(kinds) != num_layers:
            raise UnsupportedModelError(f"config.json: layer_types names {len(kinds)} layers of {num_layers}")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = int(fields.get("max_window_layers", 28))
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _rope(fields: Fields) -> RopeConfig:
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
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig(theta=theta, linear_factor=float(rope["factor"]))
        if kind == "llama3":
            return RopeConfig(theta=theta, llama3=_llama3(rope))
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
