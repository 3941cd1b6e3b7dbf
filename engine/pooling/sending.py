"""Numbers of a pass on their way from the host to its device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the same on a device, from memory that a GPU reads itself: the host doesn't wait."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def sent_ranges(ranges: Sequence[range], device: torch.device) -> torch.Tensor:
    """Return their numbers, one behind the other [N] int64, on a device; there is one range at least."""
    return sent(torch.from_numpy(np.concatenate([np.arange(one.start, one.stop, one.step) for one in ranges])), device)
