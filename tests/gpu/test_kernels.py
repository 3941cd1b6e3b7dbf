"""The Triton kernels on a GPU: the interpreter's checks again, with larger shapes and bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.unit.kernels import (
    channel_checks,
    codes_checks,
    collective_checks,
    convolution_checks,
    delta_checks,
    expert_checks,
    far_checks,
    fp8_checks,
    group_checks,
    mamba_checks,
    mla_checks,
    selective_checks,
    share_checks,
    sparse_checks,
    switch_checks,
    text_checks,
    triton_checks,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def memory_goes_back() -> Iterator[None]:
    """PyTorch's allocator gives the card back what a check took: several processes share it, one check takes 40 GB."""
    yield
    torch.cuda.empty_cache()


MODULES = (
    triton_checks, expert_checks, switch_checks, mla_checks, sparse_checks, group_checks, codes_checks, fp8_checks,
    far_checks, collective_checks, share_checks, text_checks,
)  # fmt: skip
OF_STATES = (channel_checks, convolution_checks, delta_checks, mamba_checks, selective_checks)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, id=f"{module.__name__.rpartition('.')[2]}-{name}")
        for module in (*MODULES, *OF_STATES)
        for name in (module.SPECS if module in OF_STATES else module.CHECKS)
    ],
)
def test_kernel(module: ModuleType, name: str) -> None:
    if module is fp8_checks and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs 8-bit floats")
    if module in OF_STATES:
        module.run(name, "cuda")
    else:
        module.run(name, "cuda", large=True)
