"""Formats for a GGUF file's weights: its own groups, on a CPU without their kernel rows of 8 bits, or floats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.gguf_names import stored_in_gguf
from engine.formats.gguf import KEPT, GgufBlocks
from engine.formats.grouped import takes_tiles
from engine.formats.int8 import INT8_TABLES, INT8_WHILE_LOADING
from engine.formats.quantization import EVERY, UNQUANTISED, Modules, Quantization
from engine.formats.tiled import KINDS, GgufTiles, TiledTables
from engine.kernels.linear import computes_in_bfloat16
from engine.kernels.quantised.gguf_blocks import BLOCK_ELEMENTS, DECODERS
from engine.kernels.quantised.int8 import multiplies_bytes

Columns = tuple[int, int, int] | None
_EXPERTS, _MXFP4 = ".experts.", "MXFP4"
_HALVES = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}  # multiplied together
IN_TILES = "gguf tiles"
ROWS_OF_8_BITS = Quantization(name="int8", groups=((EVERY, INT8_WHILE_LOADING),), table=INT8_TABLES)


def kept_as(file: Path, *, device: str, dtype: str) -> Quantization:
    """The formats of a file's modules by default. `dtype`: "auto", or the compute dtype.

    On a CPU products of groups round their rows to 8 bits; whoever asks for float32 wants the file's own numbers. Experts in
    MXFP4 stay there in either: they are these numbers, and plain they don't fit.
    """
    modules = _modules(file)
    if not modules:
        return UNQUANTISED
    if takes_tiles(device, dtype):
        return beside_experts(file, _in_tiles(modules))
    if device == "cpu":
        is_fast = dtype in ("auto", "bfloat16") and computes_in_bfloat16() and multiplies_bytes()
        return beside_experts(file, ROWS_OF_8_BITS if is_fast else UNQUANTISED)
    kept = ((names, form) for form, names in modules.items() if _can_stay(*form))
    return Quantization(
        name="gguf", groups=tuple((Modules(named=frozenset(names)), GgufBlocks(*form)) for names, form in kept)
    )


def beside_experts(file: Path, rest: Quantization) -> Quantization:
    """The same formats on a CPU, except for experts in MXFP4, which stay packed."""
    experts = frozenset(name for name in _modules(file)[_MXFP4, None] if _EXPERTS in name)
    return replace(rest, groups=((Modules(named=experts), GgufBlocks(_MXFP4)), *rest.groups)) if experts else rest


def _in_tiles(modules: Mapping[tuple[str, Columns], list[str]]) -> Quantization:
    """Matrices, experts and tables in tiles. Kinds without them, and columns whose order splits blocks, are plain."""
    kept = {
        form: names
        for form, names in modules.items()
        if form[0] in KINDS and (form[1] is None or form[1][2] % BLOCK_ELEMENTS[form[0]] == 0)
    }
    groups = ((Modules(named=frozenset(names)), GgufTiles(GgufBlocks(*form))) for form, names in kept.items())
    tables = (
        (name, kind) for (kind, columns), names in kept.items() if columns is None for name in names if "embed" in name
    )
    return Quantization(name=IN_TILES, groups=tuple(groups), table=TiledTables(tuple(tables)), kv_cache="float16")


def _can_stay(kind: str, columns: Columns) -> bool:
    """True if our groups can hold it, and reordering columns splits none."""
    return kind in KEPT and (columns is None or (columns[2] % KEPT[kind].group == 0 and kind != "MXFP4"))


def _modules(file: Path) -> dict[tuple[str, Columns], list[str]]:
    """Modules by quantised kind and order of their matrices. The first expert represents all."""
    kinds = {
        stored.name.removesuffix(".weight"): (stored.dtype, stored.columns)
        for stored in stored_in_gguf(file)
        if stored.name.endswith(".weight") and stored.dtype in DECODERS and len(stored.shape) == 2
    }
    modules = defaultdict(list)
    for name, kind in kinds.items():
        before, _, matrix = name.rpartition(".")
        together = {kind, kinds.get(f"{before}.{_HALVES.get(matrix)}", kind)} if _EXPERTS in name else {kind}
        if len(together) == 1 and (_EXPERTS not in name or f"{_EXPERTS}0." in name):
            modules[kind].append(name)
    return modules
