"""A further rank: it holds a share of its worker's model, repeats the leader's passes, and moves its share of KV.

It knows no bus and no store. Its leader's link brings passes, its leader's channel what to do with KV; with them it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import select
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.lockstep import decode_config
from engine.parallel.group import RankLostError
from engine.parallel.link import Link
from engine.parallel.pulse import beat
from engine.parallel.shared_memory import SharedMemoryGroup
from kvtransfer.liveness import remove_stale
from kvtransfer.ranks.follower import follow
from kvtransfer.shm import PREFIX
from kvtransfer.transport import Transport, open_transport
from services.rank.asked import Asked
from services.rank.cores import listed, physical_cores, stay_near
from services.rank.devices import held_back, ranks_on
from services.rank.gpu import see_one_gpu
from services.runtime.log import start_logging
from services.runtime.memory import keep_what_is_loaded
from worker.tier.ranks.share import SharesBelow

log = logging.getLogger("baton.ranks")

EXIT_FAILED, EXIT_LOST = 2, 70
CLOSE_S = 12.0  # bound on pushes under way, and on a leader's death
LOOK_S = 0.02


class Ends:
    """This rank's ends of what its leader made: `RANK SIZE LINK CHANNEL MEMORY LEADER`."""

    def __init__(self, rank: int, size: int, link: int, channel: int, memory: int, leader: int) -> None:
        self.rank = rank
        self.link = Link(socket.socket(fileno=link))
        self.channel = socket.socket(fileno=channel)
        self._leader = leader
        shared = mmap.mmap(memory, SharedMemoryGroup.num_bytes(size))
        os.close(memory)
        self.group = SharedMemoryGroup(shared, rank=rank, size=size, lost=self.lost)

    def lost(self) -> str:
        """The reason that the leader can't come; "" while it lives."""
        return "" if os.getppid() == self._leader else "rank 0 ended"

    def until_leader_is_gone(self) -> None:
        """Wait for the end of a leader that was killed: its link closes before its memory, and the lock on it, is given up."""
        end = time.monotonic() + CLOSE_S
        with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(self._leader)) as leader:
            while not self.group.is_dismissed and time.monotonic() < end:
                if select.select([leader], [], [], LOOK_S)[0]:
                    return


class Passes:
    """The thread that repeats the leader's passes."""

    def __init__(self, engine: Engine, ends: Ends) -> None:
        self._engine, self._ends = engine, ends
        self.failed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="passes", daemon=True).start()

    def _run(self) -> None:
        try:
            self._repeat()
        except RankLostError as error:
            log.warning("rank.alone", extra={"reason": str(error)})
        except Exception:
            log.exception("rank.pass_failed")
        else:
            return  # the channel tells that the leader leaves
        self._ends.group.leave()
        self._loop.call_soon_threadsafe(self.failed.set)

    def _repeat(self) -> None:
        while (frame := self._ends.link.receive()) is not None:
            self._engine.follow(frame)


async def serve(asked: Asked, ends: Ends) -> NoReturn:
    """Load this rank's share, then follow the leader until it leaves or dies, or this rank can't."""
    transport = open_transport(asked.transport, host=asked.host)
    try:
        engine = await _loaded(transport, ends, asked)
    except (OSError, ValueError, MemoryError, RuntimeError) as error:
        with contextlib.suppress(RankLostError):
            ends.link.send((str(error) or type(error).__name__).encode())
        await _leave(transport, EXIT_FAILED)
    if engine is None:
        ends.until_leader_is_gone()
        await _leave(transport, 0)
    keep_what_is_loaded()
    with contextlib.suppress(RankLostError):  # the channel is closed, too
        ends.link.send(b"")
    passes = Passes(engine, ends)
    below = SharesBelow(engine.kv, engine.layout, ends.rank).answer
    following = asyncio.create_task(follow(ends.channel, transport, engine.kv, engine.layout, ends.rank, below))
    failing = asyncio.create_task(passes.failed.wait())
    await asyncio.wait([following, failing], return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        with contextlib.suppress(OSError):
            ends.channel.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([following], timeout=CLOSE_S)
    if not failing.done() or ends.lost():
        ends.until_leader_is_gone()
    await _leave(transport, EXIT_LOST if failing.done() else 0)


async def _loaded(transport: Transport, ends: Ends, asked: Asked) -> Engine | None:
    """The engine; None if the leader ends meanwhile. Raises what loading raises."""
    left = asyncio.Event()
    asyncio.get_running_loop().add_reader(ends.channel, left.set)  # the leader says nothing before all have loaded
    loading = asyncio.ensure_future(asyncio.to_thread(_load, transport, ends, asked))
    leaving = asyncio.create_task(left.wait())
    await asyncio.wait([loading, leaving], return_when=asyncio.FIRST_COMPLETED)
    asyncio.get_running_loop().remove_reader(ends.channel)
    leaving.cancel()
    return await loading if loading.done() else None


def _load(transport: Transport, ends: Ends, asked: Asked) -> Engine | None:
    device = "cuda:0" if asked.on_gpu else "cpu"
    ranks = ranks_on(ends.group, device, stages=asked.stages)
    if asked.on_gpu and asked.stages == 1:
        held_back(ends.group, device)  # the leader chooses the size of the pools
    config = ends.link.receive()
    if config is None:
        return None
    return Engine(on_this_host(decode_config(config), asked), allocate=transport.allocate, ranks=ranks)


def on_this_host(leaders: EngineConfig, asked: Asked) -> EngineConfig:
    """Return the leader's settings with the folders and the processor's cores of this host."""
    draft = leaders.draft
    if asked.drafter and draft is not None:
        draft = replace(draft, folder=Path(asked.drafter))
    return replace(
        leaders,
        num_threads=min(leaders.num_threads, physical_cores()),
        model=Path(asked.model) if asked.model else leaders.model,
        draft=draft,
    )


async def _leave(transport: Transport, code: int) -> NoReturn:
    """End this process, whatever its threads do; nothing of it stays in shared memory, nor of a leader that was killed."""
    await transport.close()
    remove_stale(PREFIX)
    logging.shutdown()
    os._exit(code)


def main() -> NoReturn:
    """Entry point; the arguments are `Asked`, then those of `Ends`."""
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    ends = Ends(*map(int, sys.argv[2:]))
    if asked.on_gpu:
        see_one_gpu(ends.rank - asked.first, count=torch.cuda.device_count())
    beat(ends.group.beat)
    start_logging(service=f"{asked.worker} rank {ends.rank}", level=asked.log_level, form=asked.log_format)
    if not asked.on_gpu and (own := stay_near(ends.rank - asked.first, asked.here)):
        log.info("rank.near", extra={"rank": ends.rank, "processors": listed(own)})
    asyncio.run(serve(asked, ends))
    raise AssertionError("it leaves by itself")
