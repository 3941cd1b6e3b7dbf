"""Heartbeats that can't be so are told apart from those that can, field by field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common import messages
from common.messages import GatewayState, PlannerState, Region, WorkerState
from common.messages.sense import nonsense
from tests.fakes.workers import LAYOUT, a_worker

WORKER = a_worker("w", "decode")
GATEWAY = GatewayState(gateway="g", incarnation=1)
PLANNER = PlannerState(planner="p", acts=True, workers={}, desired={}, pressures={}, reason="none")
FIGURES = [
    (message, field.name)
    for message in (WORKER, GATEWAY, PLANNER)
    for field in msgspec.structs.fields(message)
    if field.type in (int, float)
]


def with_layout(**changes: Any) -> WorkerState:
    layout = msgspec.structs.replace(LAYOUT, **changes)
    return msgspec.structs.replace(WORKER, region=Region(transport="shm", incarnation=1, layout=layout, address={}))


@pytest.mark.parametrize("message", [WORKER, GATEWAY, PLANNER])
def test_an_honest_heartbeat_makes_sense(message: msgspec.Struct) -> None:
    assert nonsense(message) == ""


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 2.0**70])
@pytest.mark.parametrize(("message", "name"), FIGURES)
def test_a_figure_that_is_none_is_named(message: msgspec.Struct, name: str, value: float) -> None:
    assert nonsense(msgspec.structs.replace(message, **{name: value})).startswith(f"{name} is ")


@pytest.mark.parametrize(
    "state",
    [
        msgspec.structs.replace(WORKER, model="m\x1b[2Jm"),
        msgspec.structs.replace(WORKER, model="m" * 1000),
        msgspec.structs.replace(WORKER, model_fingerprint="a\nb"),
        msgspec.structs.replace(WORKER, roles=["decode"] * 5000),
        msgspec.structs.replace(WORKER, features=frozenset(map(str, range(5000)))),
        msgspec.structs.replace(WORKER, features=frozenset({"a\nb"})),
        msgspec.structs.replace(GATEWAY, models={str(n): messages.ModelLoad() for n in range(5000)}),
        msgspec.structs.replace(GATEWAY, models={"m": messages.ModelLoad(waiting_tokens=-5)}),
        msgspec.structs.replace(GATEWAY, kept_traces=bytes(1 << 20)),
        msgspec.structs.replace(PLANNER, pressures={"decode": float("nan")}),
        msgspec.structs.replace(PLANNER, reason="\x1b]0;"),
        msgspec.structs.replace(WORKER, model_fingerprint=""),
        msgspec.structs.replace(WORKER, vocab_size=0),
        msgspec.structs.replace(WORKER, max_model_len=15),
        msgspec.structs.replace(WORKER, free_blocks=101),
        with_layout(num_blocks=0),
        with_layout(block_size=0),
        with_layout(dtype="float7"),
    ],
)
def test_what_would_break_a_reader_is_dropped_before_it(state: msgspec.Struct) -> None:
    assert nonsense(state)
