"""Gemma's generations."""

from __future__ import annotations

from collections.abc import Callable

from engine.model.families.from_gguf.entries import Config, Entries
from engine.model.families.from_gguf.shared import common, head_dim, rope

_LAYERS_OF_GEMMA_2_27B, _LAYERS_OF_GEMMA_3_27B = 46, 62


def _gemma(entries: Entries) -> Config:
    return _of_gemma(entries, "GemmaForCausalLM") | rope(entries)


def _gemma_2(entries: Entries) -> Config:
    soft_caps = {"attn_logit_softcapping": entries["attn_logit_softcapping"]}
    return _with_windows(entries, "Gemma2ForCausalLM", _LAYERS_OF_GEMMA_2_27B) | soft_caps | rope(entries)


def _gemma_3(entries: Entries) -> Config:
    entries.get("attn_logit_softcapping")
    local = {"rope_local_base_freq": float(entries.get("rope.freq_base_swa", 10_000.0))}
    period = {"sliding_window_pattern": entries.get("attention.sliding_window_pattern", 6)}
    config = _with_windows(entries, "Gemma3ForCausalLM", _LAYERS_OF_GEMMA_3_27B) | local | period
    rotation = rope(entries, theta=1_000_000.0)["rope_parameters"]
    if "rope_type" not in rotation:
        return config | {"rope_theta": rotation["rope_theta"]}
    scaling = {name: value for name, value in rotation.items() if name != "rope_theta"}
    return config | {"rope_theta": rotation["rope_theta"], "rope_scaling": scaling}


def _of_gemma(entries: Entries, architecture: str) -> Config:
    config = common(entries, architecture) | {"head_dim": head_dim(entries)}
    return config | {"dtype": {"float16": "bfloat16"}.get(config["dtype"], config["dtype"])}


def _with_windows(entries: Entries, architecture: str, layers_of_the_largest: int) -> Config:
    """The largest model of a generation divides scores by another size than a head's, which no entry says."""
    config = _of_gemma(entries, architecture)
    is_largest = config["num_hidden_layers"] == layers_of_the_largest
    scale = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    config |= {"query_pre_attn_scalar": scale, "sliding_window": entries["attention.sliding_window"]}
    return config | {"final_logit_softcapping": entries.get("final_logit_softcapping")}


GEMMAS: dict[str, Callable[[Entries], Config]] = {
    "gemma": _gemma,
    "gemma2": _gemma_2,
    "gemma3": _gemma_3,
}
