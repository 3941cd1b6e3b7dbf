# mypy: allow-untyped-calls
"""Safetensors -> the decoder's weights, and the fingerprints by which processes tell models and tokenizers apart.

Nothing here unpickles: a checkpoint is data, never code. Threads read pieces of the files into a few buffers, pinned for a GPU,
from where they are copied to where they belong while the next ones are read; what has another dtype is converted there.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import CheckpointError, StoredTensor, characteristic_bytes, some, stored_tensors, weight_files
from engine.models.decoder import Decoder

__all__ = ["CheckpointError", "load_weights", "model_fingerprint", "tokenizer_fingerprint", "weight_files"]

_FINGERPRINT_BYTES = 16
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# A GPU's copies are faster than one thread reads from the page cache; pinning memory costs start-up time, so there is little.
THREADS = 8
BUFFER_BYTES = 16 << 20
CPU_BUFFER_BYTES = 1 << 20  # stays in a core's cache between reading and copying
_BUFFERS = 2  # of each thread: one is read into while the other's copy is on its way
_ALIGNMENT = 16  # of the places where tensors are cut: no element is cut in two


def load_weights(decoder: Decoder, folder: Path) -> None:
    """Copy every tensor of the checkpoint to where the decoder has it.

    Raises CheckpointError, before anything was copied, unless the checkpoint has exactly the tensors, in the shapes, that the
    decoder has.
    """
    destinations = decoder.destinations()
    ignored = {"lm_head.weight"} if decoder.config.tie_word_embeddings else set[str]()
    wanted = _match(folder, destinations, ignored)
    device = next(iter(destinations.values())).device
    _stream(wanted, device, BUFFER_BYTES if device.type == "cuda" else CPU_BUFFER_BYTES)


def model_fingerprint(folder: Path) -> str:
    """Return 32 hex digits over config.json and each safetensors file's size, header and a sample of every tensor."""
    digest = hashlib.blake2b(digest_size=_FINGERPRINT_BYTES, key=b"baton.model.v1")
    _update(digest, (folder / "config.json").read_bytes())
    for file in weight_files(folder):
        for part in characteristic_bytes(file):
            _update(digest, part)
    return digest.hexdigest()


def tokenizer_fingerprint(file: Path) -> str:
    """Return 32 hex digits over the bytes of a tokenizer.json."""
    return hashlib.blake2b(file.read_bytes(), digest_size=_FINGERPRINT_BYTES, key=b"baton.tokenizer.v1").hexdigest()


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor on its way."""

    stored: StoredTensor
    dtype: torch.dtype  # as stored
    flat: torch.Tensor  # where it goes, [num_elements]


def _match(folder: Path, destinations: Mapping[str, torch.Tensor], ignored: set[str]) -> list[_Weight]:
    """Every destination with what goes there."""
    wanted, unexpected = dict[str, _Weight](), list[str]()
    for stored in stored_tensors(folder):
        destination = destinations.get(stored.name)
        if destination is not None:
            wanted[stored.name] = _weight(stored, destination)
        elif stored.name not in ignored and not stored.name.endswith(".rotary_emb.inv_freq"):
            unexpected.append(stored.name)
    if unexpected:
        raise CheckpointError(f"{folder}: unexpected weights {some(unexpected)}: config.json describes another model")
    if missing := sorted(destinations.keys() - wanted.keys()):
        raise CheckpointError(f"{folder}: missing weights {some(missing)}: is the download complete?")
    return list(wanted.values())


def _weight(stored: StoredTensor, destination: torch.Tensor) -> _Weight:
    if stored.shape != tuple(destination.shape):
        raise CheckpointError(
            f"{stored.name} has shape {list(stored.shape)}, config.json asks for {list(destination.shape)}"
        )
    if stored.dtype not in _FLOATS:
        raise CheckpointError(f"{stored.name} holds {stored.dtype}: quantised weights are not supported")
    return _Weight(stored, _FLOATS[stored.dtype], destination.view(-1))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some elements of a tensor, in a buffer."""

    weight: _Weight
    at: int  # bytes into the buffer
    size: int  # bytes
    first: int  # element

    def copy(self, buffer: torch.Tensor) -> None:
        """Copy out of the buffer: on a GPU, in the current stream and without waiting."""
        source = buffer[self.at : self.at + self.size]
        count = self.size // self.weight.dtype.itemsize
        target = self.weight.flat[self.first : self.first + count]
        if target.dtype is self.weight.dtype:
            target.view(torch.uint8).copy_(source, non_blocking=True)
        else:  # through memory of its own: nothing says that the file's bytes are aligned
            aligned = torch.empty(self.size, dtype=torch.uint8, device=target.device)
            aligned.copy_(source, non_blocking=True)
            target.copy_(aligned.view(self.weight.dtype))


@dataclass(slots=True)
class _Piece:
    """Bytes that are read at once."""

    file: Path
    begin: int
    end: int
    parts: list[_Part]


def _pieces(weights: Iterable[_Weight], limit: int) -> Iterator[_Piece]:
    """Cut the files into pieces of `limit` bytes at most; what nobody wants is not read."""
    piece: _Piece | None = None
    for weight in sorted(weights, key=lambda weight: (weight.stored.file, weight.stored.begin)):
        begin, end = weight.stored.begin, weight.stored.end
        while begin < end:
            if (
                piece is None
                or piece.file != weight.stored.file
                or piece.end != begin
                or limit - (begin - piece.begin) < _ALIGNMENT
            ):
                if piece is not None:
                    yield piece
                piece = _Piece(weight.stored.file, begin, begin, [])
            room = limit - (begin - piece.begin)
            size = min(end - begin, room - room % _ALIGNMENT)
            first = (begin - weight.stored.begin) // weight.dtype.itemsize
            piece.parts.append(_Part(weight, begin - piece.begin, size, first))
            begin += size
            piece.end = begin
    if piece is not None:
        yield piece


def _stream(weights: Iterable[_Weight], device: torch.device, buffer_bytes: int) -> None:
    """Read and place all weights; everything is where it belongs when this returns."""
    with ExitStack() as opened:
        files: dict[Path, int] = {}
        waiting: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        for piece in _pieces(weights, buffer_bytes):
            if piece.file not in files:
                files[piece.file] = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, files[piece.file])
            waiting.put(piece)
        before = torch.cuda.current_stream(device) if device.type == "cuda" else None
        num_threads = min(THREADS, os.cpu_count() or 1, waiting.qsize()) or 1
        with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as threads:
            work = [threads.submit(_work, waiting, files, before, buffer_bytes) for _ in range(num_threads)]
        for thread in work:
            thread.result()


def _work(
    waiting: queue.SimpleQueue[_Piece],
    files: Mapping[Path, int],
    before: torch.cuda.Stream | None,
    buffer_bytes: int,
) -> None:
    """Take pieces until there are none."""
    with _stream_behind(before):
        buffers = [_Buffer(buffer_bytes, pinned=before is not None) for _ in range(_BUFFERS)]
        try:
            for buffer in itertools.cycle(buffers):
                buffer.carry(waiting.get_nowait(), files)
        except queue.Empty:
            return
        except BaseException:
            _drain(waiting)  # the others need not go on
            raise


@contextmanager
def _stream_behind(before: torch.cuda.Stream | None) -> Iterator[None]:
    """On a GPU, make a stream of its own the current one; what was started in it is over at the end."""
    if before is None:
        yield
        return
    stream = torch.cuda.Stream(before.device)
    stream.wait_stream(before)  # the destinations' memory may be in use until then
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()  # the buffers outlive the copies


class _Buffer:
    """Memory between file and destination."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._view = memoryview(self._bytes.numpy())  # type: ignore[arg-type]
        self._copied = torch.cuda.Event() if pinned else None

    def carry(self, piece: _Piece, files: Mapping[Path, int]) -> None:
        """Read the piece once the copies of the last one are over, and start its copies."""
        if self._copied is not None:
            self._copied.synchronize()
        size = piece.end - piece.begin
        filled = 0
        while filled < size:
            try:
                count = os.preadv(files[piece.file], [self._view[filled:size]], piece.begin + filled)
            except OSError as error:
                raise CheckpointError(f"{piece.file} can't be read as safetensors: {error}") from error
            if count == 0:
                raise CheckpointError(f"{piece.file} can't be read as safetensors: it has become shorter")
            filled += count
        for part in piece.parts:
            part.copy(self._bytes)
        if self._copied is not None:
            self._copied.record()


def _drain(waiting: queue.SimpleQueue[_Piece]) -> None:
    try:
        while True:
            waiting.get_nowait()
    except queue.Empty:
        pass


def _update(digest: hashlib.blake2b, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)
