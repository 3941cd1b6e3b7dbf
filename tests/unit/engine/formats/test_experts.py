"""Ranks have some of a checkpoint's quantised experts each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.formats.dense import DENSE
from engine.formats.fp8 import Fp8, Scales
from engine.formats.packed import PackedRows
from engine.formats.product import ExpertsSpec, Format, Order
from engine.kernels.quantised.fp8 import Fp8Matrix
from engine.kernels.quantised.groups import Groups, values
from engine.weights.loader import load_weights
from engine.weights.parameters import Weights
from tests.unit.engine.formats.checkpoints import Store, fp8_block, fp8_row
from tests.unit.engine.formats.packing import packed_rows

MODULES = ("experts.{}.gate", "experts.{}.up")
SPEC = ExpertsSpec(num_experts=4, rows=2 * 64, inputs=128, each=MODULES, together=(), order=Order.ROWS, halves=True)
FORMATS: dict[str, tuple[Format, Store]] = {
    "fp8, rows": (Fp8(scales=Scales.ROW), fp8_row),
    "fp8, blocks": (Fp8(scales=Scales.BLOCK, block=(64, 64)), fp8_block(64, 64)),
    "plain": (DENSE, lambda module, matrix: ({"weight": matrix}, matrix)),
    "groups": (PackedRows(bits=4, group=32, has_zeros=False), packed_rows(4, 32)),
}


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_share_experts(name: str, has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.formats.fp8.multiplies_fp8", lambda device: has_kernels)
    monkeypatch.setattr("engine.formats.groups.use_triton", lambda x: has_kernels)
    torch.manual_seed(5)
    format, store = FORMATS[name]
    tensors, plain = dict[str, torch.Tensor](), torch.empty(SPEC.shape)
    for expert in range(SPEC.num_experts):
        for half, module in zip(plain[expert].chunk(2), MODULES, strict=True):
            parts, stands_for = store(module, torch.randn(half.shape))
            half.copy_(stands_for)
            tensors |= {f"{module.format(expert)}.{kind}": part.contiguous() for kind, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in (0, 1):
        weights = Weights(torch.float32, torch.device("cpu"), rank=rank, size=2)
        found = format.experts(SPEC, weights, under="")
        load_weights(weights, tmp_path)
        assert isinstance(found, torch.Tensor) == (format is DENSE or not has_kernels)
        for index in range(2):
            torch.testing.assert_close(_floats(found, index), plain[2 * rank + index])


def _floats(experts: torch.Tensor | Groups | Fp8Matrix, index: int) -> torch.Tensor:
    own = experts[index]
    if isinstance(own, torch.Tensor):
        return own
    return own.plain() if isinstance(own, Fp8Matrix) else values(own)
