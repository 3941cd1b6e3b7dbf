"""Google: Gemma's generations."""

from __future__ import annotations

from statistics import NormalDist

from engine.families.gguf.entries import Config, Entries
from engine.families.gguf.parts import common, frame, head_dim, rope, rotation, windows_by_layer

_NO_SPARSITY = -100.0  # deviations
_LAYERS_OF_GEMMA_2_27B, _LAYERS_OF_GEMMA_3_27B = 46, 62


def gemma(entries: Entries) -> Config:
    """Fields of all Gemmas; their activations are too large for float16."""
    config = common(entries) | {"head_dim": head_dim(entries)}
    return config | {"dtype": {"float16": "bfloat16"}.get(config["dtype"], config["dtype"])}


def gemma2(entries: Entries) -> Config:
    soft_caps = {"attn_logit_softcapping": entries["attn_logit_softcapping"]}
    return _with_windows(entries, _LAYERS_OF_GEMMA_2_27B) | soft_caps


def gemma3(entries: Entries) -> Config:
    entries.get("attn_logit_softcapping")
    local = {"rope_local_base_freq": float(entries.get("rope.freq_base_swa", 10_000.0))}
    period = {"sliding_window_pattern": entries.get("attention.sliding_window_pattern", 6)}
    config = _with_windows(entries, _LAYERS_OF_GEMMA_3_27B) | local | period
    rotation = rope(entries, theta=1_000_000.0)["rope_parameters"]
    if "rope_type" not in rotation:
        return config | {"rope_theta": rotation["rope_theta"]}
    scaling = {name: value for name, value in rotation.items() if name != "rope_theta"}
    return config | {"rope_theta": rotation["rope_theta"], "rope_scaling": scaling}


def _with_windows(entries: Entries, layers_of_the_largest: int) -> Config:
    """Gemma 2 and 3: the largest model of a generation scales scores by another size than a head's, which no entry says."""
    config = gemma(entries)
    is_largest = config["num_hidden_layers"] == layers_of_the_largest
    scale = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    config |= {"query_pre_attn_scalar": scale, "sliding_window": entries["attention.sliding_window"]}
    return config | {"final_logit_softcapping": entries.get("final_logit_softcapping")}


def gemma3n(entries: Entries) -> Config:
    """Gemma 3n: a file has the deviations of the gates' sparsity, config.json the shares below them."""
    scales = entries.of_layers("activation_sparsity_scale")
    return _with_layer_inputs(entries) | {
        "head_dim": head_dim(entries),
        "num_key_value_heads": entries["attention.head_count_kv"],
        "intermediate_size": entries.layers_of("feed_forward_length"),
        "activation_sparsity_pattern": [0.0 if scale < _NO_SPARSITY else NormalDist().cdf(scale) for scale in scales],
        "laurel_rank": entries.rows("blk.0.laurel_l.weight"),
        "altup_num_inputs": entries["altup.num_inputs"],
        "altup_active_idx": entries["altup.active_idx"],
    }


def gemma4(entries: Entries) -> Config:
    """Gemma 4: full-attention layers have another head size; later layers borrow keys and have wider MLPs."""
    config = _with_layer_inputs(entries)
    kinds, sizes = config["layer_types"], entries.layers_of("feed_forward_length")
    entries.rows("rope_freqs.weight")  # without them whole heads would be rotated
    first_full, is_wide = kinds.index("full_attention"), sizes[-1] != sizes[0]
    heads, own = entries.layers_of("attention.head_count_kv"), entries.number("attention.key_length_swa")
    full = {"head_dim": entries.size("attention.key_length"), "num_key_value_heads": heads[first_full]}
    num_experts = entries.get("expert_count") or 0
    for name in ("rope.dimension_count", "rope.dimension_count_swa", "attention.value_length_swa"):
        entries.ignore(name)
    return config | {
        "head_dim": own,
        "num_key_value_heads": heads[0],
        "per_layer_config": {str(at): full for at, kind in enumerate(kinds) if kind == "full_attention"},
        "attention_k_eq_v": not entries.has(f"blk.{first_full}.attn_v.weight"),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": is_wide,
        "enable_moe_block": num_experts > 0,
        "num_experts": num_experts,
        "top_k_experts": entries.get("expert_used_count") or 0,
        "moe_intermediate_size": entries.get("expert_feed_forward_length") or 0,
    }


def _with_layer_inputs(entries: Entries) -> Config:
    """Two kinds of layers with a rope each, and per-layer inputs in some sizes."""
    config = frame(entries) | windows_by_layer(entries)
    inputs = entries.get("embedding_length_per_layer_input") or 0
    full = {"rope_type": "default"} | rotation(entries, theta=1_000_000.0)
    sliding = {"rope_type": "default", "rope_theta": float(entries.get("rope.freq_base_swa", 10_000.0))}
    return config | {
        "dtype": {"float16": "bfloat16"}.get(config["dtype"], config["dtype"]),
        "rms_norm_eps": entries["attention.layer_norm_rms_epsilon"],
        "num_kv_shared_layers": entries.get("attention.shared_kv_layers") or 0,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": entries.rows("per_layer_token_embd.weight") if inputs else 0,
        "final_logit_softcapping": entries.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }
