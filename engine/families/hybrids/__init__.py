"""Families whose layers keep a state, or keys and values."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.fields import Fields
from engine.families.hybrids import (
    bamba,
    falcon_h1,
    granite4,
    jamba,
    kimi_linear,
    lfm2,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
)
from engine.spec.model import ModelSpec

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "BambaForCausalLM": bamba.read,
    "FalconH1ForCausalLM": falcon_h1.read,
    "GraniteMoeHybridForCausalLM": granite4.read,
    "JambaForCausalLM": jamba.read,
    "KimiLinearForCausalLM": kimi_linear.read,
    "Lfm2ForCausalLM": lfm2.read,
    "Lfm2MoeForCausalLM": lfm2.read_moe,
    "NemotronHForCausalLM": nemotron_h.read,
    "OlmoHybridForCausalLM": olmo_hybrid.read,
    "Qwen3NextForCausalLM": qwen3_next.read,
    "Qwen3_5ForCausalLM": qwen3_5.read,
    "Qwen3_5ForConditionalGeneration": qwen3_5.read,
    "Qwen3_5MoeForCausalLM": qwen3_5.read_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5.read_moe,
}
