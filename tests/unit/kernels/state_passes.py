"""Passes of sequences with states, for checks of the kernels that change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.delta import StateBatch, deal_out_states
from engine.kernels.delta.plan import CARRIED

NUM_BLOCKS = 40
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Tokens before and in each sequence's pass; those with one token decode.
_DECODING = ((5, 1), (16, 1), (0, 1), (31, 1))
# Tokens before each sequence's pass, and how many it drafts.
_DRAFTING = ((5, 2), (16, 0), (0, 3), (30, 5), (7, 0), (40, 1))
_MIXED = ((9, 1), (32, 1), (0, 3), (7, 2), (15, 2), (32, 2), (3, 90))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A sequence of `start + count` tokens, `count` of them in the pass, from row `row` on."""

    start: int
    count: int
    row: int
    table: list[int]
    behind: tuple[int, ...] = ()  # where the states behind its drafted tokens are

    @property
    def decodes(self) -> bool:
        return self.count == 1 + len(self.behind)


@dataclass(frozen=True, slots=True)
class StatePass:
    """Sequences, whose states are in places that are drawn."""

    sequences: list[Sequence]
    num_rows: int
    block_size: int
    batch: StateBatch

    def place(self, sequence: Sequence, position: int) -> int:
        """Where the state behind the token at this position is."""
        drafted = position - sequence.start if position > sequence.start else 0
        return (
            sequence.behind[drafted - 1] if sequence.behind and drafted else sequence.table[position // self.block_size]
        )


def passes(block_size: int, device: str) -> Iterator[StatePass]:
    """Decoding alone, also with drafts, with prompts that leave a state in each block, and with some that go on in one."""
    for parts, in_place in ((_DECODING, 0), (_MIXED, 1), (_MIXED, 3)):
        yield _pass(parts, block_size, device, in_place=in_place)
    drafting = tuple((start, 1 + drafted) for start, drafted in _DRAFTING)
    yield _pass(drafting, block_size, device, in_place=0, drafts=True)
    yield _pass((*drafting, *_MIXED[-2:]), block_size, device, in_place=0, drafts=True)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare within the dtype's tolerance of the tensor's size: a sum's error grows with its terms, also where they cancel."""
    size = max(1.0, expected.double().square().mean().sqrt().item())
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance * size)


def check_states(
    of: StatePass,
    out: torch.Tensor,
    pool: torch.Tensor,
    before: torch.Tensor,
    dtype: torch.dtype,
    expected: Callable[[Sequence], tuple[torch.Tensor, dict[int, torch.Tensor]]],
) -> None:
    """Compare each sequence's outputs and the states that it left in a pool [blocks, 3, ...]: the middle ones of places.

    `expected`: its outputs, and each written place's state.
    """
    untouched = before.clone()
    for sequence in of.sequences:
        wanted, behind = expected(sequence)
        close(out[sequence.row : sequence.row + sequence.count], wanted, dtype)
        for place, state in behind.items():
            close(pool[place, 1].view_as(state), state, dtype)
            untouched[place, 1] = pool[place, 1]
    assert torch.equal(untouched, pool), "nothing else is changed"


def _pass(
    parts: tuple[tuple[int, int], ...], size: int, device: str, *, in_place: int, drafts: bool = False
) -> StatePass:
    """`in_place`: blocks that change one place of a state before the next block goes on in another; 0: all blocks do.

    `drafts`: all but one token of the first sequences are drafted.
    """
    places, sequences, row = torch.randperm(NUM_BLOCKS).tolist(), list[Sequence](), 0
    for number, (start, count) in enumerate(parts):
        num_blocks = -(-(start + count) // size)
        own = [places.pop() for _ in range(-(-num_blocks // in_place) if in_place else 1)]
        table = [own[at // in_place if in_place else 0] for at in range(num_blocks)]
        behind = tuple(places.pop() for _ in range(count - 1)) if drafts and number < len(_DRAFTING) else ()
        sequences.append(Sequence(start=start, count=count, row=row, table=table, behind=behind))
        row += count + 2 * (sequences[-1].decodes and not drafts)  # rows between: places of a graph that nobody has
    return StatePass(sequences, row + 5, size, _batch(sequences, size, device))


def _batch(sequences: list[Sequence], size: int, device: str) -> StateBatch:
    """Decoding sequences have the first rows."""
    decoding = [each for each in sequences if each.decodes]
    num_rows = max((each.row + each.count for each in decoding), default=0)
    moves = np.full((num_rows, 2), -1)
    for each in decoding:
        moves[each.row] = each.table[(each.start - 1) // size] if each.start else -1, each.table[each.start // size]
        for at, place in enumerate(each.behind, start=1):
            moves[each.row + at] = CARRIED, place
    prompts = [each for each in sequences if not each.decodes]
    width = max((len(each.table) for each in prompts), default=0)
    tables = np.array([each.table + [-7] * (width - len(each.table)) for each in prompts], dtype=np.int32)
    starts, counts, rows = (
        np.array([getattr(each, name) for each in prompts], dtype=np.int64) for name in ("start", "count", "row")
    )
    tiles, runs = deal_out_states(starts, starts + counts, rows, tables, block_size=size)
    room = np.zeros((2, 8), dtype=np.int32)
    if prompts:
        tiles, runs = np.concatenate((tiles, room)), np.concatenate((runs, room[:, :2]))
    return StateBatch(*(torch.from_numpy(each.astype(np.int32)).to(device) for each in (moves, tiles, runs)))
