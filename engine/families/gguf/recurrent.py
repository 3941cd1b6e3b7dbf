"""Layers with a state, as entries say them."""

from __future__ import annotations

from engine.families.gguf.entries import Config, Entries
from engine.families.gguf.experts import SIGMOID, sigmoid_experts
from engine.families.gguf.parts import common, frame, head_dim, rope

OF_STATES = tuple(
    f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)


def layers_by_state(entries: Entries) -> list[str]:
    """Kinds of layers: those with the tensors of a recurrent state have no attention."""
    states = entries.layers_with("ssm_out.weight")
    return ["linear_attention" if there else "full_attention" for there in states]


def mamba(entries: Entries) -> Config:
    """Mamba-2's sizes, and its biases, from the tensors of such a layer."""
    first = entries.layers_with("ssm_in.weight").index(True)
    inner, heads = entries.number("ssm.inner_size"), entries.number("ssm.time_step_rank")
    return {
        "mamba_expand": inner // entries.number("embedding_length"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": entries["ssm.group_count"],
        "mamba_d_state": entries["ssm.state_size"],
        "mamba_d_conv": entries["ssm.conv_kernel"],
        "mamba_conv_bias": entries.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": entries.has(f"blk.{first}.ssm_in.bias"),
    }


def lfm2_experts(entries: Entries) -> Config:
    """The experts behind LFM2's dense layers."""
    if entries["expert_gating_func"] != SIGMOID:
        raise entries.unsupported("expert_gating_func")
    num_dense = entries.number("leading_dense_block_count")
    return {
        "num_dense_layers": num_dense,
        "num_experts": entries["expert_count"],
        "num_experts_per_tok": entries["expert_used_count"],
        "moe_intermediate_size": entries["expert_feed_forward_length"],
        "norm_topk_prob": bool(entries.get("expert_weights_norm", True)),
        "routed_scaling_factor": entries.get("expert_weights_scale") or 1.0,
        "use_expert_bias": entries.has(f"blk.{num_dense}.exp_probs_b.bias"),
    }


def convolutions(entries: Entries) -> Config:
    """LFM2: layers without KV heads are short convolutions."""
    heads = entries.of_layers("attention.head_count_kv")
    if len(set(heads) - {0}) != 1:
        raise entries.unsupported("attention.head_count_kv")
    config = common(entries, kv_heads=max(heads)) | rope(entries, theta=1_000_000.0)
    config["norm_eps"] = config.pop("rms_norm_eps")
    kinds = ["full_attention" if there else "conv" for there in heads]
    return config | {"layer_types": kinds, "conv_L_cache": entries["shortconv.l_cache"], "head_dim": head_dim(entries)}


def nemotron_h(entries: Entries) -> Config:
    """Nemotron-H: the tensors tell if a layer is Mamba-2, attention, an MLP or experts."""
    kinds = {"ssm_out": "M", "attn_q": "*", "ffn_gate_inp": "E", "ffn_up": "-"}
    there = {letter: entries.layers_with(f"{module}.weight") for module, letter in kinds.items()}
    letters = ["".join(letter for letter, layers in there.items() if layers[at]) for at in range(entries.num_layers)]
    entries.agree("block_count", all(len(each) == 1 for each in letters))
    plain, sparse = ("".join(letters).find(letter) for letter in "-E")
    # The norms' size has two names.
    eps = entries.get("attention.layer_norm_rms_epsilon") or entries["attention.layer_norm_epsilon"]
    entries.get("attention.layer_norm_epsilon")
    entries.where_any("feed_forward_length")
    sizes, shared = mamba(entries), frame(entries)
    config = shared | {
        "num_key_value_heads": entries.where_any("attention.head_count_kv"),
        "intermediate_size": entries.rows(f"blk.{plain}.ffn_up.weight") if plain >= 0 else 1,
        "mlp_bias": any(entries.has(f"blk.{at}.ffn_up{of}.bias") for at, of in ((plain, ""), (sparse, "_shexp"))),
        "hybrid_override_pattern": "".join(letters),
        "head_dim": head_dim(entries),
        "layer_norm_epsilon": eps,
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "use_bias": sizes["mamba_proj_bias"],
    }
    entries.get("rope.dimension_count")  # there is no rope
    entries.get("rope.freq_base")
    if sparse < 0:
        return config
    own = sigmoid_experts(entries) | {
        "moe_shared_expert_intermediate_size": entries["expert_shared_feed_forward_length"],
        "moe_latent_size": entries.get("moe_latent_size"),
    }
    own.pop("first_k_dense_replace")
    return config | own


def jamba(entries: Entries) -> Config:
    """Jamba: layers without KV heads are recurrent. Both kinds of layers are given by offset and period."""
    kv_heads = entries.of_layers("attention.head_count_kv")
    hidden, inner = entries.size("embedding_length"), entries.size("ssm.inner_size")
    entries.agree("ssm.inner_size", inner % hidden == 0)
    config = common(entries, kv_heads=entries.where_any("attention.head_count_kv"))
    config |= _distance(entries, "attention.head_count_kv", "attn_layer", [bool(heads) for heads in kv_heads])
    if (num_experts := entries.size("expert_count")) > 1:
        routers = entries.layers_with("ffn_gate_inp.weight")
        entries.agree("expert_count", any(routers))
        config |= _distance(entries, "expert_count", "expert_layer", routers)
    return config | {
        "num_experts": num_experts,
        "num_experts_per_tok": entries["expert_used_count"],
        "mamba_expand": inner // hidden,
        "mamba_d_state": entries["ssm.state_size"],
        "mamba_d_conv": entries["ssm.conv_kernel"],
        "mamba_dt_rank": entries["ssm.time_step_rank"],
        "mamba_conv_bias": any(entries.layers_with("ssm_conv1d.bias")),
        "mamba_proj_bias": any(entries.layers_with("ssm_in.bias")),
    }


def _distance(entries: Entries, name: str, field: str, there: list[bool]) -> Config:
    """Read offset and period of such layers. Raises UnsupportedModelError, naming the entry."""
    found = [layer for layer, is_there in enumerate(there) if is_there]
    first, period = (*found, 0)[0], found[1] - found[0] if len(found) > 1 else len(there)
    if first >= period or found != list(range(first, len(there), period)):
        raise entries.unsupported(name)
    return {f"{field}_offset": first, f"{field}_period": period}


def gated_delta(entries: Entries) -> Config:
    """The gated delta rule in the layers with its tensors; gated attention in the others."""
    sizes = frame(entries)
    heads = entries.number("ssm.time_step_rank")
    for name in ("attention.recurrent_layers", "full_attention_interval"):
        entries.ignore(name)
    return (
        sizes
        | rope(entries, theta=1_000_000.0)
        | {
            "intermediate_size": entries.where_any("feed_forward_length") or 1,
            "num_key_value_heads": entries.where_any("attention.head_count_kv"),
            "rms_norm_eps": entries["attention.layer_norm_rms_epsilon"],
            "head_dim": head_dim(entries),
            "attention_bias": any(entries.layers_with("attn_q.bias")),
            "layer_types": layers_by_state(entries),
            "linear_conv_kernel_dim": entries["ssm.conv_kernel"],
            "linear_key_head_dim": entries["ssm.state_size"],
            "linear_num_key_heads": entries["ssm.group_count"],
            "linear_num_value_heads": heads,
            "linear_value_head_dim": entries.number("ssm.inner_size") // heads,
        }
    )
