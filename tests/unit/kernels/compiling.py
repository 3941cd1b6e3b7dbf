"""Compiles kernels in a process of its own, for a GPU that isn't there: only the driver is fake.

    python -m tests.unit.kernels.compiling

Prints as JSON, for each of four steps, what was compiled ([kernel, thread, in the cache]) and what was launched.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver

from engine.kernels import triton_linear, triton_norm
from engine.kernels.launch import Kernel, compiled_ahead
from tests.compilations import watch

launched: list[str] = []


class _Utils:
    """Loads nothing."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 18}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[str, str, int, int, int]:
        assert binary, "no machine code"
        return name, name, 32, 0, 1024


class HopperDriver:
    """What compilation and launches ask a driver for."""

    utils = _Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: launched.append(metadata.name)


def main() -> None:
    """Many launches ahead, and an error; some, each twice; one that can't be compiled; those some again, launched."""
    driver.set_active(HopperDriver())
    compiled = watch()
    steps = []
    for step in (_broken, _ahead, _wrong, _launch_some):
        compiled.clear()
        launched.clear()
        step()
        steps.append((list(compiled), list(launched)))
    print(json.dumps(steps), flush=True)


def _broken() -> None:
    with contextlib.suppress(FileNotFoundError), compiled_ahead():
        for number in range(1, 40):
            _norm(16 * number)
        raise FileNotFoundError("the weights")


def _ahead() -> None:
    with compiled_ahead():
        for _ in range(2):
            _launch_some()
        assert not launched


def _wrong() -> None:
    def launch() -> None:
        kernel.launch((1,), "wrong", *[torch.ones(3)] * 5, 1, 1e-6, 3, 3, 0, 0, False)  # 3: not a power of two

    kernel = Kernel(triton_norm._norm)
    with compiled_ahead():
        launch()
    try:
        launch()
    except CompilationError:
        launched.append("why not")


def _launch_some() -> None:
    for size in (1024, 2048):
        _norm(size)
    weight = torch.ones(128, 512, dtype=torch.bfloat16)
    for num_rows in (1, 20):
        triton_linear.linear(torch.ones(num_rows, 512, dtype=torch.bfloat16), weight, None)


def _norm(size: int) -> None:
    x = torch.ones(4, size, dtype=torch.bfloat16)
    triton_norm.rms_norm(x, x[0], 1e-6)


if __name__ == "__main__":
    main()
