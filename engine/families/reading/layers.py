"""Readers of common parts of a model, into the values of `engine.spec`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, Literal, TypeVar

from engine.families.quantised import read_quantization
from engine.families.reading.fields import Fields
from engine.families.reading.ropes import rope
from engine.kernels.attention import HeadShape
from engine.spec.attention import AttentionSpec, ProjectionSpec, ScoreSpec
from engine.spec.ends import PLAIN_HEAD, RMS_NORMS, HeadSpec, NormSpec
from engine.spec.model import GatedMlpSpec, LayerSpec, ModelSpec, UnsupportedModelError

Part = TypeVar("Part")
# The reader of one architecture's config.json.
Family = Callable[[Fields], ModelSpec]
FULL, SLIDING = "full_attention", "sliding_attention"
_GATES: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_OWN: Any = object()
_rope = rope


def model(
    fields: Fields,
    layers: Iterable[LayerSpec],
    *,
    eps: str = "rms_norm_eps",
    norms: NormSpec = RMS_NORMS,
    head: HeadSpec = PLAIN_HEAD,
    **options: Any,
) -> ModelSpec:
    """Read the parts outside the layers; `eps` names the norms' epsilon, `options` are further fields of the spec."""
    return ModelSpec(
        vocab_size=fields.number("vocab_size"),
        hidden_size=fields.number("hidden_size"),
        max_position_embeddings=fields.number("max_position_embeddings"),
        norms=replace(norms, eps=fields.real(eps, 1e-6)),
        head=replace(head, is_tied=fields.flag("tie_word_embeddings")),
        dtype=dtype_of(fields),
        layers=tuple(layers),
        quantization=read_quantization(fields),
        **options,
    )


def attention(fields: Fields, *, rope: Any = _OWN, **switches: Any) -> AttentionSpec:
    """Read heads and rope, unless it is given.

    `switches` are further fields of the spec, or of its scores and projections, by their own names: the family's own.
    """
    num_heads = fields.number("num_attention_heads")
    num_kv_heads = switches.pop("num_kv_heads", None) or fields.count("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads = {num_heads} is no multiple of num_key_value_heads = {num_kv_heads}"
        )
    head_dim = switches.pop("head_dim", None) or fields.count("head_dim")
    return AttentionSpec(
        heads=HeadShape(num_heads, num_kv_heads, head_dim or fields.number("hidden_size") // num_heads),
        rope=_rope(fields) if rope is _OWN else rope,
        scores=_taken(ScoreSpec, switches),
        projections=_taken(ProjectionSpec, switches),
        **switches,
    )


def _taken(part: Callable[..., Part], switches: dict[str, Any]) -> Part:
    """Build a part of a spec from the switches that are its fields."""
    return part(**{name: switches.pop(name) for name in signature(part).parameters if name in switches})


def gated_mlp(fields: Fields, *, bias: bool = False, size: str = "intermediate_size", **options: Any) -> GatedMlpSpec:
    """Read the gated MLP whose width is the field `size`."""
    name = "hidden_activation" if fields.get("hidden_activation") else "hidden_act"
    # Old checkpoints of Gemma have both.
    fields.ignore("hidden_act")
    activation = fields.get(name, "silu")
    if activation not in _GATES:
        raise UnsupportedModelError(
            f"config.json: {name} = {activation!r} is not supported; supported: {', '.join(map(repr, _GATES))}"
        )
    return GatedMlpSpec(size=fields.number(size), bias=bias, activation=_GATES[activation], **options)


def sliding_window(fields: Fields) -> int:
    """The sliding window in positions; 0: none."""
    return fields.count("sliding_window")


def layer_types(fields: Fields, default: Sequence[str], *, known: tuple[str, ...] = (FULL, SLIDING)) -> list[str]:
    """Each layer's kind: `layer_types`, or the default, both checked."""
    num_layers = fields.number("num_hidden_layers")
    kinds = list(fields.get("layer_types") or default)
    if unknown := set(kinds) - set(known):
        raise UnsupportedModelError(f"config.json: layer_types = {sorted(unknown)} is not supported")
    if len(kinds) != num_layers:
        raise UnsupportedModelError(f"config.json: layer_types names {len(kinds)} layers of {num_layers}")
    return kinds


def every(fields: Fields, period: int) -> list[str]:
    """Layer types of which each `period`-th is full attention, the others sliding-window; 0: all are full."""
    return [SLIDING if period and (index + 1) % period else FULL for index in range(fields.number("num_hidden_layers"))]


def windows_by_layer(fields: Fields) -> list[int]:
    """Each layer's window in Qwen: the layers in `layer_types`, else those from `max_window_layers` on."""
    num_layers, window = fields.number("num_hidden_layers"), sliding_window(fields)
    first = int(fields.get("max_window_layers", 28))
    kinds = layer_types(fields, [SLIDING if layer >= first else FULL for layer in range(num_layers)])
    if not window or not fields.flag("use_sliding_window"):
        return [0] * num_layers
    return [window if kind == SLIDING else 0 for kind in kinds]


def dtype_of(fields: Fields) -> str:
    """The checkpoint's dtype. Raises UnsupportedModelError."""
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError(
            f"config.json: dtype = {name!r} is not supported; supported: float32, bfloat16, float16"
        )
    return name
