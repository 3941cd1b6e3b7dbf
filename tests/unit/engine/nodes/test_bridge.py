"""Processes on hosts of their own exchange, hand rows on and leave as those of one host do; what no bridge sends is refused."""

from __future__ import annotations

import random
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.parallel.group import RankLostError
from engine.parallel.layout import GROUP_SLOT_BYTES, SLOT_BYTES, SLOTS
from engine.parallel.nodes.bridge import Event
from engine.parallel.nodes.mirror import MOST_WORDS_BYTES, Kind, StrayFrameError
from engine.parallel.stage import Stage
from tests.unit.engine.nodes.hosts import PATIENCE_S, Hosts, Words, given, head_of, take

NOT_YET_S = 0.05


@pytest.mark.parametrize(("size", "nodes"), [(2, 2), (4, 2), (3, 3), (6, 3)])
def test_all_processes_exchange_as_on_one_host(size: int, nodes: int) -> None:
    rng = random.Random(size)
    lengths = [rng.choice((1, 7, 300, 70_000)) for _ in range(30)] + [GROUP_SLOT_BYTES + 9]

    def exchanged(rank: int) -> list[list[bytes]]:
        return [hosts.groups[rank].exchange(bytes([number, rank]) * length) for number, length in enumerate(lengths)]

    with Hosts(size, nodes).joined() as hosts, ThreadPoolExecutor(size) as threads:
        found = [*threads.map(exchanged, range(size))]
        assert hosts.events.empty()
    expected = [[bytes([number, rank]) * length for rank in range(size)] for number, length in enumerate(lengths)]
    for each in found:
        assert each == expected


@pytest.mark.quick
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("size", "nodes", "width"), [(2, 2, 1), (4, 2, 2), (4, 2, 1), (3, 3, 1)])
def test_rows_of_all_sizes_go_round_all_stages(size: int, nodes: int, width: int, on_gpu: bool) -> None:
    """Empty ones too, and those larger than a ring; streams of a GPU write three words a message."""
    rows = [1, 0, 512, 513, SLOTS * SLOT_BYTES // 2048 + 7, 0, 3, 3000, *[1] * 3 * SLOTS]
    hosts = Hosts(size, nodes, width=width)
    signals = Words if on_gpu else None
    stages = [group.stage(signals, width=width) for group in hosts.groups]

    def sent(number: int, count: int, rank: int) -> torch.Tensor:
        return torch.full((count, 512), float(100 * number + rank % width)) + torch.arange(512)

    def handed_on(rank: int) -> bool:
        stage, is_right = stages[rank], True
        for number, count in enumerate(rows):
            expected = sent(number, count, rank)
            if stage.number == 0:
                stage.send(expected)
            found = stage.receive(torch.empty(count, 512))
            is_right &= torch.equal(found, expected)
            if stage.number:
                stage.send(found)
        return is_right

    with hosts.joined(), ThreadPoolExecutor(size) as threads:
        assert all(threads.map(handed_on, range(size)))
        assert hosts.events.empty()


def test_no_more_than_a_ring_is_on_its_way_to_a_slow_host() -> None:
    hosts = Hosts(2)
    first, second = (group.stage() for group in hosts.groups)
    over = threading.Event()

    def send() -> None:
        for number in range(SLOTS + 1):
            first.send(torch.full((3,), float(number)))
        over.set()

    with hosts.joined(), ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        assert not over.wait(NOT_YET_S)
        for number in range(SLOTS + 1):
            assert second.receive(torch.empty(3)).tolist() == [number] * 3
        assert over.wait(PATIENCE_S)
        sending.result()


def test_whoever_leaves_ends_the_waits_on_all_hosts() -> None:
    hosts = Hosts(3, 3)
    stages = [group.stage() for group in hosts.groups]

    def waits(stage: Stage) -> str:
        with pytest.raises(RankLostError) as raised:
            stage.receive(torch.empty(1))
        return str(raised.value)

    with hosts.joined(), ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(waits, stages[rank]) for rank in (0, 2)]
        hosts.groups[1].leave()
        for rank, each in zip((0, 2), waiting, strict=True):  # who hears of it leaves, too, and may be named instead
            assert re.fullmatch(rf"rank [01] has left: rank {rank} can't go on without it", each.result(PATIENCE_S))


def test_signs_of_life_and_the_leaders_word_come_to_the_other_hosts() -> None:
    with Hosts(3, 3).joined() as hosts:
        for _ in range(5):
            hosts.groups[2].beat()
        hosts.groups[0].dismiss()
        for group in hosts.groups[1:]:
            _until(lambda its=group: its.is_dismissed)  # type: ignore[misc]
        _until(lambda: hosts.groups[0].beats(2) == 5)
        _until(lambda: hosts.groups[1].beats(2) == 5)


def test_what_a_device_missed_is_known_before_the_rows_that_lack_it() -> None:
    hosts = Hosts(4, width=2)
    there, here = hosts.sides[0][1].mirror, hosts.sides[0][0].mirror
    group = hosts.groups[3].within(2)
    rows = hosts.groups[3].stage(width=2)
    news = there.news()
    group.missing()[0] = 1
    rows.send(torch.ones(2))
    assert given(news, here) == 2
    assert hosts.groups[0].within(2).missed() == group.missed() != ""


def test_last_words_about_a_process_are_heard() -> None:
    with Hosts(2).joined() as hosts:
        first, second = hosts.sides[0]
        second.say(1, "rank 1 (pid 7 on node 1) ended with signal SIGKILL")
        node, event = hosts.events.get(timeout=PATIENCE_S)
        assert (node, event) == (0, Event(first, 1, "rank 1 (pid 7 on node 1) ended with signal SIGKILL"))


def test_a_connection_that_ends_within_a_frame_is_a_lost_host() -> None:
    hosts = Hosts(2)
    first, second = hosts.sides[0]
    first.start(lambda event: hosts.events.put((0, event)))
    second.end.sendall(head_of(Kind.POSTED, 1, 8 + 100, 1) + struct.pack("<q", 100 << 8 | 1) + bytes(40))
    second.end.close()
    _, event = hosts.events.get(timeout=PATIENCE_S)
    assert event.side is first
    assert "closed the connection" in event.words or "reset" in event.words.lower()
    assert not any(hosts.memories[0][:256])  # no number tells of half a part
    first.close()


STRAY = [
    (0, 1, 0, 1),
    (99, 1, 0, 1),
    (Kind.BEATS, 0, 16, 0),
    (Kind.BEATS, 0, 1 << 31, 0),
    (Kind.POSTED, 0, 9, 1),  # a process of this side
    (Kind.POSTED, 7, 9, 1),
    (Kind.POSTED, 1, 7, 1),
    (Kind.POSTED, 1, 9 + GROUP_SLOT_BYTES, 1),
    (Kind.WRITTEN, 0, 24, 1),
    (Kind.WRITTEN, 1, 23, 1),
    (Kind.WRITTEN, 1, 25 + SLOT_BYTES, 1),
    (Kind.WRITTEN, 1, 24, 2),  # not the next one
    (Kind.WRITTEN, 1, 24, 1 << 40),
    (Kind.READ, 0, 0, 1),  # none was sent
    (Kind.READ, 1, 0, 1),
    (Kind.READ, 0, 8, 1),
    (Kind.LEFT, 0, 0, 0),
    (Kind.LEFT, 0, 0, 3),
    (Kind.DISMISSED, 0, 1, 1),
    (Kind.DISMISSED, 0, 0, 3),
    (Kind.SAID, 0, 5, 0),
    (Kind.MISSED, 0, 64, 0),
    (Kind.MISSED, 1, 65, 0),
    (Kind.SAID, 1, MOST_WORDS_BYTES + 1, 0),
]


@pytest.mark.parametrize(("kind", "index", "count", "number"), STRAY)
def test_what_no_bridge_sends_is_refused_before_more_is_read(kind: int, index: int, count: int, number: int) -> None:
    hosts = Hosts(2)
    with pytest.raises(StrayFrameError, match="run the same release everywhere"):
        take(hosts.sides[0][0].mirror, head_of(kind, index, count, number))
    assert not any(hosts.memories[0][:4096])


def test_a_piece_that_contradicts_its_head_and_a_part_that_does_are_refused() -> None:
    mirror = Hosts(2).sides[0][0].mirror
    with pytest.raises(StrayFrameError):
        take(mirror, head_of(Kind.WRITTEN, 1, 24 + 8, 1), struct.pack("<3q", 1, 8, 16))
    with pytest.raises(StrayFrameError):
        take(mirror, head_of(Kind.POSTED, 1, 8 + 4, 1), struct.pack("<q", 5 << 8 | 1))
    with pytest.raises(StrayFrameError):
        take(mirror, head_of(Kind.POSTED, 1, 8 + 4, 2), struct.pack("<q", 4 << 8 | 1))


def test_more_than_a_ring_holds_is_refused() -> None:
    hosts = Hosts(2)
    there, here = hosts.sides[0][1].mirror, hosts.sides[0][0].mirror
    sender = hosts.groups[1].stage()
    for _ in range(SLOTS):
        sender.send(torch.ones(2))
    assert given(there.news(), here) == SLOTS
    with pytest.raises(StrayFrameError):
        take(here, head_of(Kind.WRITTEN, 1, 24, SLOTS + 1))


def test_a_ring_that_a_devices_process_gave_up_stays_given_up() -> None:
    """Its words are far ahead, so that streams go on; what still comes from the other host doesn't take them back."""
    hosts = Hosts(2)
    there, here = hosts.sides[0][1].mirror, hosts.sides[0][0].mirror
    receiver, sender = hosts.groups[0].stage(Words), hosts.groups[1].stage(Words)
    assert receiver.before is not None
    receiver.before.give_up()
    assert given(here.news(), there) == 0
    sender.send(torch.ones(2))
    assert given(there.news(), here) == 1
    receiver.before._signals.wait(receiver.before._written, 1 << 20)  # type: ignore[attr-defined]


def _until(is_so) -> None:  # type: ignore[no-untyped-def]
    never = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if is_so():
            return
        never.wait(0.005)
    raise AssertionError("it never came")
