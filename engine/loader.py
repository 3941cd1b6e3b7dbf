"""Safetensors -> the decoder's weights, and the fingerprints by which processes tell models and tokenizers apart.

Nothing here unpickles: a checkpoint is data, never code.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.models.decoder import Decoder

INDEX_FILE = "model.safetensors.index.json"
_FINGERPRINT_BYTES = 16
_SAMPLE_BYTES = 64  # of each tensor: fine-tunes of one base differ in nothing but the values
_MAX_HEADER_BYTES = 100_000_000  # what the format allows


class CheckpointError(ValueError):
    """The folder's weights don't fit its config.json, or can't be read."""


def load_weights(decoder: Decoder, folder: Path) -> None:
    """Stream every tensor of the checkpoint into the decoder, one at a time.

    Raises CheckpointError unless the checkpoint has exactly the tensors, in the shapes, that the decoder has.
    """
    destinations = decoder.destinations()
    ignored = {"lm_head.weight"} if decoder.config.tie_word_embeddings else set[str]()
    loaded, unexpected = set[str](), list[str]()
    for name, weight in _stream(folder):
        destination = destinations.get(name)
        if destination is not None:
            _copy(name, weight, destination)
            loaded.add(name)
        elif name not in ignored and not name.endswith(".rotary_emb.inv_freq"):
            unexpected.append(name)
    if unexpected:
        raise CheckpointError(f"{folder}: unexpected weights {_some(unexpected)}: config.json describes another model")
    if missing := sorted(destinations.keys() - loaded):
        raise CheckpointError(f"{folder}: missing weights {_some(missing)}: is the download complete?")


def model_fingerprint(folder: Path) -> str:
    """Return 32 hex digits over config.json and each safetensors file's size, header and a sample of every tensor."""
    digest = hashlib.blake2b(digest_size=_FINGERPRINT_BYTES, key=b"baton.model.v1")
    _update(digest, (folder / "config.json").read_bytes())
    for file in weight_files(folder):
        for part in _characteristic_bytes(file):
            _update(digest, part)
    return digest.hexdigest()


def tokenizer_fingerprint(file: Path) -> str:
    """Return 32 hex digits over the bytes of a tokenizer.json."""
    return hashlib.blake2b(file.read_bytes(), digest_size=_FINGERPRINT_BYTES, key=b"baton.tokenizer.v1").hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files, sorted. Raises CheckpointError when there are none or some are missing."""
    index, single = folder / INDEX_FILE, folder / "model.safetensors"
    if index.is_file():
        files = sorted(folder / name for name in _indexed_names(index))
    elif single.is_file():  # alone: some folders hold the same weights once more under other names
        files = [single]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{folder}: {INDEX_FILE} names files that are not there: {_some(missing)}")
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} holds pickled weights only, which can run code when loaded: convert them to safetensors "
            "(model.save_pretrained(folder, safe_serialization=True) of transformers) or download the safetensors files"
        )
    raise CheckpointError(f"{folder} holds no *.safetensors files")


def _indexed_names(index: Path) -> set[str]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
    if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise CheckpointError(f"{index} names files outside its folder: {outside}")
    return names


def _stream(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} can't be read as safetensors: {error}") from error


def _copy(name: str, weight: torch.Tensor, destination: torch.Tensor) -> None:
    if weight.shape != destination.shape:
        raise CheckpointError(f"{name} has shape {list(weight.shape)}, config.json asks for {list(destination.shape)}")
    if not weight.is_floating_point():
        raise CheckpointError(f"{name} holds {weight.dtype}: quantised weights are not supported")
    destination.copy_(weight)


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _characteristic_bytes(file: Path) -> Iterator[bytes]:
    """The file's size, its header, and some bytes from the middle of each tensor."""
    with file.open("rb") as opened:
        size = file.stat().st_size
        yield struct.pack("<Q", size)
        prefix = opened.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{file} is not a safetensors file, or truncated")
        header = opened.read(header_bytes)
        yield header
        for start, end in _tensor_ranges(file, header):
            opened.seek(8 + header_bytes + max(start, (start + end - _SAMPLE_BYTES) // 2))
            yield opened.read(min(end - start, _SAMPLE_BYTES))


def _tensor_ranges(file: Path, header: bytes) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header)
        return sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has no valid safetensors header: {error!r}") from error


def _update(digest: hashlib.blake2b, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)
