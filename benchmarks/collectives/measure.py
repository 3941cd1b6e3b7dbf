"""A rank of `python -m benchmarks.collectives`: microseconds of collectives by size, captured many to a graph."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.collectives.ranks import Rank
from engine.kernels.collectives import Peers
from kvtransfer.cuda.symmetric import SymmetricMemory

FEATURES = 8192
ROWS = (1, 4, 16, 64, 128, 256, 1024, 2048)  # of a 70B model's stream: 16 KiB to 32 MiB
VOCABULARY = 128256
LOGIT_ROWS = (1, 16, 64)
CAPTURED = 20
REPLAYS = 9

Figures = dict[str, float]  # microseconds by name


class _Mapped:
    """A peer's memory, as what torch makes a tensor of."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def measure(rank: Rank) -> Figures:
    """Times of one rank. All ranks measure the same in the same order."""
    peers, figures = rank.peers(), Figures()
    targets = _targets(rank, peers, max(ROWS) * FEATURES * 2)
    weight = torch.ones(FEATURES, dtype=torch.bfloat16, device=rank.device)
    for rows in ROWS:
        x = torch.randn(rows, FEATURES, device=rank.device).bfloat16()
        flat = x.view(torch.uint8).view(-1)

        def copy(flat: torch.Tensor = flat) -> None:
            for target in targets:
                target[: len(flat)].copy_(flat)

        def normed(x: torch.Tensor = x) -> None:
            peers.all_reduce_norm(x, x, weight, 1e-5)

        def summed(x: torch.Tensor = x) -> None:
            peers.all_reduce(x)

        for name, run in (("copy", copy), ("all_reduce", summed), ("all_reduce_norm", normed)):
            figures[f"{name}_{x.nbytes}"] = _microseconds(rank, run)
    for rows in LOGIT_ROWS:
        part = torch.randn(rows, VOCABULARY // peers.size, device=rank.device)
        figures[f"gather_{part.nbytes}"] = _microseconds(rank, lambda part=part: peers.gather(part))
    if peers.lost_ranks:
        raise RuntimeError(f"lost ranks {peers.lost_ranks}")
    return figures


def _targets(rank: Rank, peers: Peers, num_bytes: int) -> list[torch.Tensor]:
    """Scratch memory of every other rank."""
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=rank.device)
    addresses = SymmetricMemory(memory, rank.rank, rank.exchange).addresses
    others = [address for source, address in enumerate(addresses) if source != rank.rank]
    return [torch.as_tensor(_Mapped(address, num_bytes), device=rank.device) for address in others]


def _microseconds(rank: Rank, run: Callable[[], object]) -> float:
    """Median time of one of the operations that a graph holds."""
    run()
    rank.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            run()
    seconds = []
    for _ in range(REPLAYS):
        rank.meet()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[REPLAYS // 2] / CAPTURED * 1e6


def main(rank: str, device: str) -> None:
    """Answer with the figures."""
    own = Rank(int(rank), int(device))
    with torch.inference_mode():
        own.answer(measure(own))


if __name__ == "__main__":
    main(*sys.argv[1:])
