"""A profile's arithmetic, on kernels made up here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine.cells import Decode
from benchmarks.engine.floors import ModelCost
from benchmarks.engine.step_profile import Kernel, group_of, label_products, own_us, read_trace, report
from benchmarks.environment import ROOT
from engine.families import read_model_spec
from engine.spec.model import ModelSpec


def two_layers() -> ModelSpec:
    model = read_model_spec(ROOT / "demo")
    return replace(model, layers=model.layers[:2])


def one_pass(start: float) -> list[Kernel]:
    """Nine products of 10 us, 1 us apart, and 5 us of attention that overlaps the first one."""
    products = [Kernel("_few_rows", start + 11 * index, 10.0) for index in range(9)]
    return [*products, Kernel("_decode", start + 5, 5.0)]


def test_overlapping_kernels_keep_the_device_busy_once() -> None:
    kernels = [Kernel("a", 0, 10), Kernel("b", 5, 10), Kernel("c", 6, 2), Kernel("d", 20, 1)]
    assert own_us(kernels) == [10, 5, 0, 1]


def test_products_are_told_apart_by_their_place() -> None:
    kernels = one_pass(0) + one_pass(200)
    labels = label_products(kernels, two_layers(), passes=2)
    layer = ["qkv", "output", "gate_up", "down"]
    assert labels == [*layer, *layer, "head", ""] * 2


def test_products_stay_unlabelled_when_their_number_is_another() -> None:
    assert set(label_products(one_pass(0)[1:], two_layers(), passes=1)) == {""}


def test_the_report_shows_shares_gaps_and_rates() -> None:
    model = two_layers()
    cost = ModelCost.of(model, "float32")
    text = report(one_pass(0), passes=1, cost=cost, model=model, cell=Decode(1, 100))
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["gemm"][1:] == ["0.0900", "91.8%", f"{cost.weight_bytes / 90e3:.0f}"]
    assert rows["gaps (device idle)"][-2:] == ["0.0080", "8.2%"]
    assert f"{4 * model.vocab_size * model.hidden_size / 10e3:.0f}  head" in text


def test_a_device_that_ran_nothing_is_said_so() -> None:
    model = two_layers()
    cost = ModelCost.of(model, "float32")
    assert "no kernels" in report([], passes=1, cost=cost, model=model, cell=Decode(1, 100))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "gemm helper"),
        ("_rope", "norm, rope, activation"),
        ("_attend", "attention"),
        ("_fill_bins", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::something", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_a_trace_gives_the_devices_events_alone(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "k", "ts": 1.5, "dur": 2},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 9},
        {"ph": "M", "name": "process_name"},
        {"cat": "gpu_memcpy", "name": "Memcpy", "ts": 4, "dur": 1},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert read_trace(tmp_path / "trace.json") == [Kernel("k", 1.5, 2), Kernel("Memcpy", 4, 1)]
