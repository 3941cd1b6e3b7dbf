"""What loading is said to take is at least what it takes, for every format and kind of matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.formats.codebook import Codebook4, Module4
from engine.formats.fp8 import FP8_WHILE_LOADING, Fp8, Scales
from engine.formats.gguf import KEPT, GgufBlocks
from engine.formats.int4 import INT4_WHILE_LOADING
from engine.formats.int8 import INT8_TABLES, INT8_WHILE_LOADING
from engine.formats.mxfp4 import MXFP4
from engine.formats.packed import Awq, Fp4, Gptq, PackedRows, RowsOfBytes, SignedBytes
from engine.formats.product import ExpertsSpec, Format, LinearSpec, Order
from engine.weights.parameters import Shard, Weights, whole
from tests.unit.engine.formats.peaks import Made, fill, watched

ROWS, INPUTS, EXPERTS = 256, 2048, 2
MODULES = {name: Module4(name, (ROWS, INPUTS)) for name in ("m", *(f"{each}.{at}" for each in "gu" for at in (0, 1)))}
FORMATS: dict[str, Format] = {
    "awq": Awq(group=128, has_zeros=True),
    **{
        f"gptq, {bits} bits": Gptq(stored_bits=bits, group=128, less_one=True, has_order=False) for bits in (2, 3, 4, 8)
    },
    "gptq, rows": Gptq(stored_bits=8, group=-1, less_one=True, has_order=False),
    "packed": PackedRows(bits=4, group=32, has_zeros=True),
    "packed, 8 bits": PackedRows(bits=8, group=-1, has_zeros=False),
    "bytes": SignedBytes(group=-1, has_zeros=True),
    "rows of bytes": RowsOfBytes(),
    "mxfp4": Fp4(group=32, is_exponent=True),
    "nvfp4": Fp4(group=16, of_all="weight_global_scale", divides=True),
    "nf4": Codebook4(kind="nf4", block=64, scales_block=256, modules=MODULES),
    "fp4, floats": Codebook4(kind="fp4", block=64, scales_block=0, modules=MODULES),
    "fp8, rows": Fp8(scales=Scales.ROW),
    "fp8, blocks": Fp8(scales=Scales.BLOCK),
    "fp8 while loading": FP8_WHILE_LOADING,
    "int4 while loading": INT4_WHILE_LOADING,
    "int8 while loading": INT8_WHILE_LOADING,
    "mxfp4 of gpt-oss": MXFP4,
    **{kind: GgufBlocks(kind) for kind in KEPT},
}
ORDERED = {
    "gptq, order": Gptq(stored_bits=3, group=128, less_one=True, has_order=True),
    "packed, order": PackedRows(bits=4, group=128, has_zeros=True, has_order=True),
}


def _linear(format: Format, weights: Weights) -> None:
    format.linear(LinearSpec(inputs=INPUTS, outputs={"m": ROWS}, bias=False, shard=Shard.NONE), weights, under="")


def _begins_within_a_block(format: Format, weights: Weights) -> None:
    outputs = dict.fromkeys(("m", "n"), 64)
    if isinstance(format, Fp8):
        format.linear(LinearSpec(inputs=INPUTS, outputs=outputs, bias=False, shard=Shard.NONE), weights, under="")


def _matrix(format: Format, weights: Weights) -> None:
    format.matrix(LinearSpec(inputs=INPUTS, outputs={"m": ROWS}, bias=False, shard=Shard.NONE), weights, under="")


def _experts(format: Format, weights: Weights) -> None:
    each, together = (("g.{}", "u.{}"), ()) if format is not MXFP4 else ((), ("e",))
    spec = ExpertsSpec(
        num_experts=EXPERTS,
        rows=2 * ROWS,
        inputs=INPUTS,
        each=each,
        together=together,
        order=Order.ROWS if each else Order.INTERLEAVED_COLUMNS,
        halves=True,
    )
    format.experts(spec, weights, under="")


DECLARED: dict[str, Callable[[Format, Weights], None]] = {
    "linear": _linear,
    "begins within a block": _begins_within_a_block,
    "matrix": _matrix,
    "experts": _experts,
}


def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("groups", "grouped", "int4", "mxfp4", "codebook"):
        monkeypatch.setattr(f"engine.formats.{module}.use_triton", lambda x: True)
    monkeypatch.setattr("engine.formats.fp8.multiplies_fp8", lambda device: True)


@pytest.mark.quick
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("name", [*FORMATS, *ORDERED])
def test_storing_takes_no_more_than_it_says(name: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        _as_on_a_gpu(monkeypatch)
    for module in ("int4", "fp8"):
        monkeypatch.setattr(f"engine.formats.{module}._ELEMENTS_AT_ONCE", ROWS * INPUTS // 2)
    format = ORDERED[name] if name in ORDERED else FORMATS[name]
    for kind, declare in DECLARED.items():
        if (name in ORDERED and kind == "experts" and on_gpu) or (kind == "matrix" and isinstance(format, GgufBlocks)):
            continue  # refused; decoded by the loader
        weights, peaks = Weights(torch.bfloat16, torch.device("cpu")), watched(monkeypatch)
        declare(format, weights)
        fill(weights)
        said = [temporary for _, temporary in weights._passing]
        assert all(peak <= most for peak, most in zip(peaks, said, strict=True)), (kind, peaks, said)


def test_tables_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, peaks = Weights(torch.bfloat16, torch.device("cpu")), watched(monkeypatch)
    INT8_TABLES.declare(whole("table", ROWS, INPUTS), weights)
    fill(weights)
    assert 0 < peaks[0] <= weights._passing[0][1]


def test_what_is_made_at_once_is_counted() -> None:
    kept: list[Any] = []
    with Made() as made:
        first = torch.ones(1000)
        kept.append((first * 2).view(10, 100))
        del first
        kept.append(kept[0] + torch.ones(100))
    assert made.peak == 4 * (1000 + 100 + 1000)
    assert made.now == 8000
