"""Drafters of random weights by name, each beside its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from engine.config import DraftConfig
from tests.models import build_tiny_model
from tests.unit.engine.dflash_reference import DFlashReference, write_dflash
from tests.unit.engine.drafts import Alone, Reference
from tests.unit.engine.eagle3_reference import Reference as Eagle3Reference
from tests.unit.engine.eagle3_reference import write_head


def drafter(name: str, target: Path, folder: Path) -> tuple[dict[str, Any], Reference | None]:
    """The engine's settings, and the arithmetic."""
    if name == "none":
        return {}, None
    flags = tuple(name.split("+"))
    if flags[0] == "eagle3":
        tensors = load_file(write_head(folder, *flags[1:]) / "model.safetensors")
        return {"draft": DraftConfig(folder=folder, num_drafts=4)}, Eagle3Reference(target, tensors, *flags[1:])
    if name == "draft_model":
        build_tiny_model(folder, "qwen3", num_key_value_heads=4)
        return {"draft": DraftConfig(folder=folder, is_model=True, num_drafts=4)}, Alone(folder)
    write_dflash(folder, *flags)
    return {"draft": DraftConfig(folder=folder, num_drafts=4)}, DFlashReference(target, folder, *flags)
