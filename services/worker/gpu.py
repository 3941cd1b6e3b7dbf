"""The GPU that a worker sees."""

from __future__ import annotations

import os

from common.settings import ConfigError


def see_one_gpu(index: int, *, count: int) -> None:
    """Hide all but one GPU from this process, before CUDA is used. `count`: GPUs seen now. Raises ConfigError."""
    if index >= count:
        raise ConfigError(f"--device cuda:{index}: this process sees {count} CUDA devices")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
