"""The Triton kernels on a GPU: the interpreter's checks again, with larger shapes and bfloat16."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels import (
    codes_checks,
    delta_checks,
    expert_checks,
    fp8_checks,
    group_checks,
    latent_checks,
    switch_checks,
    triton_checks,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", triton_checks.CHECKS)
def test_triton_kernel(name: str) -> None:
    triton_checks.run(name, "cuda", large=True)


@pytest.mark.parametrize("name", expert_checks.CHECKS)
def test_experts_kernel(name: str) -> None:
    expert_checks.run(name, "cuda", large=True)


@pytest.mark.parametrize("name", switch_checks.CHECKS)
def test_switch(name: str) -> None:
    switch_checks.run(name, "cuda", large=True)


@pytest.mark.parametrize("name", delta_checks.SPECS)
def test_delta_kernel(name: str) -> None:
    delta_checks.run(name, "cuda")


@pytest.mark.parametrize("name", latent_checks.CHECKS)
def test_latent_kernel(name: str) -> None:
    latent_checks.run(name, "cuda", large=True)


@pytest.mark.parametrize("name", group_checks.CHECKS)
def test_groups_kernel(name: str) -> None:
    group_checks.run(name, "cuda", large=True)


@pytest.mark.parametrize("name", codes_checks.CHECKS)
def test_codes_kernel(name: str) -> None:
    codes_checks.run(name, "cuda", large=True)


@pytest.mark.parametrize("name", fp8_checks.CHECKS)
def test_fp8_kernel(name: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs 8-bit floats")
    fp8_checks.run(name, "cuda", large=True)
