"""The metadata of a GGUF file as the fields of a config.json, so that families read both alike.

What nobody here reads and nobody knows to be harmless is refused, as fields of a config.json are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from common.model.gguf import GgufHeader, read_header
from common.model.served import refusal
from engine.families.from_gguf.dense import DENSE
from engine.families.from_gguf.entries import Config, Entries
from engine.families.from_gguf.experts import EXPERTS
from engine.families.from_gguf.gemmas import GEMMAS
from engine.families.from_gguf.granites import GRANITES
from engine.families.from_gguf.hybrids import HYBRIDS
from engine.families.from_gguf.layer_norms import LAYER_NORMS
from engine.spec.model import UnsupportedModelError

_ARCHITECTURES: dict[str, Callable[[Entries], Config]] = {
    **DENSE,
    **GEMMAS,
    **GRANITES,
    **LAYER_NORMS,
    **EXPERTS,
    **HYBRIDS,
}


def config_of(file: Path) -> Config:
    """Raises UnsupportedModelError, naming the entry; GgufError; OSError."""
    return config_of_header(read_header(file))


def config_of_header(header: GgufHeader) -> Config:
    """Raises as `config_of`."""
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(f"{header.file}: general.architecture: {refusal([str(architecture)], 'gguf')}")
    entries = Entries(header, architecture)
    try:
        config = _ARCHITECTURES[architecture](entries)
    except UnsupportedModelError:
        raise
    except (TypeError, ValueError, ArithmeticError, struct.error) as error:  # a value of another type
        raise entries.unsupported(entries.newest) from error
    entries.check_all_read()
    return config
