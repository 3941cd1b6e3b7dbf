"""The costs of Llama-3.1-8B on an H200, as curves through measured points, for simulations.

The points are those of `results/engine.md` (prefill, decode) and of the transfer between two of them over NVLink.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

KV_BYTES = 131_072  # one token, all layers, bfloat16
READ_BYTES_PER_S = 4.2e12
LINK_BYTES_PER_S = 330e9
HANDOFF_MS = 2.0  # lease, manifest and settling, without the bytes
MEASURED_CONTEXT = 1100  # tokens a sequence had in the measured decode steps
DECODE_STEPS = ((1, 4.09), (8, 4.40), (32, 5.40), (64, 6.71), (128, 9.40), (256, 15.5))  # batch, ms
# A prompt token beside a decode batch takes this share of its time in a pass of its own: both read the weights once.
LOCAL_SLOWDOWN = 0.6

# Through 13.0 ms at 512, 48.8 at 2048 and 219 at 8192 tokens: fixed + linear + attention to all earlier positions.
PREFILL_FIXED_MS = 1.684
PREFILL_TOKEN_MS = 0.021842
PREFILL_PAIR_MS = 5.7222e-7  # per unit of the difference of squared lengths


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt: `new` tokens after `before` tokens that are computed or cached."""

    before: int
    new: int

    @property
    def work_ms(self) -> float:
        """Its time without the fixed cost of a pass."""
        end = self.before + self.new
        return PREFILL_TOKEN_MS * self.new + PREFILL_PAIR_MS * (end * end - self.before * self.before)


def prefill_ms(cached: int, new: int) -> float:
    """One prompt alone: `new` tokens after `cached` ones."""
    return PREFILL_FIXED_MS + Chunk(cached, new).work_ms


def step_ms(batch: int, context: float) -> float:
    """A decode step of `batch` sequences with `context` tokens together."""
    if batch <= 0:
        return 0.0
    batches = [size for size, _ in DECODE_STEPS]
    at = min(max(bisect.bisect_right(batches, batch), 1), len(DECODE_STEPS) - 1)
    (low, low_ms), (high, high_ms) = DECODE_STEPS[at - 1], DECODE_STEPS[at]
    ms = low_ms + (high_ms - low_ms) * (batch - low) / (high - low)
    return max(3.9, ms + 1000 * (context - MEASURED_CONTEXT * batch) * KV_BYTES / READ_BYTES_PER_S)


def transfer_ms(tokens: int) -> float:
    """The time of a handoff if only its last `tokens` are pushed after the prefill."""
    return HANDOFF_MS + 1000 * tokens * KV_BYTES / LINK_BYTES_PER_S
