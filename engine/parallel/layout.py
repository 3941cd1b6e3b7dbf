"""The layout of the memory that a worker's processes share: words of each, slots for what they sum, rings between stages.

    line of each process ... line of all | slots of the group | slots of the groups of stages | ring of each process ...
    line of each process, of what its device missed ...

It loads no torch: what carries the memory to other hosts needs none.
"""

from __future__ import annotations

LINE = 64  # bytes of a cache line: each process's words have their own
# Words of a process's line: the number that it posted last and the kind of each of its last two operations, its beats, and the
# first three again for the group of its stage.
NUMBER, KIND, BEATS, OF_A_STAGE = 0, 1, 3, 4
# Words of all: the number of a process that computes no more, plus 1, and whether the leader outlives the others: well, or since
# one of them was lost.
LEFT, DISMISSED = 0, 1
WELL, AFTER_A_LOSS = 1, 2
GROUP_SLOT_BYTES = 4 << 20

# A ring's slots. Words of its head: slots written, and read, since it began.
SLOTS, SLOT_BYTES = 4, 1 << 20
WRITTEN, READ = 0, LINE // 8
# Words of a slot's head: the message's number, its bytes, and how many of them are in this slot.
MESSAGE, SIZE, PIECE = 0, 1, 2
RING_BYTES = 2 * LINE + SLOTS * (LINE + SLOT_BYTES)


def line_of(rank: int) -> int:
    """The first word of a process's line; with the number of processes, that of all."""
    return rank * LINE // 8


def slots_from(size: int, *, of_stages: bool = False) -> int:
    """The beginning of the slots of `size` processes: two for each, first all of even operations, then all of odd ones."""
    return (size + 1) * LINE + (2 * size * GROUP_SLOT_BYTES if of_stages else 0)


def rings_from(size: int) -> int:
    """The beginning of the rings of `size` processes."""
    return (size + 1) * LINE + 4 * size * GROUP_SLOT_BYTES


def ring_from(size: int, number: int) -> int:
    """The beginning of the ring that this process writes."""
    return rings_from(size) + number * RING_BYTES


def missed_from(size: int, number: int = 0) -> int:
    """The beginning of a process's line of what its device missed: 32 bits for each rank of its stage."""
    return ring_from(size, size) + number * LINE


def num_bytes(size: int) -> int:
    """Pages that nobody touches take no memory: a worker has ranks that sum, or stages with rings."""
    return missed_from(size, size)


def ring_slots_from(start: int) -> list[int]:
    """Return the beginnings of a ring's slots; the head of each is in the line before it."""
    return [start + 2 * LINE + slot * (LINE + SLOT_BYTES) + LINE for slot in range(SLOTS)]
