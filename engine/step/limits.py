"""Limits of chunks, and the sizes that a model's passes share."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels.attention import HeadShape, Tiling
from engine.kernels.mla import Forms
from engine.passes import InvalidChunkError
from engine.sequence import Chunk, State, first_column
from engine.step.newest import NewestTokens


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """The tiling limits of one shape of heads."""

    heads: HeadShape
    windows: tuple[int, ...]  # distinct windows of its layers
    items_at_once: int  # decode items that run concurrently
    tiling: Tiling
    forms: Forms | None = None  # None: no MLA


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a chunk, and of its attention's tiling."""

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int
    attention: tuple[HeadLimits, ...]
    last_heads: int  # index of the last layer's heads in `attention`
    last_window: int
    state_blocks: int = 0  # blocks of a sequence's state; 0: no recurrent layers
    columns: int = 0  # blocks of a column; 0: there are none
    window: int = 0  # positions for which columns are kept
    last_table: int = 0  # the copy of block tables for the last layer
    graph_context: int = 16384  # positions of prompts' contexts in a graph that also decodes

    @property
    def graph_blocks(self) -> int:
        return self.graph_context // self.block_size

    def place(self, chunk: Chunk) -> int:
        """Sort key of chunks in a pass: decoding ones, then prompts, then up-projected ones."""
        if chunk.decodes:
            return 0
        forms = (heads.forms for heads in self.attention)
        return 2 if any(each is not None and each.makes(chunk.num_tokens, chunk.end) for each in forms) else 1


def check(chunk: Chunk, newest: NewestTokens, limits: Limits) -> None:
    """Raise InvalidChunkError if a chunk contradicts its sequence or the limits.

    On a GPU, an id out of range would destroy the device's context.
    """
    sequence = chunk.sequence
    num_known, end = len(sequence.token_ids), chunk.end
    pending = end == num_known + 1 and newest.row_of(sequence) is not None
    if chunk.num_tokens < 1 or chunk.start < 0 or end > num_known + pending:
        problem = f"a chunk of {chunk.num_tokens} at {chunk.start} of {num_known + pending} tokens"
    elif chunk.sample and end < num_known:
        problem = f"asked to sample at position {end} of {num_known} known tokens"
    elif end > limits.max_model_len:
        problem = f"{end} tokens, the model takes {limits.max_model_len}"
    elif end > len(sequence.block_table) * limits.block_size:
        problem = f"{len(sequence.block_table)} blocks don't cover {end} positions"
    elif not (problem := wrong_columns(chunk, limits.columns, limits.window, limits.block_size)):
        return
    raise InvalidChunkError(f"request {sequence.request_id}: {problem}")


def wrong_columns(chunk: Chunk, columns: int, window: int, block_size: int) -> str:
    """Return why a chunk's columns can't be all that its tokens read and write; "" if they can."""
    if not columns:
        return ""
    own, first = chunk.sequence.columns, first_column(chunk.start, window, block_size)
    if chunk.end > len(own) * block_size:
        return f"{len(own)} columns don't cover {chunk.end} positions"
    # Columns are released in order.
    return "" if own[first] else f"column {first} is gone, which the token at {chunk.start} sees"


def check_states(chunk: Chunk, limits: Limits) -> None:
    """Raise InvalidChunkError if a chunk's states can't be those that it reads and writes."""
    if problem := wrong_state(chunk, limits.state_blocks, limits.num_blocks):
        raise InvalidChunkError(f"request {chunk.sequence.request_id}: {problem}")


def is_in_pool(state: State, state_blocks: int, num_blocks: int) -> bool:
    """True if these are as many blocks as a state has, all within the pool."""
    lowest, highest = state.bounds
    return len(state.blocks) == state_blocks and lowest >= 0 and highest < num_blocks


def wrong_state(chunk: Chunk, state_blocks: int, num_blocks: int) -> str:
    """Return why a chunk's states can't be those before its first and after all of its tokens; "" if they can."""
    if not state_blocks:
        return ""
    if chunk.start and chunk.state_behind(chunk.start - 1) is None:
        return f"no state behind token {chunk.start - 1}"
    at = chunk.start
    for state in chunk.states:
        if not is_in_pool(state, state_blocks, num_blocks):
            return f"a state in blocks {state.blocks}, not {state_blocks} in [0, {num_blocks})"
        if at < chunk.end and state.covers(at) and not state.is_found:
            at = chunk.end if state.end is None else state.end
    return "" if at >= chunk.end else f"no place for the state behind token {at}"
