"""The GPUs that a worker and its ranks see."""

from __future__ import annotations

import os

from common.settings import ConfigError


def see_one_gpu(index: int, *, count: int) -> None:
    """Hide all but one GPU from this process, before CUDA is used. `count`: GPUs seen now. Raises ConfigError."""
    see_gpus(index, 1, count=count)


def see_gpus(first: int, wanted: int, *, count: int) -> None:
    """Hide all but some neighbouring GPUs from this process and those that it starts, before CUDA is used. Raises ConfigError."""
    if first + wanted > count:
        several = f" for {wanted} ranks or stages" if wanted > 1 else ""
        raise ConfigError(f"--device cuda:{first}{several}: this process sees {count} CUDA devices")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + wanted])
