"""Facts about a kernel's device, and the choice between a kernel's two versions."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter, for tests on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device's description, with the number of processors for grids and tile tables."""

    processors: int  # streaming multiprocessors: H100 and H200 132, B200 148, A100 108
    has_tma: bool  # bulk copies (TMA), and programmatic dependent launch
    is_hopper: bool  # supports instructions of this generation only


# Without a GPU, work is divided as on Hopper, so that the interpreter checks its shapes.
_NO_GPU = Device(processors=132, has_tma=False, is_hopper=False)


@functools.cache
def describe(device: torch.device) -> Device:
    if device.type != "cuda":
        return _NO_GPU
    major, _ = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Device(processors=processors, has_tma=major >= 9, is_hopper=major == 9)


def use_triton(x: torch.Tensor) -> bool:
    """True if the Triton version computes this tensor, else plain torch."""
    return x.is_cuda or _INTERPRET
