"""A peer of another width has other numbers of blocks in the entries of windows and states: it gets those that it asked for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from common.blocks import pack_tokens
from common.messages import KVLayout, PagePart, PullBlocks, PullReply, Region
from kvtransfer.plan import blocks_per_entry
from kvtransfer.shares import Move
from tests.fakes.worker import new_job
from tests.unit.worker.pulls.ends import KEPT, PROMPT, Ends, running_ends
from worker.pulls.lender import Lender
from worker.serving.allocation import cargo_of


class Wide:
    """Transfers to a peer of several ranks, and the link: what it is told to move."""

    bandwidth = 1e9

    def __init__(self) -> None:
        self.moves: list[Move] = []

    async def connect(self, peer: Region) -> Wide:
        return self

    async def push_entries(self, *, lease_id: int, generation: int, moves: Sequence[Move], timeout_s: float) -> bytes:
        self.moves = [*moves]
        return bytes(8 * len(moves))


@pytest.mark.parametrize("parts", [KEPT["windows"], KEPT["states"]], ids=["windows", "states"])
@pytest.mark.parametrize("more", [1, 0])
async def test_the_blocks_of_an_entry_are_numbered_as_the_receivers(parts: list[PagePart], more: int) -> None:
    async with running_ends(parts=parts) as ends:
        ends.compute(PROMPT)
        theirs, pool, wide = _wider(ends.lender.engine.layout, more), ends.lender.pool, Wide()
        lends = Lender(
            identity=ends.lender.context.identity,
            pool=pool,
            transfers=wide,  # type: ignore[arg-type]
            turns=ends.lender.context.cache.turns,
        )
        message = await _question(ends, theirs)
        reply = await lends.handle(message)
        assert isinstance(reply, PullReply)
        assert reply.count
        cargo = cargo_of(pool, reply.count * pool.block_size).of_blocks(blocks_per_entry(theirs))
        wanted = cargo.lacking([0] * len(cargo.groups))
        assert [move.item for move in wide.moves] == wanted
        assert [move.block for move in wide.moves] == [*range(len(wanted))]
        assert {move.item.number for move in wide.moves if move.item.group} == {*range(blocks_per_entry(theirs)[1])}
        ours = blocks_per_entry(ends.lender.engine.layout)
        assert all(len(move.entry) == ours[move.item.group] for move in wide.moves)


def _wider(layout: KVLayout, more: int) -> KVLayout:
    """The layout of a peer whose entries take more blocks."""
    groups = [msgspec.structs.replace(each, blocks_per_entry=each.blocks_per_entry + more) for each in layout.groups]
    return msgspec.structs.replace(layout, groups=tuple(groups))


async def _question(ends: Ends, layout: KVLayout) -> PullBlocks:
    """The receiver's question, as if it had this layout, and blocks enough."""
    sequence = ends.offered()
    assert await ends.pulled(sequence)
    ends.puller.left(sequence)
    asked = next(message for message in ends.heard if isinstance(message, PullBlocks))
    region = msgspec.structs.replace(asked.region, layout=layout)
    return msgspec.structs.replace(
        asked,
        request_id=new_job("r", PROMPT, sequence.sampling, prefill=True).request_id,
        first_block=0,
        destination_blocks=pack_tokens([*range(400)]),
        region=region,
    )
