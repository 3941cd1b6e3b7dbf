"""Kernels that no GPU has tried: every family's passes and every check, compiled to Hopper's machine code."""

# ruff: noqa: E402 (these imports fail where triton is missing)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.needs import missing, needs

needs("triton")

from triton import knobs

from tests.compilations import told_by

MODULE = "tests.unit.kernels.compiled"
TIMEOUT_S = 1800
PARTS = {"passes": 14, "checks": 8}  # none takes the minutes after which the whole run is ended


@pytest.fixture(scope="module", autouse=True)
def _assembler() -> None:
    try:
        assert knobs.nvidia.ptxas.path
    except RuntimeError as error:
        missing(f"Triton found no assembler for Hopper: {error}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "part"), [(kind, f"{part}/{parts}") for kind, parts in PARTS.items() for part in range(parts)]
)
def test_every_kernel_compiles_for_hopper(kind: str, part: str, tmp_path: Path) -> None:
    told = told_by(MODULE, kind, part, cache=tmp_path, timeout_s=TIMEOUT_S, options=["-O"])
    assert sum(variants for variants, _ in told.values()) > 10
    assert not {program: wrong for program, (_, wrong) in told.items() if wrong}


@pytest.mark.long
def test_a_kernel_that_can_not_be_compiled_is_told(tmp_path: Path) -> None:
    told = told_by(MODULE, "broken", cache=tmp_path, timeout_s=TIMEOUT_S, options=["-O"])
    assert list(told) == ["broken norm", "broken memory", "broken python", "broken registers"]
    (norm, _, of_norm), (memory, _, of_memory), (nothing, _, of_python), (_, _, of_registers) = (
        one for _, [one] in told.values()
    )
    assert (norm, memory, nothing) == ("_norm", "_few_rows", "")
    assert "arange's range must be a power of 2" in of_norm
    assert "bytes of shared memory" in of_memory
    assert of_registers == "0 bytes spilled, at most -1 may be"
    assert of_python == "KeyError: 'no such kernel'"
