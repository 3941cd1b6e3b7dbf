"""KV handed over between workers of different numbers of ranks, each rank a process of its own."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
from collections.abc import Iterator

import pytest
import torch

from kvtransfer.liveness import SHM_FOLDER
from kvtransfer.ranks.follower import follow
from kvtransfer.ranks.leader import FollowerRank
from kvtransfer.transport import TransferError, open_transport
from tests.integration.kv_peers import BOUND_S
from tests.integration.kv_ranks import new_pool, running, stop
from tests.needs import needs
from tests.unit.kvtransfer.widths import MODELS, ranks_of

pytestmark = pytest.mark.asyncio(loop_scope="module")  # UCX belongs to one event loop

PAIRS = [(1, 2), (2, 1), (2, 4), (4, 2)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


async def moves(name: str, model: str, before: int, after: int) -> None:
    """From one width to another, and on to one rank: its bytes are those that it would have computed."""
    async with (
        running(name, model, before, filled=True) as sender,
        running(name, model, after) as receiver,
        running(name, model, 1) as last,
    ):
        digests = await sender.hand_over(receiver)
        assert digests == await receiver.transport.digests(receiver.blocks)
        digests = await receiver.hand_over(last)
        assert digests == await last.transport.digests(last.blocks)
        assert last.holds(model)


async def test_links_to_workers_that_left_are_given_up() -> None:
    """They hold memory of the device: one that is handed to for months sees many come and go."""
    async with running("shm", "int8", 1, filled=True) as sender:
        for _ in range(4):
            async with running("shm", "int8", 2) as receiver:
                await sender.hand_over(receiver)
        assert sender.transport._own is not None
        assert len(sender.transport._own._peers) == 1


@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        (1, 2, "windows and states"),
        (2, 1, "int8"),
        (2, 4, "int4, fewer heads than ranks"),
        (4, 2, "states beside latents"),
    ],
)
async def test_ranks_hand_their_shares_to_ranks_of_another_width(before: int, after: int, model: str) -> None:
    await moves("shm", model, before, after)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("before", "after"), PAIRS)
async def test_every_kind_of_kv_moves_between_every_two_widths(before: int, after: int, model: str) -> None:
    await moves("shm", model, before, after)


async def test_the_push_of_a_rank_that_dies_in_the_middle_fails_once_nobody_writes() -> None:
    async with running("shm", "heads", 2, filled=True) as sender, running("shm", "heads", 1) as receiver:
        await sender.transport.connect(receiver.region)
        [process] = sender.further
        await stop(process.pid)
        pushing = asyncio.create_task(sender.hand_over(receiver))
        await asyncio.sleep(0.2)
        assert not pushing.done()  # its write may yet land
        assert not receiver.transport.writer_gone(sender.region)

        process.kill()
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(TransferError, match="rank 1 is gone"):
                await pushing
        with pytest.raises(TransferError, match="rank 1 is gone"):
            await sender.transport.connect(receiver.region)
        assert not receiver.transport.writer_gone(sender.region)  # the first rank lives
        await sender.transport.close()
        assert receiver.transport.writer_gone(sender.region.public)


async def test_a_link_whose_push_was_given_up_is_opened_again() -> None:
    """A push over UCX that is given up ends its link, and the next one to this peer would fail for it."""
    async with running("shm", "heads", 2, filled=True) as sender, running("shm", "heads", 1) as receiver:
        link = await sender.transport.connect(receiver.region)
        [process] = sender.further
        await stop(process.pid)
        pushing = asyncio.create_task(sender.hand_over(receiver))
        async with asyncio.timeout(BOUND_S):
            while not sender.transport._followers[0]._calls:  # until the stopped rank was asked
                await asyncio.sleep(0)
        pushing.cancel()
        os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(asyncio.CancelledError):
                await pushing
        assert await sender.transport.connect(receiver.region) is not link
        digests = await sender.hand_over(receiver, (2, 8))
        assert digests == await receiver.transport.digests(receiver.blocks)


@pytest.mark.parametrize("dies", [True, False])
async def test_only_a_rank_that_was_not_told_to_leave_is_lost(dies: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with running("shm", "heads", 2) as worker:
        if dies:
            worker.further[0].kill()
            async with asyncio.timeout(BOUND_S):
                with pytest.raises(TransferError, match="rank 1 is gone"):
                    await worker.transport.digests(worker.blocks)
    assert [record.msg for record in caplog.records if record.name == "baton.ranks"] == ["ranks.lost"] * dies


async def test_a_call_that_fails_in_any_way_is_answered() -> None:
    """Nobody bounds the wait for what a rank writes, so an answer that never comes would hold blocks for ever."""

    def fails(question: bytes) -> bytes:
        raise KeyError("nobody thought of it")

    ours, its = socket.socketpair()
    transport, layout = open_transport("shm"), ranks_of(MODELS["heads"], 1)[0]
    pool = new_pool(transport, layout, "")
    following = asyncio.create_task(follow(its, transport, pool, layout, 1, fails))
    rank = await FollowerRank.open(ours, 1, 7, lambda region: True)
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(TransferError, match="rank 1: 'nobody thought of it'"):
            await rank.below([b"?"])
        await rank.close()
        await following


async def test_a_flipped_bit_in_any_ranks_pool_shows_in_the_digest() -> None:
    async with running("shm", "heads", 1, filled=True) as sender, running("shm", "heads", 2) as receiver:
        digests = await sender.hand_over(receiver)
        assert digests == await receiver.transport.digests(receiver.blocks)
        second = receiver.region.each[1]
        file = os.open(SHM_FOLDER / second.address["file"], os.O_RDWR)
        with mmap.mmap(file, 0) as pool:
            pool[receiver.blocks[1] * second.layout.block_bytes + 5] ^= 1
        os.close(file)
        found = await receiver.transport.digests(receiver.blocks)
        assert [at for at in range(0, len(found), 8) if found[at : at + 8] != digests[at : at + 8]] == [8]


async def test_digests_without_a_rank_are_an_error() -> None:
    async with running("shm", "heads", 2) as worker:
        worker.further[0].kill()
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(TransferError, match="rank 1 is gone"):
                await worker.transport.digests(worker.blocks)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
async def test_ucx_moves_shares_between_two_widths(before: int, after: int) -> None:
    needs("ucxx")
    await moves("ucx", "windows and states", before, after)
