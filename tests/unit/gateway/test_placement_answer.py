"""What the Lua functions answer, as a placement."""

from __future__ import annotations

import pytest

from common.errors import UnavailableError
from gateway.placement.ledger import parse_placement
from gateway.request.placement import Placement, Reason


def test_an_answer_names_workers_reason_and_costs() -> None:
    answer = [b"p0", b"7", 3, 1, b"prefix", b"predicted_ms=47.0 local_ms=-1.0 pull_from:d1=5", b"d0", b"d1"]
    placement = parse_placement(answer)
    expected = Placement(
        prefill="p0",
        prefill_incarnation=7,
        decode=["d0", "d1"],
        matched_blocks_prefill=3,
        matched_blocks_decode=1,
        reason=Reason.PREFIX,
        holder="d1",
        holder_blocks=5,
    )
    assert placement == expected
    assert placement.costs == {"predicted_ms": 47.0, "local_ms": -1.0}


def test_a_reason_of_a_later_release_is_another_one() -> None:
    """Its Lua text may be the one that was loaded last."""
    assert parse_placement([b"w", b"1", 0, 0, b"moonlight", b""]).reason is Reason.OTHER


def test_no_decode_worker_is_no_placement() -> None:
    with pytest.raises(UnavailableError, match="no decode worker"):
        parse_placement([b"", b"0", 0, 0, b"no decode worker", b""])
