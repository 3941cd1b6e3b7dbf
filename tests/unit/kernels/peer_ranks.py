"""Ranks of one process, each with a thread of its own: a round's messages are pushed by all before any reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import torch

from engine.kernels.collectives import Peers, allocate_inbox
from engine.kernels.launch import Kernel, is_compiling_ahead

Result = TypeVar("Result")
TIMEOUT_S = 60

_one_launches = threading.Lock()
_launch = Kernel.launch


def _launch_alone(kernel: Kernel, *given: Any, **named: Any) -> None:
    """Launch any kernel: Triton's interpreter has one program at a time."""
    with _one_launches:
        _launch(kernel, *given, **named)


class SteppedPeers(Peers):
    """A rank among threads."""

    everyone: threading.Barrier

    def _launch(self, *given: Any, **named: Any) -> None:
        if is_compiling_ahead():
            super()._launch(*given, **named)
            return
        super()._launch(*given, **named, read=False)
        self.everyone.wait(TIMEOUT_S)
        super()._launch(*given, **named, push=False)


class Ranks:
    """All ranks of a group on one device."""

    def __init__(self, size: int, device: str, *, phase_bytes: int = 1 << 16, programs: int = 3) -> None:
        self.inboxes = [allocate_inbox(torch.device(device), phase_bytes) for _ in range(size)]
        addresses = [inbox.data_ptr() for inbox in self.inboxes]
        everyone = threading.Barrier(size)
        self.peers = []
        for rank, inbox in enumerate(self.inboxes):
            peers = SteppedPeers(inbox, addresses, rank, programs=programs, longest_wait_s=0.003)
            peers.everyone = everyone
            self.peers.append(peers)

    def run(self, work: Callable[[Peers], Result]) -> list[Result]:
        """Return what `work` makes of each rank's end. Where kernels are only compiled, one rank's are enough."""
        if is_compiling_ahead():
            return [work(self.peers[-1])] * len(self.peers)
        with mock.patch.object(Kernel, "launch", _launch_alone), ThreadPoolExecutor(len(self.peers)) as threads:
            return list(threads.map(work, self.peers))
