"""The exact results of the cells with quantised weights, against the kernels' plain versions."""

from __future__ import annotations

import torch

from benchmarks.kernels.case import errors
from benchmarks.kernels.quantised import FORMATS, OF_EXPERTS, Shape, column_of, quantised_cases

TINY = Shape(inputs=256, outputs=64, rows=(2, 70), experts=3, chosen=2, hidden=128, size=128, tokens=(5,))


def test_each_cell_is_as_near_as_its_type_allows() -> None:
    torch.manual_seed(1)
    columns = set()
    for case in quantised_cases(torch.device("cpu"), TINY, torch.float32):
        error, rounding = errors(case, torch.float32)
        columns.add(column_of(case))
        rounds_rows = case.name.startswith("fp8") and case.name.endswith("b70")
        assert rounding <= error < (0.04 if rounds_rows else 1e-5), case.name
    products = {(name, f"{kind}_b{rows}") for name in FORMATS for kind in ("linear", "gated") for rows in TINY.rows}
    without = {(name, "gated_b70") for name in FORMATS if name.startswith("fp8")}
    assert columns == products - without | {(name, "experts_t5") for name in OF_EXPERTS}
