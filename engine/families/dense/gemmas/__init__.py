"""Gemma: what its families share is in `gemma`."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.dense.gemmas import gemma, gemma3n, gemma4
from engine.families.known import Fields
from engine.spec.model import ModelSpec

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "GemmaForCausalLM": gemma.read,
    "Gemma2ForCausalLM": gemma.read_2,
    "Gemma3ForCausalLM": gemma.read_3,
    "Gemma3ForConditionalGeneration": gemma.read_3,
    "Gemma3nForCausalLM": gemma3n.read,
    "Gemma3nForConditionalGeneration": gemma3n.read_beside_others,
    "Gemma4ForCausalLM": gemma4.read,
    "Gemma4ForConditionalGeneration": gemma4.read,
    "Gemma4UnifiedForCausalLM": gemma4.read_unified,
    "Gemma4UnifiedForConditionalGeneration": gemma4.read_unified,
    "VaultGemmaForCausalLM": gemma.read_vault,
}
