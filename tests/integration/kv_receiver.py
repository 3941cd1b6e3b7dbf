"""One end of a transport as a process: `kv_receiver.py <transport> <layout> <incarnation>`, run by `kv_peers.start_receiver`.

Reads one JSON command a line from stdin and answers each with one JSON line; ends when stdin does.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

import msgspec
import torch

from common.messages import KVLayout
from engine.cache.pages import pool_dtype, pool_shape
from kvtransfer.digest import block_digests
from kvtransfer.transport import open_transport


async def main(name: str, layout: KVLayout, incarnation: int) -> None:
    torch.set_num_threads(1)
    transport = open_transport(name)
    pool = transport.allocate(pool_shape(layout), pool_dtype(layout), "cpu")
    region = await transport.open(pool, layout, incarnation)
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _print(msgspec.to_builtins(region))
    while line := await reader.readline():
        command = json.loads(line)
        lease = command.get("lease", (0, 0))
        match command["do"]:
            case "expect":
                transport.expect(*lease, command["blocks"])
                _print(True)
            case "forget":
                transport.forget(*lease)
                _print(True)
            case "arrived":
                _print(await transport.arrived(*lease, command["timeout_s"]))
            case "digests":
                _print(base64.b64encode(block_digests(pool, command["blocks"], layout)).decode())
            case "bytes":
                raw = pool[command["blocks"]].view(torch.uint8).numpy().tobytes()
                _print(base64.b64encode(raw).decode())
    await transport.close()
    _print("closed")


def _print(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=KVLayout), int(sys.argv[3])))
