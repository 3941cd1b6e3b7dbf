"""Models that pool compute by the kernels of GPUs what transformers does."""

from __future__ import annotations

import pytest

from tests.unit.kernels import text_checks
from tests.unit.kernels.interpreter import Interpreter
from tests.unit.kernels.pooled_checks import CHECKS

LONG = {
    f"{what}, captured" for what in ("ModernBertModel", "Qwen3Model", "MPNetModel", "texts of one length", "prefixes")
}  # BertModel's passes are captured alike


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CHECKS])
def test_vectors_in_the_interpreter(interpreter: Interpreter, name: str) -> None:
    interpreter.check("pooled_checks", name)


@pytest.mark.parametrize("name", text_checks.CHECKS)
def test_kernels_over_texts(interpreter: Interpreter, name: str) -> None:
    interpreter.check("text_checks", name)
