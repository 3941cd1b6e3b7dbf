"""The Triton kernels on a GPU: the interpreter's checks again, with larger shapes and bfloat16."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_checks import CHECKS, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_triton_kernel(name: str) -> None:
    run(name, "cuda", large=True)
