"""Drafters inside the engine: heads that read the target's hidden states, and whole models. Passes verify what they guess.

A head is one module with a reader of its config.json, and an entry in `DRAFTERS`; a model's own layer is in `mtp`, a draft model
in `whole`. A drafter's layers are further layers of the target's blocks of tokens, so their KV moves, hashes and is cached with
every block. See docs/design/sampling.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from engine.checkpoint.safetensors import stored_tensors
from engine.config import EngineConfig
from engine.drafts.dflash import read_dflash, read_dspark
from engine.drafts.eagle3 import read_eagle3
from engine.drafts.heads import HeadSpec
from engine.drafts.mtp import read_mtp
from engine.drafts.peagle import MASK_HIDDEN, read_peagle
from engine.drafts.whole import read_draft_model
from engine.families import architectures, read_fields
from engine.families.reading import Fields
from engine.spec.model import ModelSpec, UnsupportedModelError
from engine.spec.ranks import draft_for_rank
from modelfiles.gguf import is_gguf


class _Read(Protocol):
    def __call__(self, fields: Fields, target: ModelSpec, folder: Path, *, trained_for: str) -> HeadSpec:
        """Read a head's config.json. Raises UnsupportedModelError for another target's."""


# Entries of `architectures`, and of `speculators_model_type`.
DRAFTERS: Mapping[str, _Read] = {
    **dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaEagle3", "eagle3"), read_eagle3),
    **dict.fromkeys(("PEagleSpeculator", "LlamaForCausalLMPeagle", "peagle"), read_peagle),
    **dict.fromkeys(("DFlashDraftModel", "DFlashSpeculator", "dflash"), read_dflash),
    **dict.fromkeys(("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "dspark"), read_dspark),
}
_BESIDE_THE_LAYER = ("speculators_config", "speculators_version", "has_no_defaults_at_init", "embed_requires_grad")


def with_draft(
    model: ModelSpec, config: EngineConfig, *, longest: int, is_ours: bool
) -> tuple[ModelSpec, HeadSpec | None]:
    """Return the model with its drafter's layers in its blocks, and the drafter; the model itself if there is none.

    `longest`: tokens of a sequence at most. `is_ours`: our decoder computes the model. Raises UnsupportedModelError, naming the
    field.
    """
    folder = config.draft.folder if config.draft is not None else None
    if config.draft is None or folder is None:
        return model, None
    if not is_ours:
        raise UnsupportedModelError(f"draft = {folder}: not for a model that transformers computes")
    try:
        if config.draft.is_model:
            spec: HeadSpec = read_draft_model(folder, config, model, longest=longest)
        elif folder == config.model:
            model, spec = read_mtp(folder, architectures(read_fields(folder)), model)
        else:
            spec = _read(folder, model)
        draft_for_rank(spec.in_pool, 0, config.tensor_parallel_size)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise UnsupportedModelError(f"draft = {folder}: {error}") from error
    return replace(model, draft=spec.in_pool), spec


def _read(folder: Path, model: ModelSpec) -> HeadSpec:
    if is_gguf(folder):
        raise UnsupportedModelError("a draft head is a folder with config.json and safetensors")
    values = read_fields(folder)
    fields = Fields(values.get("transformer_layer_config", {}) | values | (values.get("dflash_config") or {}))
    fields.ignore("transformer_layer_config", "dflash_config", "speculators_model_type", *_BESIDE_THE_LAYER)
    named = [str(values.get("speculators_model_type") or ""), *architectures(values)]
    read = next((DRAFTERS[name] for name in named if name in DRAFTERS), None)
    if read is None:
        raise UnsupportedModelError(
            f"config.json: architectures = {values.get('architectures')} is no draft head that is supported; supported:"
            f" {', '.join(DRAFTERS)}"
        )
    if read is read_eagle3 and any(stored.name == MASK_HIDDEN for stored in stored_tensors(folder)):
        read = read_peagle  # some heads have EAGLE-3's name
    spec = read(fields, model, folder, trained_for=_target(values))
    fields.check_all_known(remedy="")
    return spec


def _target(values: dict[str, Any]) -> str:
    """The name of the model that a head was trained for; "" if it is not told."""
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    return str(values.get("target_model") or verifier.get("name_or_path") or "")
