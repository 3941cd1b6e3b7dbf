"""A group of ranks on one host's CPUs, over memory that all of them map.

Each rank has a slot for what it contributes. It writes there, posts the operation's number, waits until every rank has posted
that number, and reads all slots in rank order. Slots alternate between operations: a rank posts the next number only after it
has read this one's slots, so the slot before last is free without a second wait.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from engine.parallel import layout
from engine.parallel.device_ring import DeviceRing, Signals
from engine.parallel.group import RankLostError, sent_nothing
from engine.parallel.layout import (
    AFTER_A_LOSS,
    BEATS,
    DISMISSED,
    GROUP_SLOT_BYTES,
    KIND,
    LEFT,
    NUMBER,
    OF_A_STAGE,
    WELL,
    line_of,
)
from engine.parallel.stage import Lane, Ring, Stage

LONGEST_WAIT_S = 60.0  # a living rank that comes later counts as hanging
LONGEST_START_S = 1800.0  # while ranks load weights and compile kernels
_SPINS = 2000
_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3
_SLEEPS_A_WAIT = 32  # a longer wait ends this part of itself later at most
_CHECK_S = 0.02  # between checks on the others' lives


class SharedMemoryGroup:
    """One process's end. `memory` is zeroed, of `num_bytes(size)`; `lost()` is why another can't come, "" while all live."""

    num_bytes = staticmethod(layout.num_bytes)

    def __init__(
        self,
        memory: mmap.mmap,
        *,
        rank: int,
        size: int,
        lost: Callable[[], str] = lambda: "",
        members: range | None = None,
    ) -> None:
        """`members`: the processes of the group, by number; None: all, of which `rank` is this one's number."""
        self._members, self._own, self._all = range(size) if members is None else members, rank, size
        self.rank, self.size = self._members.index(rank), len(self._members)
        self._lost = lost
        self._words = memoryview(memory)[: layout.slots_from(size)].cast("q")
        self._missed = memoryview(memory)[layout.missed_from(size) : layout.num_bytes(size)].cast("i")
        # A stage's ranks have words and slots of their own: all may exchange something between two of their operations.
        self._word = 0 if members is None else OF_A_STAGE
        begin, room = layout.slots_from(size, of_stages=members is not None), 2 * size * GROUP_SLOT_BYTES
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=room)
        self._slots = slots.view(2, size, GROUP_SLOT_BYTES)
        self._memory = memory
        self._number = 0
        self._longest_wait_s = LONGEST_WAIT_S
        self._fence = threading.Lock()

    def within(self, width: int) -> SharedMemoryGroup:
        """Return the group of this process's stage, of so many neighbours."""
        first = self._own // width * width
        members = range(first, first + width)
        return SharedMemoryGroup(self._memory, rank=self._own, size=self._all, lost=self._lost, members=members)

    def stage(self, signalled: Callable[[torch.Tensor], Signals] | None = None, *, width: int = 1) -> Stage:
        """Return this process's place if each `width` processes are the ranks of a stage: its neighbours are of its rank.

        `signalled(memory)`: pins the rings' memory, bytes, on the GPU that computes this stage. None: a CPU does.
        """
        before, behind = (self._own - width) % self._all, (self._own + width) % self._all
        # A thread of the first stage waits for logits while another one computes, which needs the interpreter.
        spins = _SPINS if self._own >= width else 0
        before_from, after_from = (layout.ring_from(self._all, number) for number in (before, self._own))
        wait, wait_behind = partial(self.wait_until, before, spins=spins), partial(self.wait_until, behind)
        if signalled is None:
            receiving: Lane = Ring(self._memory, before_from, wait)
            sending: Lane = Ring(self._memory, after_from, wait_behind)
        else:
            page = layout.rings_from(self._all) // mmap.PAGESIZE * mmap.PAGESIZE
            memory = torch.frombuffer(self._memory, dtype=torch.uint8, offset=page)
            signals = signalled(memory)
            receiving = DeviceRing(memory, before_from - page, signals, wait)
            sending = DeviceRing(memory, after_from - page, signals, wait_behind)
        return Stage(self._own // width, self._all // width, receiving, sending)

    def missing(self) -> torch.Tensor:
        """The words [N] int32, zero at first, where this process's device notes members that sent it nothing in time.

        They are in what `stage` has pinned.
        """
        start = layout.missed_from(self._all, self._own)
        return torch.frombuffer(self._memory, dtype=torch.int32, offset=start, count=self.size)

    def missed(self) -> str:
        """Return which process sent nothing in time to another one of its stage; "" if none was missed."""
        for process in range(self._all):
            first = process // self.size * self.size
            for rank in range(self.size):
                if self._missed[process * layout.LINE // 4 + rank]:
                    return sent_nothing(first + rank, process)
        return ""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """See `Group.all_reduce`."""
        partial = partial.contiguous()
        total = torch.empty_like(partial)
        for mine, out in zip(_pieces(partial), _pieces(total), strict=True):
            first, *others = self._exchange(mine)
            added = first.float() if first.dtype != torch.float32 else first.clone()
            for other in others:
                added += other
            out.copy_(added)
        return total

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `Group.gather`."""
        part = part.contiguous()
        ranks = part.new_empty((self.size, *part.shape))
        whole = ranks.view(self.size, -1)
        at = 0
        for mine in _pieces(part):
            for rank, theirs in enumerate(self._exchange(mine)):
                whole[rank, at : at + len(mine)] = theirs
            at += len(mine)
        return torch.cat(ranks.unbind(), dim=-1)

    def exchange(self, own: bytes) -> list[bytes]:
        """Return every rank's bytes, of which all have as many, in rank order."""
        self._longest_wait_s, before = LONGEST_START_S, self._longest_wait_s
        try:
            part = torch.frombuffer(bytearray(own), dtype=torch.uint8)[None]
            return [rank.numpy().tobytes() for rank in self.gather(part)[0].split(len(own))]
        finally:
            self._longest_wait_s = before

    def meet(self) -> None:
        """See `Group.meet`."""
        self.exchange(bytes(1))

    def check(self) -> None:
        """See `Group.check`: here each operation waits for all ranks."""

    def leave(self) -> None:
        """Tell the others that this rank computes no more: their waits end."""
        self._words[line_of(self._all) + LEFT] = self._own + 1

    def beat(self) -> None:
        """Show that this rank's process lives."""
        self._words[line_of(self._own) + BEATS] += 1

    def beats(self, rank: int) -> int:
        """The beats of a rank; 0 until it begins."""
        return self._words[line_of(rank) + BEATS]

    def dismiss(self, *, is_well: bool = True) -> None:
        """Tell the others that this rank, the leader, outlives them; not `is_well`: it ends, too, since one was lost."""
        self._words[line_of(self._all) + DISMISSED] = WELL if is_well else AFTER_A_LOSS

    @property
    def is_dismissed(self) -> bool:
        """True once the leader ends the others; otherwise, if its link closes, it dies."""
        return bool(self._words[line_of(self._all) + DISMISSED])

    def _exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Contribute one piece; return every rank's, in rank order, valid until the exchange after next."""
        self._number += 1
        slots = self._slots[self._number % 2, self._members.start : self._members.stop]
        kind = mine.nbytes << 8 | mine.itemsize
        pieces = [slot[: mine.nbytes].view(mine.dtype) for slot in slots]
        pieces[self.rank].copy_(mine)
        line = line_of(self._own)
        self._words[line + self._word + KIND + self._number % 2] = kind
        with self._fence:  # the piece is written before the number is
            self._words[line + self._word + NUMBER] = self._number
        for rank in self._members:
            self._wait_for(rank)
            theirs = self._words[line_of(rank) + self._word + KIND + self._number % 2]
            if theirs != kind:
                self.leave()
                raise RankLostError(f"rank {rank} computes something else than rank {self._own}: they are out of step")
        return pieces

    def _wait_for(self, rank: int) -> None:
        words, number, word = self._words, self._number, line_of(rank) + self._word + NUMBER
        self.wait_until(rank, lambda: words[word] >= number)

    def wait_until(self, rank: int, is_so: Callable[[], bool], *, spins: int = _SPINS) -> None:
        """Wait for what a rank does, for a short while without sleeping; nothing is read before. Raises RankLostError."""
        for _ in range(spins):
            if is_so():
                return
            os.sched_yield()
        began = checked = now = time.monotonic()
        while not is_so():
            time.sleep(min(_LONGEST_SLEEP_S, max(_SLEEP_S, (now - began) / _SLEEPS_A_WAIT)))
            now = time.monotonic()
            if now - checked > _CHECK_S:
                checked = now
                self._check(rank, now - began)
        with self._fence:  # nothing is read before the word was
            pass

    def _check(self, rank: int, waited_s: float) -> None:
        """Raise RankLostError if waiting is in vain."""
        left = self._words[line_of(self._all) + LEFT]
        reason = f"rank {left - 1} has left" if left else self._lost()
        if not reason and waited_s > self._longest_wait_s:
            reason = f"rank {rank} hangs"
        if reason:
            self.leave()
            raise RankLostError(f"{reason}: rank {self._own} can't go on without it")


def _pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of a contiguous tensor's elements that fit into a slot."""
    return iter(x.view(-1).split(GROUP_SLOT_BYTES // x.itemsize))
