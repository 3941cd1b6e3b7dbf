"""Ranks of a group as processes: what each of them exchanges with the others passes through their parent."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from engine.kernels.collectives import Peers, allocate_inbox
from kvtransfer.cuda.symmetric import SymmetricMemory
from services.rank.gpu import see_one_gpu


class Rank:
    """One of the processes, from inside."""

    def __init__(self, rank: int, device: int) -> None:
        see_one_gpu(device, count=torch.cuda.device_count())
        self.rank = rank
        self.device = torch.device("cuda:0")
        torch.cuda.set_device(self.device)

    def exchange(self, own: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        print(json.dumps({"exchange": own.hex()}), flush=True)
        return [bytes.fromhex(each) for each in json.loads(sys.stdin.readline())]

    def meet(self) -> None:
        """Wait until every rank is here and its device is idle."""
        torch.cuda.synchronize()
        self.exchange(b"")

    def peers(self, *, longest_wait_s: float = 10.0) -> Peers:
        """Return the group, over inboxes that all ranks map."""
        inbox = allocate_inbox(self.device)
        memory = SymmetricMemory(inbox, self.rank, self.exchange)
        return Peers(inbox, memory.addresses, self.rank, longest_wait_s=longest_wait_s)

    def answer(self, result: object) -> None:
        """Tell the parent, and end."""
        print(json.dumps({"result": result}), flush=True)


def run_ranks(module: str, devices: Sequence[int], arguments: Sequence[str] = (), *, timeout_s: float) -> list[Any]:
    """Run `python -m module RANK DEVICE [arguments]` for each device; return the ranks' results, None of one that has none.

    All are killed when time is up, and their results are None.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(device), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, device in enumerate(devices)
    ]
    watchdog = threading.Timer(timeout_s, lambda: [process.kill() for process in processes])
    watchdog.start()
    try:
        return _relay(processes)
    finally:
        watchdog.cancel()
        for process in processes:
            process.kill()
            process.communicate()


def _relay(processes: Sequence[subprocess.Popen[str]]) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    running = dict(enumerate(processes))
    while running:
        said = {rank: json.loads(_line(process) or '{"result": null}') for rank, process in running.items()}
        for rank, one in said.items():
            if "result" in one:
                results[rank] = one["result"]
                del running[rank]
        reply = json.dumps([one.get("exchange", "") for one in said.values()])
        for process in running.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died since, and will say nothing more
                process.stdin.write(reply + "\n")
                process.stdin.flush()
    return results


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
