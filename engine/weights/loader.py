# mypy: allow-untyped-calls
"""Safetensors or GGUF -> a model's weights.

Nothing here unpickles. Threads read pieces of the files into a few buffers (pinned for a GPU) and copy them to their places
while the next pieces are read, converting other dtypes there.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.checkpoint.encodings import Encoding, as_wanted, encoding_of, is_decoded
from engine.checkpoint.gguf_names import stored_in_gguf
from engine.checkpoint.safetensors import (
    CheckpointError,
    StoredTensor,
    described_by,
    some,
    stored_tensors,
    weight_files,
)
from engine.weights.parameters import Destination, Weights
from engine.weights.stage import Slot
from modelfiles.gguf import is_gguf, read_header

__all__ = ["CheckpointError", "load_weights", "most_elements", "weight_files"]

# Four, with headroom for parameters that are declared in several ways, and for small models.
_MOST_ELEMENTS_A_BYTE, _MORE_ELEMENTS = 16, 1 << 20
# A GPU copies faster than one thread reads from the page cache. Pinning costs start-up time, so buffers are few.
THREADS = 8
BUFFER_BYTES = 16 << 20
CPU_BUFFER_BYTES = 1 << 20  # stays in a core's cache between reading and copying
_BUFFERS_PER_THREAD = 2  # one is filled while the other is copied
_ROTATIONS = ".rotary_emb.inv_freq"  # tables in old checkpoints; the model computes its own


def load_weights(weights: Weights, folder: Path) -> None:
    """Copy every tensor of the checkpoint, or this rank's share of it, to its destination.

    Raises CheckpointError before any copy unless the checkpoint has exactly the declared tensors, each once and in its shape.
    """
    runs = _match(folder, weights)
    _stream(runs, weights.device, BUFFER_BYTES if weights.device.type == "cuda" else CPU_BUFFER_BYTES)


def most_elements(folder: Path) -> int:
    """An upper bound of the checkpoint's elements: formats have at least 2 bits for each. Raises CheckpointError, OSError."""
    files = read_header(folder).files if is_gguf(folder) else weight_files(folder)
    return _MOST_ELEMENTS_A_BYTE * sum(file.stat().st_size for file in files) + _MORE_ELEMENTS


def check_separate_experts(folder: Path) -> None:
    """Raise CheckpointError for a tensor of all experts, of which no rank can have a part of each."""
    for stored in () if is_gguf(folder) else stored_tensors(folder):
        if len(stored.shape) == 3 and "experts" in stored.name:
            raise CheckpointError(
                f"{stored.name} has all experts of a layer, which ranks can't cut: take --enable-expert-parallel"
            )


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements of a stored tensor that are contiguous in the file."""

    file: Path
    begin: int  # first byte in the file
    end: int
    encoding: Encoding  # as stored
    target: torch.Tensor  # [num_elements], or a view whose elements are in the file's order
    slot: Slot | None = None  # the target is a view of its plan
    undo: Callable[[torch.Tensor], torch.Tensor] | None = None  # converts the file's values to ours


def _match(folder: Path, weights: Weights) -> list[_Run]:
    """All runs to copy."""
    found, doubled, unexpected = set[str](), list[str](), list[str]()
    placed = list[tuple[StoredTensor, Destination]]()
    for name, stored in _computed(folder, weights):
        destinations = weights.destinations.get(name)
        if destinations is None:
            unexpected.append(stored.name)
        elif name in found:
            doubled.append(stored.name)
        else:
            found.add(name)
            weights.decoded[stored.dtype] += is_decoded(stored, destinations[0].tensor.dtype)
            placed += [(stored, destination) for destination in destinations]
    runs = [run for stored, destination in _by_shape(placed) for run in _runs(stored, destination)]
    if unexpected:
        described = described_by(folder)
        raise CheckpointError(f"{folder}: unexpected weights {some(unexpected)}: {described} describes another model")
    if missing := _missing(weights, found):
        raise CheckpointError(f"{folder}: missing weights {some(missing)}: is the download complete?")
    for ways in weights.ways:
        used = [names & found for names in ways if names & found]
        doubled += [name for names in used[1:] for name in sorted(names)]
    if doubled:
        raise CheckpointError(f"{folder}: weights {some(doubled)} are in several files: remove those of another model")
    return runs


def _by_shape(placed: Sequence[tuple[StoredTensor, Destination]]) -> Iterator[tuple[StoredTensor, Destination]]:
    """Decide between the two shapes of a tensor. An ambiguous (square) one follows the others."""
    ways = [_fitting(stored, destination) for stored, destination in placed]
    told = {transposed for fitting in ways if len(fitting) == 1 for transposed in fitting}
    for (stored, destination), fitting in zip(placed, ways, strict=True):
        if len(fitting) == 2 and len(told) != 1:
            raise CheckpointError(
                f"{stored.name} of shape {list(stored.shape)}: no tensor tells which way around it is: store each expert's"
                " matrices as tensors of their own (gate_proj, up_proj, down_proj), or save the model with transformers again"
            )
        is_transposed = (told if len(fitting) == 2 else fitting) == {True}
        yield stored, (is_transposed and destination.transposed) or destination


def _fitting(stored: StoredTensor, destination: Destination) -> set[bool]:
    """The set of possible orientations: True if the stored shape is transposed."""
    if destination.transposed is None:
        return set()
    shapes = {False: destination.stored_shape, True: destination.transposed.stored_shape}
    return {transposed for transposed, shape in shapes.items() if _without_ones(stored.shape) == _without_ones(shape)}


def _computed(folder: Path, weights: Weights) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors that are needed, by our names."""
    for stored in stored_in_gguf(folder) if is_gguf(folder) else stored_tensors(folder):
        name = weights.stored.ours(stored.name)
        if name is None or name in weights.unused or name.endswith(_ROTATIONS):
            continue
        if name in weights.destinations or not weights.is_elsewhere(name):
            yield name, stored


def _missing(weights: Weights, found: set[str]) -> list[str]:
    """The missing tensors, of the way that most of a parameter's tensors follow."""
    missing = set[str]()
    for ways in weights.ways:
        missing |= min(((not names & found, names - found) for names in ways), key=lambda way: (way[0], len(way[1])))[1]
    return sorted(missing)


def _runs(stored: StoredTensor, destination: Destination) -> Iterator[_Run]:
    """Slice the destination's part: whole rows are one run, columns are one run in each row."""
    stored = as_wanted(stored, destination.tensor.dtype)
    shape, source = destination.stored_shape, destination.source
    if _without_ones(stored.shape) != _without_ones(shape):
        described = described_by(stored.file)
        raise CheckpointError(
            f"{stored.file}: {stored.name} has shape {list(stored.shape)}, {described} asks for {list(shape)}"
        )
    encoding = encoding_of(stored, destination.tensor.dtype)
    run = partial(_Run, stored.file, slot=destination.slot, undo=stored.undo)
    seen = destination.tensor if stored.order is None else stored.order(destination.tensor)
    if stored.columns is not None:
        seen = seen.unflatten(1, stored.columns).transpose(1, 2)
    if not seen.is_contiguous():
        begin = stored.begin + encoding.bytes_of(source[0].start * math.prod(shape[1:]))
        yield run(begin, begin + encoding.bytes_of(seen.numel()), encoding, target=seen)
        return
    flat = seen.view(-1)
    if len(shape) == 1 or source[-1] == slice(0, shape[-1]):
        starts, length = [source[0].start * math.prod(shape[1:])], flat.numel()
    else:
        starts = [row * shape[-1] + source[-1].start for row in range(math.prod(shape[:-1]))]
        length = source[-1].stop - source[-1].start
    for target, start in zip(flat.split(length), starts, strict=True):
        at, own = encoding.part(start, length)
        begin = stored.begin + at
        yield run(begin, begin + own.bytes_of(length), own, target=target)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some elements of a run, in a buffer."""

    run: _Run
    at: int  # byte offset in the buffer
    size: int  # bytes
    first: int  # element of the run

    def copy(self, buffer: torch.Tensor) -> None:
        """Copy out of the buffer: on a GPU asynchronously, in the current stream."""
        source, target, run = buffer[self.at : self.at + self.size], self.run.target, self.run
        target = target if run.slot is None else run.slot.real(target)
        count = run.encoding.elements_of(self.size)
        if target.dim() == 1 and target.dtype is run.encoding.dtype and target.is_contiguous() and run.undo is None:
            target[self.first : self.first + count].view(torch.uint8).copy_(source, non_blocking=True)
        else:  # the file's bytes may be unaligned
            aligned = torch.empty(self.size, dtype=torch.uint8, device=target.device)
            aligned.copy_(source, non_blocking=True)
            values = run.encoding.decode(aligned)
            _place(values if run.undo is None else run.undo(values), target, self.first)
        if run.slot is not None:
            run.slot.arrived(count)


def _place(values: torch.Tensor, target: torch.Tensor, first: int) -> None:
    """Copy `values` to the elements of `target` from `first` on, in row-major order."""
    if target.dim() == 1:
        target[first : first + len(values)].copy_(values)
        return
    width = target[0].numel()
    row, at = divmod(first, width)
    begun = min(width - at, len(values)) if at else 0
    if begun:
        _place(values[:begun], target[row], at)
        row, values = row + 1, values[begun:]
    rows = len(values) // width
    if rows:
        target[row : row + rows].copy_(values[: rows * width].view(rows, *target.shape[1:]))
    if len(values) > rows * width:
        _place(values[rows * width :], target[row + rows], 0)


@dataclass(slots=True)
class _Piece:
    """Bytes read at once."""

    file: Path
    begin: int
    end: int
    parts: list[_Part]


def _pieces(runs: Iterable[_Run], limit: int) -> Iterator[_Piece]:
    """Split the files into pieces of at most `limit` bytes. Unwanted bytes are not read."""
    piece: _Piece | None = None
    for run in sorted(runs, key=lambda run: (run.file, run.begin)):
        begin, unit = run.begin, run.encoding.unit
        while begin < run.end:
            if piece is None or piece.file != run.file or piece.end != begin or limit - (begin - piece.begin) < unit:
                if piece is not None:
                    yield piece
                piece = _Piece(run.file, begin, begin, [])
            room = limit - (begin - piece.begin)
            size = min(run.end - begin, room - room % unit)
            first = run.encoding.elements_of(begin - run.begin)
            piece.parts.append(_Part(run, begin - piece.begin, size, first))
            begin += size
            piece.end = begin
    if piece is not None:
        yield piece


def _stream(runs: Iterable[_Run], device: torch.device, buffer_bytes: int) -> None:
    """Read and copy all runs; return when all are in place."""
    with ExitStack() as opened:
        files: dict[Path, int] = {}
        waiting: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        for piece in _pieces(runs, buffer_bytes):
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
    """Process pieces until there are none."""
    with _stream_behind(before):
        buffers = [_Buffer(buffer_bytes, pinned=before is not None) for _ in range(_BUFFERS_PER_THREAD)]
        try:
            for buffer in itertools.cycle(buffers):
                buffer.carry(waiting.get_nowait(), files)
        except queue.Empty:
            return
        except BaseException:
            _drain(waiting)  # the others need not continue
            raise


@contextmanager
def _stream_behind(before: torch.cuda.Stream | None) -> Iterator[None]:
    """Context manager: on a GPU, make a new stream current, and wait for it at the end."""
    if before is None:
        yield
        return
    stream = torch.cuda.Stream(before.device)
    stream.wait_stream(before)  # earlier work may still use the destinations' memory
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()  # the buffers outlive the copies


class _Buffer:
    """A buffer between file and destination."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._view = self._bytes.numpy().data
        self._copied = torch.cuda.Event() if pinned else None

    def carry(self, piece: _Piece, files: Mapping[Path, int]) -> None:
        """Read the piece once the previous one's copies are done, and start its copies."""
        if self._copied is not None:
            self._copied.synchronize()
        size = piece.end - piece.begin
        filled = 0
        while filled < size:
            try:
                count = os.preadv(files[piece.file], [self._view[filled:size]], piece.begin + filled)
            except OSError as error:
                raise CheckpointError(f"{piece.file} can't be read: {error}") from error
            if count == 0:
                raise CheckpointError(f"{piece.file} can't be read: it has become shorter")
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
