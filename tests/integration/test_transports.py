"""The transports between two real processes: this one writes, `kv_receiver` holds the pool that is written into."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import stat
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from common.pages import KVLayout, PagePart
from engine.cache.pages import part_views
from kvtransfer.digest import block_digests
from kvtransfer.liveness import SHM_FOLDER, remove_stale
from kvtransfer.shm import PREFIX
from kvtransfer.transport import TransferError
from kvtransfer.transports import TRANSPORTS
from tests.integration.kv_peers import (
    BOUND_S,
    LARGE,
    SCATTERED,
    SMALL,
    SMALL_REGION,
    push,
    start_receiver,
    start_writer,
)
from tests.needs import needs

STATE = PagePart(layers=2, planes=1, heads=2, dim=8, dtype="float32", per_token=False)

pytestmark = pytest.mark.asyncio(loop_scope="module")  # UCX belongs to one event loop


@pytest.fixture(params=[name for name, kind in TRANSPORTS.items() if kind.suits("cpu") and kind.reaches_others])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx":
        needs("ucxx")
    return str(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
async def test_scattered_blocks_arrive_bit_for_bit_with_their_digests(name: str, dtype: str) -> None:
    layout = msgspec.structs.replace(SMALL, dtype=dtype)
    async with start_receiver(name, layout) as receiver, start_writer(name, layout) as writer:
        link = await writer.transport.connect(receiver.region)
        source = list(reversed(SCATTERED))
        others = [block for block in range(64) if block not in SCATTERED]
        await receiver.call("expect", lease=[1, 7], blocks=SCATTERED)

        digests = await push(link, source, SCATTERED)

        assert await receiver.call("arrived", lease=[1, 7], timeout_s=BOUND_S / 2)
        assert await receiver.bytes_of(SCATTERED) == writer.bytes_of(source)
        assert not any(await receiver.bytes_of(others))
        assert digests == block_digests(writer.pool, source)
        assert digests == base64.b64decode(await receiver.call("digests", blocks=SCATTERED))
        assert link.bandwidth > 0


async def test_a_run_larger_than_a_message_arrives_whole(name: str) -> None:
    async with start_receiver(name, LARGE) as receiver, start_writer(name, LARGE) as writer:
        link = await writer.transport.connect(receiver.region)
        blocks = list(range(80))
        await receiver.call("expect", lease=[1, 7], blocks=blocks)

        digests = await push(link, blocks, blocks[::-1])

        assert await receiver.call("arrived", lease=[1, 7], timeout_s=BOUND_S / 2)
        assert digests == base64.b64decode(await receiver.call("digests", blocks=blocks[::-1]))


async def test_concurrent_pushes_under_several_leases_do_not_mix(name: str) -> None:
    async with start_receiver(name) as receiver, start_writer(name) as writer:
        links = await asyncio.gather(*(writer.transport.connect(receiver.region) for _ in range(8)))
        assert len(set(map(id, links))) == 1
        shares = [list(range(lease, 64, 8)) for lease in range(8)]
        for lease, blocks in enumerate(shares):
            await receiver.call("expect", lease=[lease, lease], blocks=blocks)

        async with asyncio.TaskGroup() as group:
            for lease, blocks in enumerate(shares):
                for half in (blocks[:4], blocks[4:]):
                    group.create_task(push(links[lease], half, half, lease=lease, generation=lease))

        for lease in range(8):
            assert await receiver.call("arrived", lease=[lease, lease], timeout_s=BOUND_S / 2)
        assert await receiver.bytes_of(list(range(64))) == writer.bytes_of(list(range(64)))


async def test_a_late_write_is_refused_or_its_writer_is_known_to_live(name: str) -> None:
    async with start_receiver(name) as receiver, start_writer(name) as writer:
        link = await writer.transport.connect(receiver.region)
        await receiver.call("expect", lease=[1, 7], blocks=[3, 4])
        await receiver.call("forget", lease=[1, 7])
        if name == "shm":  # one-sided: the receiver's quarantine lasts as long as this
            assert not writer.transport.writer_gone(receiver.region)
            return

        with pytest.raises(TransferError):
            await push(link, [0], [3])

        assert not any(await receiver.bytes_of([3]))
        await receiver.call("expect", lease=[2, 8], blocks=[3])
        await push(link, [0], [3], lease=2, generation=8)  # the link is still good


@pytest.mark.quick(first=1)
@pytest.mark.parametrize(("lease", "generation", "block"), [(1, 8, 3), (2, 7, 3), (1, 7, 5)])
async def test_ucx_refuses_what_no_lease_allows(lease: int, generation: int, block: int) -> None:
    needs("ucxx")
    async with start_receiver("ucx") as receiver, start_writer("ucx") as writer:
        link = await writer.transport.connect(receiver.region)
        await receiver.call("expect", lease=[1, 7], blocks=[3, 4])

        with pytest.raises(TransferError):
            await push(link, [0], [block], lease=lease, generation=generation)

        assert not any(await receiver.bytes_of(list(range(64))))
        assert not await receiver.call("arrived", lease=[1, 7], timeout_s=0)


async def test_ucx_turns_away_a_writer_without_the_token() -> None:
    needs("ucxx")
    async with start_receiver("ucx") as receiver, start_writer("ucx") as writer:
        forged = msgspec.structs.replace(receiver.region, address=receiver.region.address | {"token": "00" * 16})

        async with asyncio.timeout(BOUND_S):
            with pytest.raises(TransferError):
                await writer.transport.connect(forged)


async def test_blocks_outside_a_pool_are_refused_before_anything_is_sent(name: str) -> None:
    async with start_receiver(name) as receiver, start_writer(name) as writer:
        link = await writer.transport.connect(receiver.region)
        for source, destination in (([0], [64]), ([64], [0]), ([-1], [0]), ([0], [-1]), ([0, 1], [0])):
            with pytest.raises(TransferError):
                await push(link, source, destination)


async def test_pools_of_another_layout_are_not_connected(name: str) -> None:
    other = msgspec.structs.replace(SMALL, num_kv_heads=4)
    async with start_receiver(name, other) as receiver, start_writer(name) as writer:
        with pytest.raises(TransferError, match="KV layout differs: all_heads is 2 here, 4 at the peer"):
            await writer.transport.connect(receiver.region)


async def test_pages_of_several_parts_arrive_bit_for_bit_with_their_digests(name: str) -> None:
    layout = KVLayout.of([*SMALL.pages, STATE], num_blocks=64, block_size=16)
    async with start_receiver(name, layout) as receiver, start_writer(name, layout) as writer:
        link = await writer.transport.connect(receiver.region)
        await receiver.call("expect", lease=[1, 7], blocks=[9, 3])

        digests = await push(link, [1, 2], [9, 3])

        assert await receiver.bytes_of([9, 3]) == writer.bytes_of([1, 2])
        assert digests == base64.b64decode(await receiver.call("digests", blocks=[9, 3]))


async def test_shm_joins_the_heads_of_two_writers_in_one_pool() -> None:
    whole = KVLayout.of([*SMALL.pages, STATE], num_blocks=64, block_size=16)
    left, right = with_heads(whole, 0), with_heads(whole, 1)
    async with (
        start_receiver("shm", whole) as receiver,
        start_writer("shm", left) as first,
        start_writer("shm", right) as second,
    ):
        links = [await writer.transport.connect(receiver.region) for writer in (first, second)]

        digests = [await push(link, [1, 2], [9, 3]) for link in links]

        keys, state = part_views(
            torch.frombuffer(bytearray(await receiver.bytes_of([9, 3])), dtype=torch.uint8).view(2, -1), whole
        )
        for head, writer in enumerate((first, second)):
            sent = part_views(writer.pool, writer.layout)
            assert torch.equal(keys[..., head, :].view(torch.int32), sent[0][[1, 2]][..., 0, :].view(torch.int32))
            assert torch.equal(state[..., head, :].view(torch.int32), sent[1][[1, 2]][..., 0, :].view(torch.int32))
        sums = np.frombuffer(digests[0], "<u8") + np.frombuffer(digests[1], "<u8")
        assert sums.tobytes() == base64.b64decode(await receiver.call("digests", blocks=[9, 3]))


async def test_shm_sends_a_pool_the_heads_that_it_keeps() -> None:
    whole = KVLayout.of([*SMALL.pages, STATE], num_blocks=64, block_size=16)
    async with start_receiver("shm", with_heads(whole, 1)) as receiver, start_writer("shm", whole) as writer:
        link = await writer.transport.connect(receiver.region)

        digests = await push(link, [1, 2], [9, 3])

        assert digests == base64.b64decode(await receiver.call("digests", blocks=[9, 3]))
        assert not any(await receiver.bytes_of([block for block in range(64) if block not in (9, 3)]))


async def test_ucx_refuses_a_pool_of_other_heads_by_name() -> None:
    needs("ucxx")
    async with start_receiver("ucx", with_heads(SMALL, 1)) as receiver, start_writer("ucx") as writer:
        with pytest.raises(TransferError, match="keeps other heads than ours, and transport ucx moves whole blocks"):
            await writer.transport.connect(receiver.region)


def with_heads(whole: KVLayout, head: int) -> KVLayout:
    """The layout of a worker that keeps one of the two heads."""
    parts = [msgspec.structs.replace(part, heads=1, first_head=head, all_heads=2) for part in whole.pages]
    return KVLayout.of(parts, num_blocks=whole.num_blocks, block_size=whole.block_size)


async def test_after_a_killed_receiver_pushes_fail_and_its_next_incarnation_is_reached(name: str) -> None:
    async with start_writer(name) as writer:
        async with start_receiver(name, incarnation=1) as old:
            link = await writer.transport.connect(old.region)
            await old.call("expect", lease=[1, 7], blocks=[3])
            await old.kill()
            if name == "ucx":
                with pytest.raises(TransferError):
                    await push(link, [0], [3])
            assert writer.transport.writer_gone(old.region)

        async with start_receiver(name, incarnation=2) as new:
            async with asyncio.timeout(BOUND_S):
                with pytest.raises(TransferError):
                    await writer.transport.connect(old.region)
            link = await writer.transport.connect(new.region)
            await new.call("expect", lease=[1, 8], blocks=[3])
            await push(link, [0], [3], generation=8)
            assert await new.bytes_of([3]) == writer.bytes_of([0])


async def test_ucx_does_not_wait_for_a_hung_receiver() -> None:
    needs("ucxx")
    async with start_receiver("ucx", LARGE) as receiver, start_writer("ucx", LARGE) as writer:
        link = await writer.transport.connect(receiver.region)
        blocks = list(range(80))
        await receiver.call("expect", lease=[1, 7], blocks=blocks)
        os.kill(receiver.process.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(BOUND_S):
                with pytest.raises(TransferError):
                    await link.push(
                        lease_id=1, generation=7, source_blocks=blocks, destination_blocks=blocks, timeout_s=0.5
                    )
            with pytest.raises(TransferError, match="closed"):
                await push(link, [0], [0])
        finally:
            os.kill(receiver.process.pid, signal.SIGCONT)

        link = await writer.transport.connect(receiver.region)  # it lives again: a fresh endpoint
        await push(link, blocks, blocks)
        assert await receiver.call("arrived", lease=[1, 7], timeout_s=BOUND_S / 2)


async def test_shm_pools_are_private_and_go_with_their_process() -> None:
    async with start_receiver("shm") as receiver, start_receiver("shm") as killed:
        files = [SHM_FOLDER / each.region.address["file"] for each in (receiver, killed)]
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]

        await killed.kill()
        remove_stale(PREFIX)

        assert [file.exists() for file in files] == [True, False]
    assert not files[0].exists()


async def test_shm_maps_nothing_but_pools() -> None:
    async with start_writer("shm") as writer:
        for file in ("../../etc/passwd", "baton-kv-/../x", "other", ""):
            region = msgspec.structs.replace(SMALL_REGION, transport="shm", address={"file": file})
            with pytest.raises(TransferError):
                await writer.transport.connect(region)
