"""A pool's memory, given back to the system while nothing is cached, and taken again. Its addresses stay."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch

from engine.parallel.together import Together

REMOVE, DONT_NEED, POPULATE_WRITE = 9, 4, 23  # Linux's words for madvise(2)


@dataclass(frozen=True, slots=True)
class EmptiedPool:
    """A pool in host memory without its pages, see `engine.weights.sleeping.Asleep`. The weights stay where they are."""

    pool: torch.Tensor
    num_bytes: ClassVar[int] = 0

    @classmethod
    def fallen(cls, pool: torch.Tensor, together: Together = nullcontext) -> EmptiedPool:
        """Give the pages back; the content is lost. Raises OSError."""
        with together():
            give_back(pool)
        return cls(pool)

    def wake(self, together: Together = nullcontext) -> None:
        """Take the pages again. Raises MemoryError: it sleeps on then."""
        try:
            with together():
                take_again(self.pool)
        except MemoryError:
            give_back(self.pool)
            raise


def give_back(pool: torch.Tensor) -> None:
    """Free the pages of a pool in host memory. What is read there is 0 from now on. Raises OSError."""
    try:
        _advise(pool, REMOVE)  # pages of shared memory leave its file, for all who map it
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES):
            raise
        _advise(pool, DONT_NEED)


def take_again(pool: torch.Tensor) -> None:
    """Take the pages again, so that a lack of memory shows here, not at the first write. Raises MemoryError."""
    try:
        _advise(pool, POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14 doesn't know the word
            raise MemoryError(f"no room for {pool.nbytes >> 20} MiB of keys and values: {error.strerror}") from error


def _advise(pool: torch.Tensor, advice: int) -> None:
    """Call madvise(2) for the whole pages of a tensor."""
    page = mmap.PAGESIZE
    first = -(-pool.data_ptr() // page) * page
    size = (pool.data_ptr() + pool.nbytes - first) // page * page
    if size <= 0:
        return
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if call(first, size, advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
