"""Parts of a config.json that entries of most architectures say alike."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.gguf.entries import Config, Entries

_ROPE_FREQUENCIES = "rope_freqs.weight"


def biases(entries: Entries) -> Config:
    """True for products with biases, which only the tensors tell."""
    return {"attention_bias": entries.has("blk.0.attn_q.bias"), "mlp_bias": entries.has("blk.0.ffn_up.bias")}


def windows_by_layer(entries: Entries) -> Config:
    """The sliding window, and the layers that have it."""
    windowed = entries.of_layers("attention.sliding_window_pattern")
    return {
        "sliding_window": entries["attention.sliding_window"],
        "layer_types": ["sliding_attention" if there else "full_attention" for there in windowed],
    }


def common(entries: Entries, *, kv_heads: int | None = None, norm: str = "attn_norm") -> Config:
    """Read the fields of nearly all architectures; `kv_heads`: if layers differ in it; `norm`: a tensor of each layer."""
    return frame(entries, norm=norm) | {
        "intermediate_size": entries.size("feed_forward_length"),
        "num_key_value_heads": kv_heads or num_kv_heads(entries),
        "rms_norm_eps": entries["attention.layer_norm_rms_epsilon"],
    }


def common_normed_after(entries: Entries) -> Config:
    """Read the same where norms stand behind both halves of a layer."""
    return common(entries, norm="post_attention_norm")


def layer_normed(eps: str) -> Callable[[Entries], Config]:
    """The same with LayerNorm, whose epsilon the class calls `eps`."""
    return lambda entries: (
        frame(entries)
        | {
            "intermediate_size": entries.size("feed_forward_length"),
            "num_key_value_heads": num_kv_heads(entries),
            eps: entries["attention.layer_norm_epsilon"],
        }
    )


def num_kv_heads(entries: Entries) -> int:
    return entries.number_or("attention.head_count_kv", 0) or entries.size("attention.head_count")


def frame(entries: Entries, *, norm: str = "attn_norm") -> Config:
    """Read the fields of all architectures.

    Sizes that nothing of is there would take memory before a tensor is looked at.
    """
    entries.agree("embedding_length", entries.columns("token_embd.weight") == entries.size("embedding_length"))
    entries.agree("block_count", entries.has(f"blk.{entries.num_layers - 1}.{norm}.weight"))
    return {
        "dtype": entries.dtype(),
        "vocab_size": entries.rows("token_embd.weight"),
        "hidden_size": entries.size("embedding_length"),
        "num_hidden_layers": entries.num_layers,
        "num_attention_heads": entries.size("attention.head_count"),
        "max_position_embeddings": entries.size("context_length"),
        "tie_word_embeddings": not entries.has("output.weight"),
    }


def head_dim(entries: Entries) -> int:
    own = entries.number_or("attention.key_length", 0)
    return own or entries.size("embedding_length") // entries.size("attention.head_count")


def rope(entries: Entries, *, theta: float = 10_000.0) -> Config:
    """The rope of a head, or of its first part."""
    values = rotation(entries, theta=theta)
    size = head_dim(entries)
    share = entries.number_or("rope.dimension_count", size) / size
    return {"rope_parameters": values if share == 1 else values | {"partial_rotary_factor": share}}


def rotation(entries: Entries, *, theta: float = 10_000.0) -> Config:
    """The rotary frequencies. Factors in a tensor are LongRoPE's for any length."""
    values: Config = {"rope_theta": float(entries.get("rope.freq_base", theta))}
    kind = entries.get("rope.scaling.type", "none")
    factor = entries.get("rope.scaling.factor") or entries.get("rope.scale_linear")
    original = entries.get("rope.scaling.original_context_length")
    magnitude = entries.get("rope.scaling.attn_factor")
    if entries.has("rope_factors_long.weight"):
        factors = {f"{length}_factor": entries.floats(f"rope_factors_{length}.weight") for length in ("short", "long")}
        values |= {"rope_type": "longrope", "original_max_position_embeddings": original} | factors
    elif entries.has(_ROPE_FREQUENCIES):
        divisors = entries.floats(_ROPE_FREQUENCIES)
        values |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
        values |= {"original_max_position_embeddings": entries["context_length"], "attention_factor": 1.0}
    elif kind == "yarn":
        values |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        values |= _betas(entries) | _magnitudes(entries)
    elif kind == "linear" and factor:
        values |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear", "longrope"):
        raise entries.unsupported("rope.scaling.type")
    elif kind == "none" and factor not in (None, 0, 1):
        raise entries.unsupported("rope.scaling.factor" if entries.get("rope.scaling.factor") else "rope.scale_linear")
    if magnitude is not None and "rope_type" in values:
        values["attention_factor"] = magnitude
    elif magnitude not in (None, 1):
        raise entries.unsupported("rope.scaling.attn_factor")
    return values


def _magnitudes(entries: Entries) -> Config:
    """Read YaRN's factor of cosines and sines, if a file has it."""
    if entries.get("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise entries.unsupported("rope.scaling.yarn_ext_factor")
    whole, scale = (entries.get(f"rope.scaling.yarn_{name}") for name in ("attn_factor", "log_multiplier"))
    told = {"attention_factor": whole} if whole else {}
    return told | (dict.fromkeys(("mscale", "mscale_all_dim"), scale) if scale else {})


def _betas(entries: Entries) -> Config:
    given = {name: entries.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return {name: value for name, value in given.items() if value}


def full_attention(entries: Entries) -> Config:
    """Qwen: such files never use its sliding windows."""
    entries.get("attention.sliding_window")
    return {"use_sliding_window": False}
