"""Families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

from engine.model.families.experts import mixtral, qwen2_moe, qwen3_moe
from engine.model.families.fields import Fields
from engine.model.spec import ModelSpec

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "MixtralForCausalLM": mixtral.read,
    "Qwen2MoeForCausalLM": qwen2_moe.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
}
