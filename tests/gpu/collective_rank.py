"""A rank of `test_collectives.py`: `python -m tests.gpu.collective_rank RANK DEVICE`."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.collectives.ranks import Rank
from engine.kernels import norm
from engine.kernels.collectives import Peers, inbox

SIZE = 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDS = 1000


def messages(seed: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Every rank's message, as every rank draws them all."""
    drawn = torch.randn(SIZE, *shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    drawn.view(-1)[::7] = -0.0
    return drawn.to(dtype)


def total(of: torch.Tensor) -> torch.Tensor:
    return (of[0].float() + of[1].float()).to(of.dtype)


def bits(of: torch.Tensor) -> torch.Tensor:
    return of.contiguous().view(torch.uint8)


def check_shapes(rank: Rank, peers: Peers) -> list[str]:
    """One-shot and two-shot sums, norms and logits, of sizes around every border, each round waited for."""
    wrong = []
    for seed, (rows, width) in enumerate(
        [(1, 8), (1, 4096), (3, 1371), (64, 8192), (130, 8192), (1100, 8192), (2049, 8193)]
    ):
        for dtype in DTYPES if rows < 1000 else DTYPES[:1]:
            given = messages(seed, (rows, width), dtype)
            if not torch.equal(peers.all_reduce(given[rank.rank]), total(given)):
                wrong.append(f"sum {rows} x {width} {dtype}")
            residual, weight = given[1].flip(0), given[0, 0]
            normed, summed = peers.all_reduce_norm(given[rank.rank], residual, weight, 1e-5)
            wanted = norm.add_and_norm(total(given), residual, weight, 1e-5)
            if not torch.allclose(normed.float(), wanted[0].float(), rtol=2e-2, atol=1e-2):
                wrong.append(f"norm {rows} x {width} {dtype}")
            if not torch.equal(summed, wanted[1]):
                wrong.append(f"residual {rows} x {width} {dtype}")
    for rows, width in [(1, 64128), (64, 64128), (3, 1001)]:
        given = messages(rows, (rows, width), torch.float32)
        if not torch.equal(peers.gather(given[rank.rank]), torch.cat(given.unbind(), dim=-1)):
            wrong.append(f"logits {rows} x {width}")
    return wrong


def check_rounds(rank: Rank, peers: Peers) -> list[str]:
    """Rounds of any size after each other, which neither host waits for."""
    chosen, faults = random.Random(0), torch.zeros(1, dtype=torch.int64, device="cuda")
    shared = torch.zeros(1, dtype=torch.int64, device="cuda")
    for seed in range(ROUNDS):
        given = messages(seed, (chosen.randint(1, 40), 256 * chosen.randint(1, 8)), DTYPES[seed % 3])
        if chosen.random() < 0.2:
            found, wanted = peers.gather(given[rank.rank]), torch.cat(given.unbind(), dim=-1)
        else:
            found, wanted = peers.all_reduce(given[rank.rank]), total(given)
        faults += (found != wanted).sum()
        shared = shared * 31 + bits(found).sum()
    sums = {each.hex() for each in rank.exchange(int(shared).to_bytes(8, "little", signed=True))}
    return [f"{int(faults)} wrong elements"] * bool(faults) + ["the ranks' bits differ"] * (len(sums) != 1)


def check_graph(rank: Rank, peers: Peers) -> list[str]:
    """Sums, norms and a gather captured once and replayed with other inputs."""
    given = messages(0, (5, 2048), torch.bfloat16)
    own, residual, weight = given[rank.rank].clone(), given[0].clone(), given[1, 0].clone()

    def run() -> tuple[torch.Tensor, ...]:
        normed, summed = peers.all_reduce_norm(own, residual, weight, 1e-5)
        again, _ = peers.all_reduce_norm(normed, summed, weight, 1e-5)
        return summed, peers.all_reduce(again), peers.gather(again)

    run()
    rank.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    wrong = []
    for seed in range(20):
        given = messages(seed, (5, 2048), torch.bfloat16)
        own.copy_(given[rank.rank])
        graph.replay()
        replayed = [each.clone() for each in captured]
        launched = run()
        if not torch.equal(replayed[0], total(given) + residual):
            wrong.append(f"replay {seed} sums up wrong")
        if not all(torch.equal(bits(one), bits(other)) for one, other in zip(replayed, launched, strict=True)):
            wrong.append(f"replay {seed} differs from launches")
    return wrong


def check_quiet(rank: Rank, peers: Peers) -> list[str]:
    """After all that every inbox is empty, and all programs have counted alike."""
    rank.meet()
    wrong = ["something is left in the inbox"] * (not bool((peers._inbox == inbox.EMPTY_16).all()))
    wrong += ["programs count apart"] * (len(peers._rounds[:-1].unique()) != 1)
    return wrong + [f"lost {peers.lost_ranks}"] * bool(peers.lost_ranks)


def check_absent(rank: Rank, peers: Peers) -> list[str]:
    """A peer that does not come is noticed, once: what was launched after that does not wait."""
    short = rank.peers(longest_wait_s=2.0)
    given = torch.ones(4, 512, dtype=torch.bfloat16, device="cuda")
    short.all_reduce(given)
    rank.meet()
    wrong = []
    if rank.rank == 0:
        began = time.monotonic()
        for _ in range(50):
            short.all_reduce(given)
        torch.cuda.synchronize()
        if not 1.5 < time.monotonic() - began < 8.0:
            wrong.append(f"{time.monotonic() - began:.1f} s for a wait of 2 s at most")
        if short.lost_ranks != (1,):
            wrong.append(f"lost ranks are {short.lost_ranks}")
    rank.meet()
    return wrong


def check_killed(rank: Rank) -> list[str]:
    """A peer whose process ended is noticed: by the wait, or by an error of the device."""
    short = rank.peers(longest_wait_s=2.0)
    rank.meet()
    if rank.rank == 1:
        os._exit(9)
    time.sleep(1.0)
    try:
        short.all_reduce(torch.ones(4, 512, dtype=torch.bfloat16, device="cuda"))
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"a killed peer: {error}", file=sys.stderr)
        return []
    return [] if short.lost_ranks == (1,) else [f"lost ranks are {short.lost_ranks}"]


CHECKS: dict[str, Callable[[Rank, Peers], list[str]]] = {
    "shapes": check_shapes,
    "rounds": check_rounds,
    "graph": check_graph,
    "quiet": check_quiet,
    "absent": check_absent,
}


def main(rank: str, device: str) -> None:
    """All checks one after the other: a process takes longer to start than most of them."""
    own = Rank(int(rank), int(device))
    peers = own.peers()
    wrong = {}
    for name, check in CHECKS.items():
        began = time.monotonic()
        told = own.exchange(json.dumps(check(own, peers)).encode())
        wrong[name] = [f"rank {of}: {each}" for of, all_of in enumerate(told) for each in json.loads(all_of)]
        print(f"rank {rank}: {name} took {time.monotonic() - began:.1f} s", file=sys.stderr)
    wrong["killed"] = check_killed(own)
    own.answer(wrong)


if __name__ == "__main__":
    main(*sys.argv[1:])
