"""Google: Gemma 1 to 4; what its families share is in `gemma`."""

from __future__ import annotations

from engine.families.google import gemma, gemma3n, gemma4
from engine.families.reading import Family

FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": gemma.read_2,
    "Gemma3ForCausalLM": gemma.read_3,
    "Gemma3ForConditionalGeneration": gemma.read_3,
    "Gemma3nForCausalLM": gemma3n.read,
    "Gemma3nForConditionalGeneration": gemma3n.read_beside_others,
    "Gemma4ForCausalLM": gemma4.read,
    "Gemma4ForConditionalGeneration": gemma4.read,
    "Gemma4UnifiedForCausalLM": gemma4.read_unified,
    "Gemma4UnifiedForConditionalGeneration": gemma4.read_unified,
    "GemmaForCausalLM": gemma.read,
    "VaultGemmaForCausalLM": gemma.read_vault,
}
