"""Settings that follow from a configuration and its model: what is read, the dtype, the longest sequence, marks of the KV."""

from __future__ import annotations

import torch

from engine.cache.codes import with_codes
from engine.cache.windows import with_windows
from engine.checkpoint.fingerprint import model_fingerprint
from engine.config import EngineConfig
from engine.families import read_model_spec
from engine.kernels.linear import computes_in_bfloat16
from engine.spec.model import ModelSpec
from engine.spec.ranks import with_cut_experts
from engine.spec.stages import for_stage
from engine.weights.loader import check_separate_experts
from modelfiles.gguf import is_gguf

# Positions: rotary tables grow with them, and a longer context is always configured explicitly.
MAX_LEN_UNASKED = 1 << 20


def read_config(config: EngineConfig) -> ModelSpec:
    """The model that a configuration names. Raises ValueError, OSError."""
    model = read_model_spec(config.model, quantization=config.quantization, device=config.device, dtype=config.dtype)
    if config.tensor_parallel_size == 1 or config.enable_expert_parallel:
        return model
    check_separate_experts(config.model)
    return with_cut_experts(model)


def marks_of(config: EngineConfig, model: ModelSpec, dtype: str) -> list[str]:
    """Return the settings under which the same files give other keys and values. `dtype`: of the computation."""
    asked = config.quantization if config.quantization != "auto" else ""
    named = asked or (model.quantization.name if is_gguf(config.model) else "")
    marks = [f"quantization={named}"] if named else []
    if config.draft is not None and config.draft.folder is not None:
        drafter = "draft_model" if config.draft.is_model else "draft"
        marks += [f"{drafter}={model_fingerprint(config.draft.folder)}", "draft_layers=first"]
    kept = [(layer.attention and layer.attention.codes) or dtype for layer in model.layers]
    # The hash root names the quantised dtype, but neither the dtype it was made from nor the quantised layers.
    marks += [f"kept={dtype}:{','.join(kept)}"] if set(kept) != {dtype} else []
    apart = {"states=apart": model.has_state, "columns=apart": any(kept.window for kept in model.kept)}
    return marks + [mark for mark, is_so in apart.items() if is_so]  # older models kept everything in each block


def resolve_dtype(asked: str, device: torch.device, checkpoint: str) -> str:
    """The dtype to compute in, `auto` resolved."""
    if asked != "auto":
        return asked
    if device.type != "cpu" or (checkpoint == "bfloat16" and computes_in_bfloat16()):
        return checkpoint
    return "float32"


def resolve_max_model_len(asked: int | None, model: int) -> int:
    """The longest sequence. Raises ValueError if more was asked for than the model has."""
    if asked is not None and asked > model:
        raise ValueError(f"max_model_len = {asked}: the model has max_position_embeddings = {model}: ask for no more")
    return asked or min(model, MAX_LEN_UNASKED)


def staged_model(config: EngineConfig, count: int) -> ModelSpec:
    """The first of so many stages of a configuration's model. Raises ValueError, OSError where it can't be cut."""
    model = read_config(config)
    longest = resolve_max_model_len(config.max_model_len, model.max_position_embeddings)
    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    model = with_windows(with_codes(model, config.cache, dtype).within(longest), config.cache, dtype, longest)
    return for_stage(model, 0, count)
