"""Kept responses as values: statuses, ids that tell their owner, events behind a number."""

from __future__ import annotations

import pytest

from gateway.http.problem import NotKeptError
from gateway.responses.records import (
    FIRST_INPUT,
    NEXT,
    OVER,
    Events,
    ResponseRecord,
    checked_conversation_id,
    checked_response_id,
    encode,
    item_id,
    new_conversation_id,
    new_response_id,
    owner_of,
    record_decoder,
    with_ids,
)


def test_what_is_over_stays_as_it_is() -> None:
    assert {"completed", "incomplete", "failed", "cancelled"} == OVER
    for status, following in NEXT.items():
        record = ResponseRecord(id=new_response_id(), tenant="t", status=status, created_at=1)
        for other in NEXT:
            if other in following:
                assert record.to(other, starts=2).status == other
            else:
                with pytest.raises(ValueError, match="can't be"):
                    record.to(other)


def test_a_record_says_nothing_that_is_not_needed() -> None:
    record = ResponseRecord(id="resp_1", tenant="t", status="completed", created_at=1)
    assert record_decoder.decode(encode(record)) == record
    assert len(encode(record)) < 70


def test_items_without_an_id_get_one_that_tells_whose_they_are() -> None:
    response = new_response_id()
    items = [{"type": "message", "id": None}, {"type": "function_call_output", "id": "mine"}, {"type": "reasoning"}]
    named = with_ids(items, response, FIRST_INPUT)
    assert [item["id"][: item["id"].index("_")] if "_" in item["id"] else item["id"] for item in named] == [
        "msg",
        "mine",
        "rs",
    ]
    assert {owner_of(item["id"]) for item in (named[0], named[2])} == {response.removeprefix("resp_")}
    assert len({item["id"] for item in named}) == 3
    assert owner_of("mine") is owner_of("msg_1") is owner_of("msg_*") is None
    assert items[0]["id"] is None
    assert len(item_id("message", response, 0)) == len(item_id("message", response, 0xFFFF))


@pytest.mark.parametrize(
    "text", ["", "resp_", "resp_*", "resp_>", f"resp_{'0' * 31}", f"resp_{'0' * 32}\n", f"conv_{'0' * 32}"]
)
def test_no_other_text_is_a_response_s_id(text: str) -> None:
    with pytest.raises(NotKeptError):
        checked_response_id(text)


def test_ids_are_their_own_kind_s() -> None:
    mine, ours = new_response_id(), new_conversation_id()
    assert (checked_response_id(mine), checked_conversation_id(ours)) == (mine, ours)
    with pytest.raises(NotKeptError):
        checked_conversation_id(mine)


@pytest.mark.parametrize(
    ("after", "left"), [(-1, b"a\n\nb\n\nc\n\n"), (4, b"a\n\nb\n\nc\n\n"), (5, b"b\n\nc\n\n"), (7, b""), (99, b"")]
)
def test_events_behind_a_number(after: int, left: bytes) -> None:
    assert Events(first=5, data=b"a\n\nb\n\nc\n\n").behind(after) == left
