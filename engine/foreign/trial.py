# mypy: allow-untyped-calls
"""Attention calls of a `transformers` model, found by passes on the meta device. Refuses unsupported ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.foreign.watching import Watch
from engine.kernels.attention import HeadShape
from engine.spec.attention import AttentionSpec, ScoreSpec
from engine.spec.ends import HeadSpec
from engine.spec.model import GatedMlpSpec, LayerSpec, ModelSpec, UnsupportedModelError

NAME = "baton"
TRIAL_TOKENS = 3, 5
TRIAL_DTYPE = torch.bfloat16  # products of grouped experts exist in no other one there
# The longest sequence of a batch determines it.
_UNKNOWABLE_ROPES = ("dynamic", "longrope")
# Arguments of attention functions that don't affect the arithmetic here.
_IDLE = {"dropout", "is_causal", "position_ids", "cache_position", "output_attentions", "use_cache", "cu_seq_lens_q"} | {
    "cu_seq_lens_k", "max_length_q", "max_length_k", "position_embeddings", "logits_to_keep", "target_dtype",
    "output_router_logits",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one layer's attention."""

    module: str  # its name in the model
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    sinks: bool


def register() -> None:
    """Register our attention with transformers, without a mask. A module's attribute `baton` computes it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(module: Any, *given: Any, **named: Any) -> tuple[torch.Tensor, None]:
    attended: torch.Tensor = module.baton(module, *given, **named)
    return attended, None


def read_config(folder: Path) -> Any:
    """Transformers' configuration of the text model. Raises UnsupportedModelError if it can't be paged."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its classes validate fields in their own ways
        said = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(f"transformers can't read {folder / 'config.json'}: {said}") from error
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModelError("config.json: is_encoder_decoder = true is not supported")
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(f"config.json: layer_types = {sorted(kinds)} is not supported with transformers")
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, Mapping))):
        if rope.get("rope_type") in _UNKNOWABLE_ROPES:
            raise UnsupportedModelError(
                f"config.json: rope_type = {rope['rope_type']!r} is not supported with transformers"
            )
    return config


@dataclass(frozen=True, slots=True)
class Trial:
    """The findings of passes without numbers."""

    calls: list[Call]  # each layer's, in order
    obstacle: str  # to captured graphs; "": none is known


def tried(config: Any) -> Trial:
    """Try a model. Raises UnsupportedModelError with what it can't be served for."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            its = copy.deepcopy(config)  # gets the trial's dtype
            network = AutoModelForCausalLM.from_config(its, attn_implementation=NAME, dtype=TRIAL_DTYPE).eval()
    except Exception as error:  # arbitrary code of an unknown model
        said = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(f"{_name(config)} has no attention that can be replaced: {said}") from error
    passes: list[list[Call]] = []
    names = {module: name for name, module in network.named_modules()}

    def record(module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, **named: Any) -> torch.Tensor:
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{names[module]} attends to later tokens, too, which is not supported")
        passes[-1].append(_call(names[module], q, k, v, attention_mask, named))
        return torch.empty_like(q).transpose(1, 2)

    for module in names:
        module.baton = record
    watch = Watch(network)
    try:
        with torch.inference_mode(), watch:
            for count in TRIAL_TOKENS:
                passes.append([])
                positions = torch.arange(count, device="meta")[None]
                network(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
                watch.next()
    except UnsupportedModelError:
        raise
    except Exception as error:  # arbitrary code of an unknown model
        raise UnsupportedModelError(f"{_name(config)} can't be tried with transformers: {str(error)[:200]}") from error
    _check(config, network, passes[-1])
    return Trial(passes[-1], watch.obstacle())


def spec_of(config: Any, calls: list[Call]) -> ModelSpec:
    """Return the spec that the rest of the engine needs of such a model."""
    text = config.get_text_config(decoder=True)
    hidden = int(text.hidden_size)
    mlp = GatedMlpSpec(size=int(getattr(text, "intermediate_size", None) or 4 * hidden))
    layers = [
        LayerSpec(
            mixer=AttentionSpec(
                heads=HeadShape(call.num_heads, call.num_kv_heads, call.head_dim),
                rope=None,
                window=call.window,
                scores=ScoreSpec(scale=call.scale, softcap=call.softcap, sinks=call.sinks),
            ),
            mlp=mlp,
        )
        for call in calls
    ]
    return ModelSpec(
        vocab_size=int(text.vocab_size),
        hidden_size=hidden,
        max_position_embeddings=int(text.max_position_embeddings),
        head=HeadSpec(is_tied=bool(config.tie_word_embeddings)),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        layers=tuple(layers),
    )


def _call(name: str, q: Any, k: Any, v: Any, mask: Any, named: dict[str, Any]) -> Call:
    if mask is not None:
        raise UnsupportedModelError(f"{name} gives attention a mask of its own, which is not supported")
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise UnsupportedModelError(f"{name} has keys and values of different sizes, which is not supported")
    own = {key: value for key, value in named.items() if key not in _IDLE and value is not None}
    sinks = own.pop("s_aux", None)
    call = Call(
        module=name,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[-1],
        scale=float(own.pop("scaling", None) or q.shape[-1] ** -0.5),
        window=int(own.pop("sliding_window", 0)),
        softcap=float(own.pop("softcap", 0.0)),
        sinks=sinks is not None,
    )
    if own:
        raise UnsupportedModelError(f"{name} gives attention {', '.join(sorted(own))}, which is not supported")
    return call


def _check(config: Any, network: Any, calls: list[Call]) -> None:
    text = config.get_text_config(decoder=True)
    if len(calls) != text.num_hidden_layers or len({call.module for call in calls}) != len(calls):
        raise UnsupportedModelError(
            f"{_name(config)} calls transformers' attention {len(calls)} times in {text.num_hidden_layers} layers:"
            " states, and attention of its own, are not supported"
        )
    if getattr(network, "_is_stateful", False) or any(isinstance(part, torch.nn.Conv1d) for part in network.modules()):
        raise UnsupportedModelError(f"{_name(config)} keeps a state beside keys and values, which is not supported")
    has_window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    if has_window and not any(call.window for call in calls):
        raise UnsupportedModelError("config.json: sliding_window does not reach attention, which is not supported")
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModelError("config.json: attention_chunk_size is not supported with transformers")
    if "position_ids" not in inspect.signature(network.forward).parameters:
        raise UnsupportedModelError(f"{_name(config)} takes no position_ids, which is not supported")


def _name(config: Any) -> str:
    return str((config.architectures or [type(config).__name__])[0])
