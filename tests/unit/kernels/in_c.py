"""Checks that products in C have in common: of threads at once, and of a forked process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def check_threads_at_once(product: Callable[[], torch.Tensor]) -> None:
    """Assert that several threads get what one gets."""
    expected, found = product(), list[torch.Tensor]()
    workers = [threading.Thread(target=lambda: found.extend(product() for _ in range(200))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 600
    assert all(torch.equal(each, expected) for each in found)


def check_forked(product: Callable[[], torch.Tensor]) -> None:
    """Assert that a child of a process that multiplied gets the same."""
    expected = product()
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(product(), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
