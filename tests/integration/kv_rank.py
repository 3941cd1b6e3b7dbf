"""A further rank of a worker as a process: `kv_rank.py <transport> <model> <width> <rank> <blocks filled>`, run by `kv_ranks`.

Its standard input is the channel to its leader.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import torch

from kvtransfer.ranks.follower import follow
from kvtransfer.transport import open_transport
from tests.integration.kv_ranks import new_pool
from tests.unit.kvtransfer.widths import MODELS, ranks_of
from worker.tier.ranks.share import SharesBelow


async def main(name: str, model: str, width: int, rank: int, filled: bool) -> None:
    torch.set_num_threads(1)
    transport, layout = open_transport(name), ranks_of(MODELS[model], width)[rank]
    pool = new_pool(transport, layout, model if filled else "")
    await follow(socket.socket(fileno=0), transport, pool, layout, rank, SharesBelow(pool, layout, rank).answer)


if __name__ == "__main__":
    transport, model, width, rank, filled = sys.argv[1:]
    asyncio.run(main(transport, model, int(width), int(rank), filled == "filled"))
