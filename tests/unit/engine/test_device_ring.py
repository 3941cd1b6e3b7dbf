"""Rings between stages on GPUs, with threads for streams and the host for devices."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from engine.parallel.device_ring import DeviceRing
from engine.parallel.group import RankLostError
from engine.parallel.layout import SLOT_BYTES, SLOTS
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.parallel.stage import Stage

PATIENCE_S = 60.0
NOT_YET_S = 0.05


class Words:
    """Words that threads wait for as streams do: a number counts as reached if it is up to half the way round behind."""

    def __init__(self, changed: threading.Condition, memory: torch.Tensor) -> None:
        self._memory, self._changed = memory, changed

    def wait(self, word: int, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._at(word, number), timeout=PATIENCE_S)

    def _at(self, word: int, number: int) -> bool:
        return (int(self._memory[word : word + 4].view(torch.int32)) - number) % (1 << 32) < 1 << 31

    def write(self, word: int, number: int) -> None:
        with self._changed:
            self._memory[word : word + 4].view(torch.int32).fill_((number + (1 << 31)) % (1 << 32) - (1 << 31))
            self._changed.notify_all()


def _stages(count: int = 2, lost: Callable[[], str] = str) -> tuple[list[Stage], threading.Condition]:
    memory, changed = mmap.mmap(-1, SharedMemoryGroup.num_bytes(count)), threading.Condition()
    groups = [SharedMemoryGroup(memory, rank=rank, size=count, lost=lost) for rank in range(count)]
    return [group.stage(partial(Words, changed)) for group in groups], changed


def _sent(number: int, rows: int) -> torch.Tensor:
    return torch.full((rows, 1024), float(number)).to(torch.bfloat16) + torch.arange(1024).to(torch.bfloat16)


def test_messages_of_all_sizes_arrive_in_order() -> None:
    """Empty ones too, and those larger than the ring, whose sender waits for room."""
    (first, second), _ = _stages()
    sizes = [1, 0, 512, 513, SLOTS * SLOT_BYTES // 2048 + 7, 0, 3, 3000, 1, 1, 1, 1, 1, 1]

    def send() -> None:
        for number, rows in enumerate(sizes):
            first.send(_sent(number, rows))

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        for number, rows in enumerate(sizes):
            found = second.receive(torch.empty(rows, 1024, dtype=torch.bfloat16))
            assert torch.equal(found, _sent(number, rows))
        sending.result()


def test_rows_go_round_all_stages() -> None:
    stages, _ = _stages(3)
    with ThreadPoolExecutor(2) as threads:
        for number in range(3 * SLOTS):
            going = [
                threads.submit(lambda stage: stage.send(stage.receive(torch.empty(2, 1024))), stages[at])
                for at in (1, 2)
            ]
            stages[0].send(torch.full((2, 1024), float(number)))
            assert torch.equal(stages[0].receive(torch.empty(2, 1024)), torch.full((2, 1024), float(number)))
            for each in going:
                each.result()


def test_numbers_go_round() -> None:
    (first, second), _ = _stages()
    for lane in (first.after, second.before):
        assert isinstance(lane, DeviceRing)
        lane._number = (1 << 31) - 2
        for word in lane._words.values():
            word.fill_((1 << 31) - 2)
    for number in range(SLOTS):  # more would wait for room
        first.send(torch.full((2,), float(number)))
    for number in range(SLOTS):
        assert second.receive(torch.empty(2)).tolist() == [number] * 2


def test_a_sender_waits_for_room() -> None:
    (first, second), _ = _stages()
    for number in range(SLOTS):
        first.send(torch.full((2,), float(number)))
    over = threading.Event()

    def send() -> None:
        first.send(torch.full((2,), 9.0))
        over.set()

    sending = threading.Thread(target=send)
    sending.start()
    assert not over.wait(NOT_YET_S)
    assert second.receive(torch.empty(2)).tolist() == [0.0, 0.0]
    assert over.wait(PATIENCE_S)
    sending.join()


def test_what_waits_for_a_lost_stage_goes_on() -> None:
    """The receiver of what never comes, and the sender that finds no room; whoever waits for either hears of it."""
    (first, _), changed = _stages(lost=lambda: "rank 1 (pid 7) ended with signal SIGKILL")

    def send() -> None:
        for _ in range(SLOTS + 1):
            first.send(torch.ones(2))

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(send), threads.submit(first.receive, torch.empty(2))]
        with pytest.raises(RankLostError, match=r"rank 1 \(pid 7\) ended with signal SIGKILL: rank 0 can't go on"):
            first.until(lambda: all(each.done() for each in waiting))
        with changed:
            changed.notify_all()
        for each in waiting:
            each.result()


def test_a_stage_apart_sends_nothing_and_gets_zeros() -> None:
    (first, second), _ = _stages()
    with first.apart(), second.apart():
        first.send(torch.ones(2))
        assert second.receive(torch.ones(2)).tolist() == [0.0, 0.0]
    first.send(torch.full((2,), 3.0))
    assert second.receive(torch.empty(2)).tolist() == [3.0, 3.0]
