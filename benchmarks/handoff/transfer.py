"""One transport between two processes: bytes per second from one worker's pool into another's, by size.

    python -m benchmarks.handoff.transfer --transport cuda_ipc --device cuda:0,cuda:1
    python -m benchmarks.handoff.transfer --widths 1,2        the first rank's share in the first one of a receiver of two ranks

Blocks of Llama-3.1-8B (2 MiB in bfloat16, 16 tokens), scattered in both pools, digested on the way as in every handoff. The
receiver's check, which runs after the last push, is timed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence

import msgspec
import torch

from common.messages import KVLayout, Region
from engine.cache.pages import pool_dtype, pool_shape
from kvtransfer.digest import block_digests
from kvtransfer.plan import Item
from kvtransfer.ranks.end import WholeBlocks
from kvtransfer.shares import Move, shares
from kvtransfer.transport import ShareLink, Transport, open_transport
from services.rank.gpu import see_one_gpu

SIZES_MIB = (2, 16, 32, 128, 512, 1024)
PUSHES_PER_SIZE = 12
LAYOUT = KVLayout(num_blocks=1100, num_layers=32, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
SMALL = msgspec.structs.replace(LAYOUT, num_blocks=20)
LEASE = {"lease_id": 1, "generation": 1}


def _layout(ranks: int, *, small: bool) -> KVLayout:
    """The layout of the first of so many ranks: it keeps its share of the heads."""
    whole = SMALL if small else LAYOUT
    (heads,) = whole.pages
    if ranks == 1:
        return whole
    own = msgspec.structs.replace(heads, heads=heads.heads // ranks, all_heads=heads.heads)
    return KVLayout.of([own], num_blocks=whole.num_blocks, block_size=whole.block_size)


def _pool(name: str, device: str, layout: KVLayout) -> tuple[Transport, torch.Tensor]:
    if device.startswith("cuda:"):
        see_one_gpu(int(device.removeprefix("cuda:")), count=torch.cuda.device_count())
        device = "cuda:0"
    transport = open_transport(name)
    return transport, transport.allocate(pool_shape(layout), pool_dtype(layout), device)


async def _receive(name: str, device: str, layout: KVLayout) -> None:
    """Be the other process: open a pool, print its region, digest the blocks that each line of input names."""
    transport, pool = _pool(name, device, layout)
    region = await transport.open(pool, layout, 1)
    transport.expect(1, 1, range(layout.num_blocks))
    print(msgspec.json.encode(region).decode(), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        blocks = json.loads(line)
        started = time.perf_counter()
        digests = await asyncio.to_thread(block_digests, pool, blocks, layout)
        print(json.dumps([time.perf_counter() - started, digests.hex()]), flush=True)
    await transport.close()


async def measure(
    name: str, devices: Sequence[str], sizes_mib: Sequence[int], widths: tuple[int, int] = (1, 1)
) -> list[tuple[int, float, float]]:
    """Return for each size in MiB the bytes per second of a push (median) and of the receiver's check.

    `widths`: ranks of the writer and of the receiver. Between different ones only the first rank's share in the first is pushed.
    """
    small = max(sizes_mib) <= 32
    layout, theirs = (_layout(width, small=small) for width in widths)
    command = [sys.executable, "-m", "benchmarks.handoff.transfer", "--receive", "--transport", name]
    command += ["--device", devices[1], "--widths", f"{widths[1]},{widths[1]}", *["--small"] * small]
    other = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 22
    )
    assert other.stdin is not None
    assert other.stdout is not None
    transport, pool = _pool(name, devices[0], layout)
    pool.random_(0, 256) if pool.dtype == torch.uint8 else pool.normal_()
    await transport.open(pool, layout, 2)
    region = msgspec.json.decode(await other.stdout.readline(), type=Region)
    link: ShareLink
    if layout.compatible_with(theirs):
        link = WholeBlocks(await transport.connect(region))
    else:
        sources = [layout] + [_other(layout, rank) for rank in range(1, widths[0])]
        link = await transport.connect_share(region, shares(sources, theirs, rank=0, ranks=widths[1])[0])
    print(f"# {name}: link measured at {link.bandwidth / 1e9:.1f} GB/s", flush=True)
    rows, block_bytes = [], min(layout.block_bytes, theirs.block_bytes)
    for size in sizes_mib:
        count = min(layout.num_blocks, (size << 20) // block_bytes)
        seconds = []
        for _ in range(PUSHES_PER_SIZE):
            source, target = (random.sample(range(layout.num_blocks), count) for _ in range(2))
            moves = [Move(Item(0, 0), block, (own,)) for own, block in zip(source, target, strict=True)]
            started = time.perf_counter()
            digests = await link.push_moves(moves=moves, timeout_s=30.0, **LEASE)
            seconds.append(time.perf_counter() - started)
        for _ in range(2):  # the first time cold
            other.stdin.write(json.dumps(target).encode() + b"\n")
            checked = json.loads(await other.stdout.readline())
        if widths[0] <= widths[1] and checked[1] != digests.hex():
            raise AssertionError("the receiver's digests differ")
        pushed = count * block_bytes
        rows.append((pushed >> 20, pushed / sorted(seconds)[PUSHES_PER_SIZE // 2], pushed / checked[0]))
    other.stdin.close()
    await other.wait()
    await transport.close()
    return rows


def _other(layout: KVLayout, rank: int) -> KVLayout:
    """The same of a further rank."""
    (own,) = layout.pages
    part = msgspec.structs.replace(own, first_head=rank * own.heads)
    return KVLayout.of([part], num_blocks=layout.num_blocks, block_size=layout.block_size)


def main(arguments: Sequence[str]) -> int:
    """Print one line for each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff.transfer", description=__doc__.splitlines()[0])
    parser.add_argument("--transport", default="cuda_ipc")
    parser.add_argument("--device", default="cuda:0,cuda:1", help="the writer's and the receiver's, or cpu")
    parser.add_argument("--widths", default="1,1", help="ranks of the writer and of the receiver")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="up to 32 MiB")
    options = parser.parse_args(arguments)
    devices = options.device.split(",")
    writer, receiver = map(int, options.widths.split(","))
    if options.receive:
        asyncio.run(_receive(options.transport, devices[0], _layout(receiver, small=options.small)))
        return 0
    sizes = [size for size in SIZES_MIB if size <= 32] if options.small else SIZES_MIB
    for size, push, check in asyncio.run(
        measure(options.transport, [*devices, devices[-1]][:2], sizes, (writer, receiver))
    ):
        print(f"{size:6} MiB  push {push / 1e9:7.1f} GB/s  check {check / 1e9:7.1f} GB/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
