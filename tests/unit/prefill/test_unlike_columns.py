"""Workers that keep windows otherwise hand nothing over to each other: the receiver refuses at once, and says why."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import PagePart, Reserve, SamplingParams, ToWorker, WorkerReply
from decode.role import DecodeRole
from prefill.role import PrefillRole
from tests.fakes.worker import Bench, claim, new_fake_engine, new_job, running_bench

KEYS = PagePart(layers=1, planes=2, heads=1, dim=4, dtype="float32")
WINDOWED = PagePart(layers=2, planes=2, heads=1, dim=4, dtype="float32", window=7)
IN_ONE_BLOCK = [msgspec.structs.replace(KEYS, layers=3)]
APART = [KEYS, WINDOWED]
# What release 0.1.0 doesn't know of a layout, and so doesn't compare.
UNKNOWN = {"states": (), "state_blocks": 0, "windowed": (), "column_blocks": 0, "window": 0}


class Pair:
    """The prefill role of one worker, and the decode role of another as its only candidate; both pools and roles are real."""

    def __init__(self, writer: Bench, receiver: Bench, *, is_older: bool = False) -> None:
        """`is_older`: the receiver hears of layouts what release 0.1.0 knows."""
        self.writer, self.receiver = writer, receiver
        self._is_older = is_older
        self.prefill = PrefillRole(writer.context, max_requests=4)
        self.decode = DecodeRole(receiver.context)
        writer.roles.attach(self.prefill, active=True)
        receiver.roles.attach(self.decode, active=True)
        receiver.peers.saw(writer.state("w"))
        self.asked: list[Reserve] = []

    async def _handle(self, message: ToWorker) -> WorkerReply | None:
        if isinstance(message, Reserve):
            self.asked.append(message)
            if self._is_older:
                message = msgspec.structs.replace(message, layout=msgspec.structs.replace(message.layout, **UNKNOWN))
        return await self.decode.handle(message)

    async def run(self) -> None:
        """Compute a prompt and ask for room."""
        await self.writer.serve("d0", self._handle)
        job = new_job("r", list(range(20, 40)), SamplingParams(max_tokens=4, temperature=0.0), prefill=True)
        await self.prefill.start(claim(msgspec.structs.replace(job, decode_workers=["d0"]), self.writer.gateway))
        chunks = self.prefill.plan(8)
        self.prefill.apply(list(zip(chunks, self.writer.engine.launch(chunks).wait(), strict=True)))
        [serving] = self.prefill.serving.values()
        await serving
        await self.decode.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (APART, IN_ONE_BLOCK, "column has 2 blocks and 7 positions here, 0 blocks and 0 positions at the peer"),
        (IN_ONE_BLOCK, APART, "column has 0 blocks and 0 positions here, 2 blocks and 7 positions at the peer"),
        (
            APART,
            [KEYS, msgspec.structs.replace(WINDOWED, window=9)],
            "column has 2 blocks and 7 positions here, 2 blocks and 9 positions at the peer",
        ),
        (
            APART,
            [KEYS, msgspec.structs.replace(WINDOWED, layers=1)],
            "column has 2 blocks and 7 positions here, 1 blocks and 7 positions at the peer",
        ),
        (APART, [KEYS], "column has 2 blocks and 7 positions here, 0 blocks and 0 positions at the peer"),
    ],
    ids=["theirs in one block", "ours in one block", "another window", "other blocks", "nothing of windows"],
)
async def test_unlike_columns_are_refused_before_anything_moves(
    ours: list[PagePart], theirs: list[PagePart], why: str
) -> None:
    async with (
        running_bench(new_fake_engine(40, parts=ours)) as writer,
        running_bench(new_fake_engine(40, parts=theirs)) as receiver,
    ):
        pair = Pair(writer, receiver)
        await pair.run()
        assert why in writer.gateway.failures["r"].message
        assert len(pair.asked) == 1, "a refusal for good is asked for once"
        assert (writer.pool.num_used, receiver.pool.num_used) == (0, 0)
        assert len(pair.decode._reservations) == 0


async def test_a_release_that_knows_nothing_of_columns_refuses_them() -> None:
    """It compares what a block of tokens holds: beside columns that is fewer layers."""
    async with (
        running_bench(new_fake_engine(40, parts=APART)) as writer,
        running_bench(new_fake_engine(40, parts=IN_ONE_BLOCK)) as receiver,
    ):
        pair = Pair(writer, receiver, is_older=True)
        await pair.run()
        assert "layers is 1 here, 3 at the peer" in writer.gateway.failures["r"].message
        assert (writer.pool.num_used, receiver.pool.num_used) == (0, 0)
