"""Decode attention's work, split into items of about equal length. Items are data, so a captured graph stays valid."""

from __future__ import annotations

import numpy as np

from engine.arrays import Integers
from engine.kernels.attention.plan import first_seen
from engine.kernels.device import Device

STEP_POSITIONS = 64  # a loop step of `triton_decode`
PROGRAMS_PER_PROCESSOR = 2  # at once
MAX_ROUNDS = 2  # long contexts are split into at most this many waves


def items_at_once(device: Device, num_kv_heads: int) -> int:
    """Items that the device computes concurrently: one program for each key head."""
    return PROGRAMS_PER_PROCESSOR * device.processors // num_kv_heads


def max_items(num_sequences: int, at_once: int) -> int:
    """Upper bound of the items that `deal_out` makes of so many sequences."""
    return num_sequences + MAX_ROUNDS * at_once


def deal_out(context_len: Integers, *, window: int, at_once: int) -> tuple[Integers, Integers]:
    """Split contexts [S] into items of about equal length. Returns the items [I, 8] and parts [S, 2] of `DecodeItems`, int32.

    An item's columns: row of q (-1: nothing to do), first position, end, whether it is its sequence's only item, offset of the
    block table (`point` fills it in). I is at most `max_items(S, at_once)`.
    """
    first = np.maximum(first_seen(context_len - 1, window), 0)
    lengths = context_len - first
    counts = _ceil(lengths, _longest_item(lengths, at_once))
    each = _ceil(_ceil(lengths, counts), STEP_POSITIONS) * STEP_POSITIONS  # even pieces of whole loop steps
    counts = _ceil(lengths, each)
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(ends[-1]) - (ends - counts)[owner]
    items = np.zeros((len(owner), 8), dtype=np.int32)
    items[:, 0] = owner
    items[:, 1] = first[owner] + piece * each[owner]
    items[:, 2] = np.minimum(items[:, 1] + each[owner], context_len[owner])
    items[:, 3] = (counts == 1)[owner]
    return items, np.stack((ends - counts, counts), axis=1).astype(np.int32)


def point(items: Integers, first: int, width: int) -> None:
    """Fill in the items' block tables: contiguous from offset `first`, `width` blocks each."""
    items[:, 4] = first + items[:, 0] * width


def _longest_item(lengths: Integers, at_once: int) -> int:
    """Positions of an item, in whole loop steps: the split of the longest context with the fewest steps.

    Cost: rounds of `at_once` items, times an item's steps plus one for its start.
    """
    steps = -(-int(lengths.max()) // STEP_POSITIONS)
    most = MAX_ROUNDS * at_once
    sizes = np.unique(_ceil(np.full(most, steps), np.arange(1, most + 1)))
    counts = _ceil(lengths[:, None], STEP_POSITIONS * sizes).sum(axis=0)
    cost = np.where(counts <= len(lengths) + most, _ceil(counts, at_once) * (sizes + 1), np.inf)
    return STEP_POSITIONS * int(sizes[np.argmin(cost)])


def _ceil(values: Integers, divisor: Integers | int) -> Integers:
    return -(-values // divisor)
