"""Readers of recurrent layers that several architectures have in common."""

from __future__ import annotations

from engine.families.from_gguf.entries import Config, Entries

OF_STATES = tuple(
    f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)


def layers_by_state(entries: Entries) -> list[str]:
    """Layers with the tensors of a state have no attention."""
    states = entries.layers_with("ssm_out.weight")
    return ["linear_attention" if there else "full_attention" for there in states]


def mamba(entries: Entries) -> Config:
    """Mamba-2's sizes, and which of its products have biases, by a layer that has it."""
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
