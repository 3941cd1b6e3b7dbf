"""What kernels take of Hopper, without one: registers, bytes that don't fit into them, shared memory.

    python -O -m tests.unit.kernels.resources passes|checks [all] [NAME... | PART/PARTS]

Prints a line for each compiled variant that spills, or of `all`. Programs and names are those of `compiled`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one program: of each thread registers and bytes of its memory, and shared bytes."""

    registers: int
    spilled: int
    shared: int


def resources_of(compiled: Any) -> Resources:
    """What a compiled kernel takes, as the assembler wrote it into its code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return Resources(used["REG"], used["STACK"] + used["LOCAL"], compiled.metadata.shared)


def described(compiled: Any) -> str:
    """Which variant it is: warps, stages, tensors' types, and compile-time values by name."""
    source, metadata = compiled.src, compiled.metadata
    names = source.fn.arg_names
    types = " ".join(dict.fromkeys(kind[1:] for kind in source.signature.values() if kind[:1] == "*"))
    values = " ".join(f"{names[place[0]]}={value}" for place, value in source.constants.items())
    return f"warps={metadata.num_warps} stages={metadata.num_stages} {types} {values}"


def main(kind: str, *names: str) -> None:
    """Compile, and print."""
    from tests.unit.kernels import compiled as programs

    wanted = names[1:] if names[:1] == ("all",) else names
    seen: set[str] = set()

    def look(compiled: Any) -> None:
        if compiled.hash in seen:
            return
        seen.add(compiled.hash)
        used = resources_of(compiled)
        if used.spilled or names[:1] == ("all",):
            print(
                f"{compiled.metadata.name:24} {used.registers:4} {used.spilled:5} {used.shared:7}  {described(compiled)}",
                flush=True,
            )

    print(f"{'kernel':24} {'reg':>4} {'spill':>5} {'shared':>7}")
    for name, (_, wrong) in programs.run(programs.some_of(kind, wanted), look).items():
        for each in wrong:
            print(name, *each, file=sys.stderr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
