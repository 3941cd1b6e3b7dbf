"""Conversion of a GGUF file's metadata to the fields of a config.json, so that families read both alike.

What nobody here reads and nobody knows to be harmless is refused, as fields of a config.json are.
"""

from __future__ import annotations

import struct
from pathlib import Path

from engine.families.gguf.entries import Config, Entries
from engine.families.gguf.rows import ROWS
from engine.spec.model import UnsupportedModelError
from modelfiles.gguf import GgufHeader, read_header
from modelfiles.served import refusal


def config_of(file: Path) -> Config:
    """Convert a file's metadata. Raises UnsupportedModelError, naming the entry; GgufError; OSError."""
    return config_of_header(read_header(file))


def config_of_header(header: GgufHeader) -> Config:
    """Convert a header's metadata. Raises as `config_of`."""
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ROWS:
        raise UnsupportedModelError(f"{header.file}: general.architecture: {refusal([str(architecture)], 'gguf')}")
    entries = Entries(header, architecture)
    try:
        config = ROWS[architecture].read(entries)
    except UnsupportedModelError:
        raise
    except (TypeError, ValueError, ArithmeticError, struct.error) as error:  # a value of another type
        raise entries.unsupported(entries.newest) from error
    entries.check_all_read()
    return config
