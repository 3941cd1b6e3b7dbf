"""A sleeping engine's contents: what it keeps on its device lies in host memory meanwhile, and the device's memory is free.

Layers are closures over tensors, so tensors stay the objects that they are: their storages are emptied, and filled again, and
views go with them. What has addresses of the device, such as captured graphs, has to be made again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch

from engine.parallel.together import Together

CHUNK_BYTES = 128 << 20  # a power of two: torch rounds pinned memory up to one


class Asleep(Protocol):
    """An engine's sleep, which ends with `wake`."""

    @property
    def num_bytes(self) -> int:
        """Bytes in host memory meanwhile that are the device's otherwise."""
        ...

    def wake(self, together: Together = nullcontext) -> None:
        """Take the memory again; the pool has zeros. Raises MemoryError: it sleeps on then."""
        ...


class MovedOut:
    """Contents of storages in host memory, pinned for a GPU's, until `wake`."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], pool: torch.UntypedStorage) -> None:
        """Take the host memory; see `fallen`. Raises MemoryError."""
        self._storages, self._pool, self._device = [*storages], pool, pool.device
        self._sizes, self._pool_bytes = [storage.nbytes() for storage in storages], pool.nbytes()
        whole = range(0, self.num_bytes, CHUNK_BYTES)
        sizes, is_gpu = [min(CHUNK_BYTES, self.num_bytes - at) for at in whole], self._device.type == "cuda"
        try:
            self._chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu) for size in sizes]
        except (RuntimeError, MemoryError) as error:
            needed = f"{self.num_bytes >> 20} MiB of weights"
            raise MemoryError(f"host memory has no room for {needed}: {error}") from error

    @classmethod
    def fallen(
        cls,
        roots: Iterable[object],
        pool: torch.Tensor,
        *,
        before: Callable[[], None] = lambda: None,
        stays: Iterable[object] = (),
        together: Together = nullcontext,
    ) -> MovedOut:
        """Move all tensors that `roots` reach on the pool's device to host memory, and free the pool, whose content is lost.

        `stays`: objects whose tensors other ranks know by address. `before()` is called once host memory is there. Raises
        MemoryError if it isn't: nothing was moved then.
        """
        kept = pool.untyped_storage()
        found = [one for one in storages_of(roots, pool.device, stays) if one.data_ptr() != kept.data_ptr()]
        with together():
            moved = cls(found, kept)
        before()
        moved._copy(to_host=True)
        moved._free()
        return moved

    @property
    def num_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(self._sizes)

    def wake(self, together: Together = nullcontext) -> None:
        """See `Asleep.wake`: the device's memory is filled as it was."""
        try:
            with together():
                self._take()
        except MemoryError:
            self._free()
            raise
        _bytes_of(self._pool, self._device).zero_()
        self._copy(to_host=False)
        self._chunks.clear()
        _give_back(self._device)

    def _take(self) -> None:
        whole = [*zip(self._storages, self._sizes, strict=True), (self._pool, self._pool_bytes)]
        try:
            for storage, size in whole:
                storage.resize_(size)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise MemoryError(f"no room on {self._device} for what sleeps: {error}") from error

    def _free(self) -> None:
        for storage in (*self._storages, self._pool):
            storage.resize_(0)
        _give_back(self._device)

    def _copy(self, *, to_host: bool) -> None:
        """Copy all storages from or to the chunks, on a stream of its own. No copy is in flight at the end."""
        is_gpu = self._device.type == "cuda"
        if is_gpu:
            torch.cuda.synchronize(self._device)  # what computed the contents is over
        stream = torch.cuda.Stream(self._device) if is_gpu else None
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for there, here in self._pieces():
                target, source = (here, there) if to_host else (there, here)
                target.copy_(source, non_blocking=is_gpu)
        if stream is not None:
            stream.synchronize()

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the storages, one after another, with their places in the chunks."""
        at = 0
        for storage in self._storages:
            content, done = _bytes_of(storage, self._device), 0
            while done < len(content):
                chunk, place = divmod(at + done, CHUNK_BYTES)
                count = min(len(content) - done, CHUNK_BYTES - place)
                yield content[done : done + count], self._chunks[chunk][place : place + count]
                done += count
            at += done


def storages_of(
    roots: Iterable[object], device: torch.device, stays: Iterable[object] = ()
) -> list[torch.UntypedStorage]:
    """The storages on a device of all tensors that the objects reach, each once. Modules, classes and `stays` end the way."""
    found: dict[int, torch.UntypedStorage] = {}
    seen: dict[int, object] = {id(one): one for one in stays}  # objects that live: their ids stay theirs
    ahead: list[Any] = [*roots]
    while ahead:
        one = ahead.pop()
        if id(one) in seen or isinstance(one, ModuleType | type):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            if one.device == device and storage.nbytes() and storage.resizable():
                found.setdefault(storage.data_ptr(), storage)
        elif isinstance(one, FunctionType):  # its globals are its module's
            ahead += [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]
        else:
            ahead += gc.get_referents(one)
    return [*found.values()]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def _give_back(device: torch.device) -> None:
    """Return cached memory of the device, and pinned memory, to the system."""
    if device.type == "cuda":
        gc.collect()  # graphs hold memory while something refers to them
        torch.cuda.empty_cache()
        empty = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.11 may lack it
        if empty is not None:
            empty()
