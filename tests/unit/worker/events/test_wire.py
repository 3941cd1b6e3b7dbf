"""Batches byte for byte, as vLLM's form has them: a router reads what was recorded here, and no release may change it."""

from __future__ import annotations

import msgspec

from common.blocks import pack_tokens
from worker.events.wire import CLEARED, Batch, Block, Change, events_of

FIRST = Block(bytes(8) + (0x11).to_bytes(8, "big"), None, pack_tokens([1, 2]))
SECOND = Block(bytes(8) + (0x22).to_bytes(8, "big"), FIRST.digest, pack_tokens([3, 4]))
SALTED = Block(bytes(8) + (0x33).to_bytes(8, "big"), None, pack_tokens([1, 2]), extra="5a17")

STORED = bytes.fromhex(
    "93" "cb3ff8000000000000" "91"  # [1.5, [...
    "88" "a474797065" "ab426c6f636b53746f726564"  # {"type": "BlockStored",
    "ac626c6f636b5f686173686573" "92" "11" "22"  # "block_hashes": [0x11, 0x22],
    "b1706172656e745f626c6f636b5f68617368" "c0"  # "parent_block_hash": nil,
    "a9746f6b656e5f696473" "9401020304"  # "token_ids": [1, 2, 3, 4],
    "aa626c6f636b5f73697a65" "02"  # "block_size": 2,
    "a76c6f72615f6964" "c0"  # "lora_id": nil,
    "a66d656469756d" "a3475055"  # "medium": "GPU",
    "a96c6f72615f6e616d65" "c0"  # "lora_name": nil}
    "03"  # ], 3]
)  # fmt: skip
REMOVED_AND_CLEARED = bytes.fromhex(
    "93" "cb3ff8000000000000" "92"
    "83" "a474797065" "ac426c6f636b52656d6f766564"  # {"type": "BlockRemoved",
    "ac626c6f636b5f686173686573" "91" "22" "a66d656469756d" "a3435055"  # "block_hashes": [0x22], "medium": "CPU"}
    "81" "a474797065" "b0416c6c426c6f636b73436c6561726564"  # {"type": "AllBlocksCleared"}
    "00"
)  # fmt: skip


def encoded(*changes: Change, rank: int = 0) -> bytes:
    return Batch(1.5, events_of(changes, 2), rank).encoded()


def test_blocks_behind_each_other_are_one_event_of_the_recorded_bytes() -> None:
    assert encoded(Change("GPU", FIRST, True), Change("GPU", SECOND, True), rank=3) == STORED


def test_what_left_and_that_all_is_gone_are_the_recorded_bytes() -> None:
    assert encoded(Change("CPU", SECOND, False), CLEARED) == REMOVED_AND_CLEARED


def test_another_tier_and_another_chain_are_events_of_their_own() -> None:
    changes = [Change("GPU", FIRST, True), Change("CPU", SECOND, True), Change("CPU", SALTED, True)]
    _, events, _ = msgspec.msgpack.decode(encoded(*changes))
    assert [(event["medium"], event["parent_block_hash"], event["token_ids"]) for event in events] == [
        ("GPU", None, [1, 2]),
        ("CPU", 0x11, [3, 4]),
        ("CPU", None, [1, 2]),
    ]
    assert [event.get("extra_keys") for event in events] == [None, None, [["5a17"]]]
