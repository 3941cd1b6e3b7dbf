"""The Hopper kernel is compiled to machine code here, without a GPU; tests/gpu checks what it computes."""

# ruff: noqa: E402 (these imports fail where triton is missing)

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.needs import needs

needs("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from engine.kernels.attention import triton_prefill_hopper as hopper

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


# The widest heads beside pages need the most registers: the others are `make long`'s.
LONG = [pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((64, 0), (64, 16), (128, 0))]


@pytest.mark.parametrize(("head_dim", "page"), [(128, 16), *LONG])
def test_it_compiles_and_keeps_everything_in_registers(head_dim: int, page: int, tmp_path: Path) -> None:
    group = hopper.ROWS // hopper.COMPUTING_GROUPS
    compiled = triton.compile(
        _source(head_dim, group, page), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    said = subprocess.run([TOOL, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout))
    assert (used["STACK"], used["LOCAL"]) == ("0", "0"), "spilled: sums and scores went to memory"
    assert int(used["REG"]) * 12 * 32 <= 65536, "three groups of four warps fit into a processor"
    assert compiled.metadata.shared <= 227 * 1024


def _source(head_dim: int, group: int, page: int) -> GluonASTSource:
    queries = _tile([group, head_dim])
    positions = _tile([1, page, hopper.SWIZZLED_COLUMNS] if page else [hopper.STEP, head_dim])
    types = {
        "q_rows": queries, "k_rows": positions, "v_rows": positions, "blocks_I2": "*i32",
        "tiles_I8": "*i32", "out_THD": "*bf16", "scale_log2": "fp32",
        "sums_IHMD": "*fp32", "tops_2IHM": "*fp32", "totals_at": "i32", "arrived": "*i32",
    }  # fmt: skip
    fixed = {
        "HQ": 32, "HKV": 8, "D": head_dim, "M": group, "N": hopper.STEP, "STAGES": hopper.BUFFERS, "PAGE": page,
        "DTYPE": gl.bfloat16,
    }  # fmt: skip
    names = hopper._attend.arg_names
    return GluonASTSource(
        hopper._attend,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types if types[name][0] == "*"},
    )


def _tile(size: list[int]) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(size, gl.bfloat16)
    return f"tensordesc<bf16{size},{layout!r}>"
