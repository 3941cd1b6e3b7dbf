"""A rank's memory that its peers write into, and what it holds where nothing was written.

It has two phases, used in turn. A phase has a slot for each source, as large as the message at hand.
"""

from __future__ import annotations

import torch

PHASES = 2
PHASE_BYTES = 32 << 20  # two ranks' largest one-shot messages; larger sums go in pieces
SLOT_MULTIPLE = 16  # elements: each slot begins where wide stores may
# The same memory, as elements of 16 bits (-0.0) and of 32 (-5e-41). A payload of these bits is sent as 0.
EMPTY_16 = -0x8000
EMPTY_32 = -0x7FFF8000


def allocate_inbox(device: torch.device, phase_bytes: int = PHASE_BYTES) -> torch.Tensor:
    """Return an empty inbox. Synchronise the device before a peer learns of it."""
    return torch.full((PHASES * phase_bytes // 2,), EMPTY_16, dtype=torch.int16, device=device)
