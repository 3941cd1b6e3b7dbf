"""Fingerprints of models: they tell files apart without reading all of them, and without torch.

A gateway knows its model's, too, and takes no worker with other files for its own.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from engine.checkpoint.safetensors import SAMPLE_BYTES, characteristic_bytes, weight_files
from modelfiles.gguf import is_gguf, read_header
from modelfiles.late import COLBERT_HEAD, SPARSE_HEAD

_FINGERPRINT_BYTES = 16


def model_fingerprint(folder: Path, marks: Iterable[str] = ()) -> str:
    """Return 32 hex digits over config.json, heads of tokens, and of each file its size, header and a sample of every tensor.

    Of a GGUF file the same. `marks` tell apart what settings make of the same files. Raises CheckpointError, GgufError, OSError.
    """
    digest = hashlib.blake2b(digest_size=_FINGERPRINT_BYTES, key=b"baton.model.v1")
    if is_gguf(folder):
        parts = _characteristic_bytes_of_gguf(folder)
    else:
        _update(digest, (folder / "config.json").read_bytes())
        for head in (SPARSE_HEAD, COLBERT_HEAD):
            if (folder / head).is_file():
                _update(digest, (folder / head).read_bytes())
        parts = itertools.chain.from_iterable(characteristic_bytes(file) for file in weight_files(folder))
    for mark in marks:
        _update(digest, mark.encode())
    for part in parts:
        _update(digest, part)
    return digest.hexdigest()


def files_fingerprint(folder: Path) -> str:
    """The fingerprint of a model's files, whatever their use; "" if there are none, or none that can be read."""
    try:
        return model_fingerprint(folder)
    except (OSError, ValueError):
        return ""


def _characteristic_bytes_of_gguf(file: Path) -> Iterator[bytes]:
    """Each file's size and header, and some bytes from the middle of each tensor."""
    header = read_header(file)
    for each, length in zip(header.files, header.lengths, strict=True):
        with each.open("rb") as opened:
            yield struct.pack("<Q", each.stat().st_size)
            yield opened.read(length)
    for tensor in header.tensors.values():
        with tensor.file.open("rb") as opened:
            opened.seek(max(tensor.begin, (tensor.begin + tensor.end - SAMPLE_BYTES) // 2))
            yield opened.read(min(tensor.end - tensor.begin, SAMPLE_BYTES))


def _update(digest: hashlib.blake2b, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)
