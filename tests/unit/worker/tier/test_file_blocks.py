"""The file tier's policy: files never take more than their bound, and the one used longest ago goes first."""

from __future__ import annotations

import random

from worker.tier.file_blocks import PAGE, FileBlocks
from worker.tier.kv_files import Stored


def stored(size: int, *numbers: int) -> Stored:
    return Stored(frozenset(numbers or (0,)), size)


def test_the_file_used_longest_ago_goes_first() -> None:
    blocks = FileBlocks(3 * PAGE, {b"a": stored(1), b"b": stored(PAGE), b"c": stored(9, 0, 2)})
    blocks.touch(b"a")
    blocks.touch(b"unknown")
    assert blocks.make_room(PAGE) == [(b"b", stored(PAGE))]
    blocks.add(b"d", stored(PAGE))
    assert [*blocks] == [b"c", b"a", b"d"]
    assert blocks.has(2, b"c")
    assert not blocks.has(1, b"c")
    assert blocks.drain_removed() == [b"b"]
    assert blocks.evicted == 1


def test_what_is_too_much_at_the_start_goes() -> None:
    blocks = FileBlocks(2 * PAGE, {bytes([at]): stored(PAGE) for at in range(5)})
    assert [digest for digest, _ in blocks.make_room(0)] == [b"\0", b"\1", b"\2"]


def test_bytes_are_counted_through_any_history() -> None:
    chance, here = random.Random(3), dict[bytes, Stored]()
    blocks = FileBlocks(20 * PAGE, {})
    for _ in range(2_000):
        digest, size = bytes([chance.randrange(30)]), chance.randrange(1, 5 * PAGE)
        if chance.random() < 0.3:
            assert blocks.forget(digest) == here.pop(digest, None)
            continue
        for gone, _ in blocks.make_room(size):
            del here[gone]
        blocks.add(digest, stored(size))
        here[digest] = stored(size)
        assert blocks.num_bytes == sum(-(-each.size // PAGE) * PAGE for each in here.values()) <= 20 * PAGE
        assert {*blocks} == here.keys()
