"""The kernel that moves shares is compiled to machine code for Hopper, without a GPU: into a peer, into a message, out of one."""

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
from triton.compiler import ASTSource

from kvtransfer.cuda import triton_blocks

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    "request_n": "*i64", "source": "i64", "target": "i64", "digests_n": "*i64", "finished_1": "*i32", "answer_n": "*i64",
    "lanes_2l": "*i32", "places_l": "*i64", "spans_s": "*i64", "pieces": "i32", "source_lanes": "i32", "target_lanes": "i32",
}  # fmt: skip


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_it_compiles_and_keeps_everything_in_registers(digests: bool, is_aligned: bool, tmp_path: Path) -> None:
    kernel = triton_blocks._move_shares
    names = kernel.arg_names
    fixed = {"DIGEST": digests, "CHUNK": triton_blocks.CHUNK, "STEPS": triton_blocks.STEPS}
    sizes = ("source_lanes", "target_lanes") if is_aligned else ()
    aligned = [name for name in TYPES if TYPES[name].startswith("*") or name in ("source", "target", *sizes)]
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature={name: TYPES.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in fixed.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8},
    )
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    said = subprocess.run([TOOL, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
    used = dict(re.findall(r"(STACK|LOCAL):(\d+)", said.stdout))
    assert (used["STACK"], used["LOCAL"]) == ("0", "0"), "spilled"
