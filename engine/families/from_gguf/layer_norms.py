"""Models with LayerNorm."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.from_gguf.entries import Config, Entries
from engine.families.from_gguf.shared import biases, frame, head_dim, num_kv_heads, rope

_LAYERS_TO_NO_WINDOW = 4


def _cohere(entries: Entries) -> Config:
    own = {"logit_scale": entries["logit_scale"], "use_qk_norm": entries.has("blk.0.attn_q_norm.weight")}
    return _common(entries, "CohereForCausalLM", "layer_norm_eps") | rope(entries) | own


def _cohere_2(entries: Entries) -> Config:
    """Every fourth layer has no window."""
    own = {"logit_scale": entries["logit_scale"], "head_dim": head_dim(entries)}
    windows = {"sliding_window": entries["attention.sliding_window"], "sliding_window_pattern": _LAYERS_TO_NO_WINDOW}
    return _common(entries, "Cohere2ForCausalLM", "layer_norm_eps") | rope(entries) | own | windows


def _starcoder_2(entries: Entries) -> Config:
    own = {"use_bias": entries.has("blk.0.attn_q.bias"), "sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}
    return _common(entries, "Starcoder2ForCausalLM", "norm_epsilon") | rope(entries) | own


def _phi_2(entries: Entries) -> Config:
    """The width that files say is not the MLP's in small models."""
    config = _common(entries, "PhiForCausalLM", "layer_norm_eps") | rope(entries)
    return config | {"intermediate_size": entries.rows("blk.0.ffn_up.weight"), "hidden_act": "gelu_new"}


def _nemotron(entries: Entries) -> Config:
    entries.ignore("attention.layer_norm_rms_epsilon")
    own = {"head_dim": head_dim(entries), "hidden_act": "relu2"}
    return _common(entries, "NemotronForCausalLM", "norm_eps") | rope(entries) | biases(entries) | own


def _stablelm(entries: Entries) -> Config:
    own = {
        "use_qkv_bias": entries.has("blk.0.attn_q.bias"),
        "use_parallel_residual": bool(entries.get("use_parallel_residual", False)),
        "qk_layernorm": False,
    }
    return _common(entries, "StableLmForCausalLM", "layer_norm_eps") | rope(entries) | own


def _common(entries: Entries, architecture: str, eps: str) -> Config:
    """`eps`: what the family calls it."""
    return frame(entries, architecture) | {
        "intermediate_size": entries.size("feed_forward_length"),
        "num_key_value_heads": num_kv_heads(entries),
        eps: entries["attention.layer_norm_epsilon"],
    }


LAYER_NORMS: dict[str, Callable[[Entries], Config]] = {
    "command-r": _cohere,
    "cohere2": _cohere_2,
    "nemotron": _nemotron,
    "stablelm": _stablelm,
    "starcoder2": _starcoder_2,
    "phi2": _phi_2,
}
