"""What a worker tells everybody of its pool opens nothing."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch

from common.messages import KVLayout, Region
from kvtransfer.transport import TransferError, open_transport
from tests.fakes.workers import LAYOUT

ADDRESSES = [
    {"host": "10.0.0.7", "reach": "here", "port": "4711", "token": "00" * 16, "protocol": "2"},
    {"host": "boot", "file": "baton-ipc-1", "life": "baton-ipc-1", "pool": "00", "pool_offset": "0", "probe": "00"},
    {"file": "baton-kv-pool", "life": "baton-kv-life"},
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_of_an_address_only_the_sign_of_life_is_public(address: dict[str, str]) -> None:
    region = Region(transport="any", incarnation=3, layout=LAYOUT, address=address)
    shown = region.public
    public = {"file": address.get("life"), "reach": address.get("reach")}
    assert shown.address == {name: text for name, text in public.items() if text}
    assert (shown.transport, shown.incarnation, shown.layout) == ("any", 3, LAYOUT)


def test_a_worker_of_several_ranks_is_the_first_ones_region_and_the_further_ones() -> None:
    regions = [
        Region(transport="any", incarnation=3, layout=LAYOUT, address=address | {"life": f"life-{rank}"})
        for rank, address in enumerate(ADDRESSES)
    ]
    region = Region.joined(regions)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(region), type=Region).each == regions
    assert Region.joined(regions[:1]) == regions[0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(region), type=RegionOf010) == RegionOf010(
        transport="any", incarnation=3, layout=LAYOUT, address=regions[0].address
    )
    assert [one.address for one in region.public.each] == [one.public.address for one in regions]
    assert region.public.ranks[0].layout is None


class RegionOf010(msgspec.Struct, frozen=True, kw_only=True):
    """The region as release 0.1.0 knows it."""

    transport: str
    incarnation: int
    layout: KVLayout
    address: dict[str, str]


async def test_the_public_part_of_a_pool_in_shared_memory_is_a_sign_of_life_and_no_pool() -> None:
    layout = KVLayout(num_blocks=4, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    one, other = open_transport("shm"), open_transport("shm")
    shape = (layout.num_blocks, layout.block_bytes // 4)
    pools = [transport.allocate(shape, torch.float32, "cpu") for transport in (one, other)]
    region = await one.open(pools[0], layout, 1)
    await other.open(pools[1], layout, 2)
    try:
        with pytest.raises(TransferError, match="another size"):
            await other.connect(region.public)
        assert not other.writer_gone(region.public)
        await one.close()
        assert other.writer_gone(region.public)
    finally:
        await asyncio.gather(one.close(), other.close())
