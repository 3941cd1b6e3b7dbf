"""Workers whose layers keep other things hand nothing over to each other: the receiver refuses at once, and says why."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import PagePart, Reserve, SamplingParams
from tests.fakes.pair import Pair
from tests.fakes.worker import new_fake_engine, running_bench

KEYS = PagePart(layers=1, planes=2, heads=1, dim=4, dtype="float32")
WINDOWED = PagePart(layers=2, planes=2, heads=1, dim=4, dtype="float32", window=7)
IN_ONE_BLOCK = [msgspec.structs.replace(KEYS, layers=3)]
APART = [KEYS, WINDOWED]
PROMPT, ANSWER = list(range(20, 40)), SamplingParams(max_tokens=4, temperature=0.0)
# What release 0.1.0 doesn't know of a layout, and so doesn't compare.
UNKNOWN = {"groups": ()}


def of_release_0_1_0(message: Reserve) -> Reserve:
    return msgspec.structs.replace(message, layout=msgspec.structs.replace(message.layout, **UNKNOWN))


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (
            APART,
            IN_ONE_BLOCK,
            "KV groups are all in 1 block + window of 7 in 2 blocks here, all in 1 block at the peer",
        ),
        (
            IN_ONE_BLOCK,
            APART,
            "KV groups are all in 1 block here, all in 1 block + window of 7 in 2 blocks at the peer",
        ),
        (
            APART,
            [KEYS, msgspec.structs.replace(WINDOWED, window=9)],
            "KV groups are all in 1 block + window of 7 in 2 blocks here, all in 1 block + window of 9 in 2 blocks at the peer",
        ),
        (
            APART,
            [KEYS, msgspec.structs.replace(WINDOWED, layers=1)],
            "KV groups are all in 1 block + window of 7 in 2 blocks here, all in 1 block + window of 7 in 1 blocks at the peer",
        ),
        (APART, [KEYS], "KV groups are all in 1 block + window of 7 in 2 blocks here, all in 1 block at the peer"),
    ],
    ids=["theirs in one block", "ours in one block", "another window", "other blocks", "nothing of windows"],
)
async def test_unlike_groups_are_refused_before_anything_moves(
    ours: list[PagePart], theirs: list[PagePart], why: str
) -> None:
    async with (
        running_bench(new_fake_engine(40, parts=ours)) as writer,
        running_bench(new_fake_engine(40, parts=theirs)) as receiver,
    ):
        pair = Pair(writer, receiver)
        await pair.hand_over("r", PROMPT, ANSWER)
        await pair.decode.close()
        assert why in writer.gateway.failures["r"].message
        assert len(pair.replies) == 1, "a refusal for good is asked for once"
        assert (writer.pool.num_used, receiver.pool.num_used) == (0, 0)
        assert len(pair.decode._reservations) == 0


async def test_a_release_that_knows_nothing_of_groups_refuses_them() -> None:
    """It compares what a block of tokens holds: beside a window's group that is fewer layers."""
    async with (
        running_bench(new_fake_engine(40, parts=APART)) as writer,
        running_bench(new_fake_engine(40, parts=IN_ONE_BLOCK)) as receiver,
    ):
        pair = Pair(writer, receiver, heard=of_release_0_1_0)
        await pair.hand_over("r", PROMPT, ANSWER)
        await pair.decode.close()
        assert "layers is 1 here, 3 at the peer" in writer.gateway.failures["r"].message
        assert (writer.pool.num_used, receiver.pool.num_used) == (0, 0)
