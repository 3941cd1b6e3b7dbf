"""Sanity checks of heartbeats: figures must be numbers, names must fit a line, a pool must have blocks.

Heartbeats are read by everybody, and counted with. One that makes no sense is dropped, and its process is missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from common.messages.states import GatewayState, HostState, PlannerState, WorkerState
from common.pages import KVLayout

MAX_FIGURE = 2.0**63
MAX_TEXT_CHARS = 512
MAX_ENTRIES = 1_000  # lists and maps
MAX_BYTES = 64 << 10


def nonsense(message: msgspec.Struct) -> str:
    """Return the first impossible value of a heartbeat; "" if there is none, or the message is no heartbeat."""
    if not isinstance(message, WorkerState | GatewayState | PlannerState | HostState):
        return ""
    wrong = next(_found(message, ""), "")
    return wrong or (_worker(message) if isinstance(message, WorkerState) else "")


def _worker(state: WorkerState) -> str:
    """Yield impossible facts of a worker; each figure or text is checked on its own."""
    layout = state.region.layout
    wrong = {
        "model_fingerprint is empty": not state.model_fingerprint,
        "vocab_size is 0": not state.vocab_size,
        f"max_model_len is {state.max_model_len}: no block": state.max_model_len < layout.block_size,
        f"free_blocks is {state.free_blocks}: more than all": state.free_blocks > layout.num_blocks,
    }
    return _pool(layout) or next((what for what, is_so in wrong.items() if is_so), "")


def _pool(layout: KVLayout) -> str:
    try:
        has_room = layout.num_blocks > 0 and layout.block_size > 0 and layout.block_bytes > 0
    except ValueError as error:
        return str(error)
    return "" if has_room else "the pool has no room"


def _found(value: Any, name: str) -> Iterator[str]:
    match value:
        case bool() | None:
            return
        case int() | float() if not (math.isfinite(value) and 0 <= value <= MAX_FIGURE):
            yield f"{name} is {value:g}"
        case str() if len(value) > MAX_TEXT_CHARS or not value.isprintable():
            yield f"{name} is no line of text"
        case bytes() if len(value) > MAX_BYTES:
            yield f"{name} has {len(value)} bytes"
        case list() | dict() | tuple() | frozenset() if len(value) > MAX_ENTRIES:
            yield f"{name} has {len(value)} entries"
        case list() | tuple() | frozenset():
            for one in value:
                yield from _found(one, name)
        case dict():
            for key, one in value.items():
                yield from _found(key, name)
                yield from _found(one, f"{name}.{key}")
        case msgspec.Struct():
            for field in value.__struct_fields__:
                yield from _found(getattr(value, field), field)
