"""The devices of a worker's ranks or stages, and what they compute and send on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from engine.kernels.collectives.group import Exchange, gpu_group
from engine.parallel.group import ALONE, Group
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup
from kvtransfer.cuda.driver import CudaDriverError
from kvtransfer.cuda.signals import StreamSignals
from kvtransfer.cuda.symmetric import SymmetricMemory


def ranks_on(host: SharedMemoryGroup, device: str, *, stages: int) -> Ranks:
    """Return what this process is of its worker on this device: a rank, a stage, or a rank of a stage. Raises MemoryError."""
    if stages == 1:
        return Ranks(group_on(host, device), exchange=host.exchange)
    width = host.size // stages
    own = host.within(width)
    if torch.device(device).type == "cpu":
        return Ranks(own if width > 1 else ALONE, stage=host.stage(width=width), exchange=host.exchange)
    stage = host.stage(lambda memory: StreamSignals(memory, torch.device(device)), width=width)
    ranks = Ranks(stage=stage, fewest=partial(fewest, host), exchange=host.exchange)
    if width == 1:
        return ranks
    return replace(ranks, group=group_on(own, device, missing=own.missing()), missed=own.missed)


def fewest(host: SharedMemoryGroup, num_blocks: int) -> int:
    """Return the fewest blocks that a process has room for. It waits until all ask."""
    return min(int.from_bytes(each, "little") for each in host.exchange(num_blocks.to_bytes(8, "little")))


def held_back(host: SharedMemoryGroup, device: str) -> int:
    """Return how many bytes less are free on another rank's GPU than on this one's. It waits until all ranks ask."""
    free, _ = torch.cuda.mem_get_info(device)
    return free - min(int.from_bytes(each, "little") for each in host.exchange(free.to_bytes(8, "little")))


def group_on(host: SharedMemoryGroup, device: str, *, missing: torch.Tensor | None = None) -> Group:
    """Return the group of ranks on these devices: the hosts' own on CPUs, else GPUs that write to each other.

    `missing`: see `Peers`.
    """
    on = torch.device(device)
    return host if on.type == "cpu" else gpu_group(host, on, _mapped, missing=missing)


def _mapped(inbox: torch.Tensor, rank: int, exchange: Exchange) -> Sequence[int]:
    try:
        return SymmetricMemory(inbox, rank, exchange).addresses
    except CudaDriverError as error:
        raise ValueError(
            "--tensor-parallel-size: the GPUs of ranks that sum have to reach each other's memory: give them others, as"
            f" CUDA_VISIBLE_DEVICES orders them, or take stages alone, --pipeline-parallel-size ({error})"
        ) from error
