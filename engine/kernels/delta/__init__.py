"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024): linear attention with a recurrent state instead of a KV cache.

Reading order: `plan` (where states are, and which tokens change them), `convolution`, `walk`, `rule`, `channel_rule` and `gate`
in plain torch, and their Triton versions.
"""

from engine.kernels.delta.channel_rule import channel_delta_rule
from engine.kernels.delta.convolution import convolve
from engine.kernels.delta.gate import gated_norm
from engine.kernels.delta.plan import Channels, Columns, DeltaHeads, Span, StateBatch, deal_out_states, max_tiles
from engine.kernels.delta.rule import delta_rule

__all__ = [
    "Channels",
    "Columns",
    "DeltaHeads",
    "Span",
    "StateBatch",
    "channel_delta_rule",
    "convolve",
    "deal_out_states",
    "delta_rule",
    "gated_norm",
    "max_tiles",
]
