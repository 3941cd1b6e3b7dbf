"""The scans of both kinds of Mamba, and what is around them: their reference and their Triton kernels."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.unit.kernels import mamba_checks, selective_checks
from tests.unit.kernels.interpreter import Interpreter

SMALL = [
    pytest.param(module, name, id=name)
    for module in (mamba_checks, selective_checks)
    for name in module.SPECS
    if "large" not in name and name != "wide"
]


@pytest.mark.parametrize(("module", "name"), SMALL)
def test_the_reference(module: ModuleType, name: str) -> None:
    module.run(name, "cpu")


@pytest.mark.quick("odd", "bounded", "selective, odd")
@pytest.mark.parametrize(("module", "name"), SMALL)
def test_the_kernels(interpreter: Interpreter, module: ModuleType, name: str) -> None:
    interpreter.check(module.__name__.rpartition(".")[2], name)
