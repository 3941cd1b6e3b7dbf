"""The Batch API's pure parts: what a batch may become, lines and forms as they come in, entries as they go out."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import get_args

import pytest

from common.errors import InvalidRequestError
from gateway.batches.lines import (
    PART_BYTES,
    PART_LINES,
    LineChecker,
    LineCutter,
    Packer,
    WrongLineError,
    answered,
    lines_of,
    parse_line,
    unanswered,
)
from gateway.batches.records import (
    NEXT,
    OVER,
    BatchRecord,
    Status,
    batch_decoder,
    encode,
    is_id,
    new_batch_id,
    new_file_id,
)
from gateway.batches.runner import of_batches
from gateway.batches.upload import FileForm
from gateway.http.problem import NotKeptError
from gateway.keeping import running
from gateway.keeping.layout import token_of
from gateway.keeping.paging import Page
from gateway.tenants.budgets import Limits
from gateway.tenants.tenants import Tenant

RECORD = BatchRecord(id="batch_1", tenant="acme", endpoint="/v1/completions", input_file_id="file-1", created_at=5)
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}


# -- states ----------------------------------------------------------------------------------------------------------


def test_every_status_leads_to_an_end_and_no_end_leads_on() -> None:
    assert set(NEXT) == set(get_args(Status))
    assert {"completed", "failed", "expired", "cancelled"} == OVER
    for status in NEXT:
        reached, frontier = {status}, {status}
        while frontier:
            frontier = {following for one in frontier for following in NEXT[one]} - reached
            reached |= frontier
        assert reached & OVER, status


@pytest.mark.parametrize(("before", "after"), itertools.product(NEXT, NEXT))
def test_a_batch_becomes_only_what_it_may(before: Status, after: Status) -> None:
    record = BatchRecord(id="b", tenant="t", endpoint="e", input_file_id="f", status=before)
    if after in NEXT[before]:
        changed = record.to(after, 12.7)
        assert (changed.status, changed.times) == (after, {f"{after}_at": 12})
        assert batch_decoder.decode(encode(changed)) == changed
    else:
        with pytest.raises(ValueError, match="can't be"):
            record.to(after, 12.7)


def test_a_batch_tells_openai_s_fields() -> None:
    told = RECORD.to("in_progress", 7, total=3, completed=1, failed=1).as_json()
    assert told["object"] == "batch"
    assert told["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
    assert (told["in_progress_at"], told["completed_at"], told["errors"]) == (7, None, None)


def test_ids_and_tenants_are_tokens_of_subjects() -> None:
    assert is_id(new_file_id())
    assert is_id(new_batch_id())
    assert not any(map(is_id, ("", "a.b", "*", ">", "a b", "é", "x" * 65)))
    assert token_of("a.b") != token_of("a.c")
    assert is_id(token_of("a.b"))


# -- lines -----------------------------------------------------------------------------------------------------------


def cutter(**bounds: int) -> LineCutter:
    return LineCutter(**({"file_bytes": 1 << 30, "file_lines": 10**6, "line_bytes": 1 << 20} | bounds))


def cut(raw: bytes, *, step: int = 7, **bounds: int) -> list[bytes]:
    one, parts = cutter(**bounds), []
    for start in range(0, len(raw), step):
        parts += one.feed(raw[start : start + step])
    parts += one.finish()
    assert one.lines == sum(len(part.removesuffix(b"\n").split(b"\n")) for part in parts)
    return parts


def test_parts_have_whole_lines_and_make_the_file() -> None:
    raw = b"".join(b'{"n": %d}\r\n' % number for number in range(3 * PART_LINES + 1)) + b"last, without an end"
    parts = cut(raw)
    assert b"".join(parts) == raw
    assert len(parts) == 4
    assert all(part.endswith(b"\n") for part in parts[:-1])
    long = cut((b"x" * 99_999 + b"\n") * 20, step=65_536)
    assert max(map(len, long)) < PART_BYTES + 100_000


@pytest.mark.parametrize(
    ("raw", "bounds", "told"),
    [
        (b"", {}, "empty"),
        (b"12345678", {"file_bytes": 7}, "larger than 7 bytes"),
        (b"a\nb\nc", {"file_lines": 2}, "more than 2 lines"),
        (b"a\nb\nc\n", {"file_lines": 2}, "more than 2 lines"),
        (b"abc\nabcdefgh\n", {"line_bytes": 8}, "line 2 is longer"),
        (b"abc\nabcdefghi", {"line_bytes": 8}, "line 2 is longer"),
    ],
)
def test_bounds_of_a_file(raw: bytes, bounds: dict[str, int], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as raised:
        cut(raw, **bounds)
    assert raised.value.param == "file"


def test_a_line_at_a_bound_is_taken() -> None:
    assert cut(b"abcdefg\nab\n", line_bytes=8, file_lines=2, file_bytes=11) == [b"abcdefg\nab\n"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"custom_id": ""}, "invalid_custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id"),
        ({"custom_id": 5}, "invalid_json_line"),
        ({"method": "GET"}, "invalid_method"),
        ({"url": "/v1/chat/completions"}, "mismatched_endpoint"),
        ({"body": "no object"}, "invalid_body"),
        ({"body": {"prompt": "x"}}, "invalid_body"),
        ({"body": {"model": "other"}}, "model_not_found"),
        ({"more": 1}, "invalid_json_line"),
    ],
)
def test_what_a_line_must_be(changes: dict[str, object], code: str) -> None:
    with pytest.raises(WrongLineError) as raised:
        parse_line(json.dumps(LINE | changes).encode(), endpoint="/v1/completions", models=["tiny"])
    assert raised.value.code == code
    assert parse_line(json.dumps(LINE).encode(), endpoint="/v1/completions", models=["tiny"]).custom_id == "a"


@pytest.mark.parametrize(
    "raw", [b"[", b"null", b"[" * 100_000, b'{"body":' * 50_000, b'{"custom_id": "\xff"}', b"\x00"]
)
def test_what_is_no_json_is_said(raw: bytes) -> None:
    with pytest.raises(WrongLineError) as raised:
        parse_line(raw, endpoint="/v1/completions", models=["tiny"])
    assert raised.value.code == "invalid_json_line"


def test_a_checker_counts_all_parts_and_names_lines_as_an_editor_does() -> None:
    checker = LineChecker(endpoint="/v1/completions", models=["tiny"])
    good = [json.dumps(LINE | {"custom_id": str(number)}).encode() for number in range(3)]
    checker.check(good[0] + b"\n\n" + good[1] + b"\n")
    checker.check(good[2] + b"\n" + good[0] + b"\n  \n{")
    assert checker.total == 5
    assert [(error.line, error.code) for error in checker.errors] == [
        (5, "duplicate_custom_id"),
        (7, "invalid_json_line"),
    ]
    assert lines_of(b"a\n\n b \n\t\n") == [b"a", b" b "]


def test_the_lines_of_a_batch_name_one_of_the_served_models_and_all_the_same() -> None:
    def line(number: int, model: str) -> bytes:
        return json.dumps(LINE | {"custom_id": str(number), "body": LINE["body"] | {"model": model}}).encode()

    checker = LineChecker(endpoint="/v1/completions", models=["tiny", "large"])
    checker.check(b"\n".join([line(1, "gpt"), line(2, "large"), line(3, "large"), line(4, "tiny")]))
    assert checker.model == "large"
    assert [(error.line, error.message) for error in checker.errors] == [
        (1, "body.model: 'gpt' is not 'tiny' or 'large'"),
        (4, "body.model: 'tiny' is not 'large'"),
    ]


def test_entries_have_openai_s_form() -> None:
    good = json.loads(answered("batch_7", 3, "mine", status=200, body={"id": "x"}))
    assert good == {
        "id": "batch_req_7_3",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "batch_req_7_3", "body": {"id": "x"}},
        "error": None,
    }
    bad = json.loads(unanswered("batch_7", 3, "mine", code="batch_expired", message="late"))
    assert (bad["response"], bad["error"]) == (None, {"code": "batch_expired", "message": "late"})


def test_a_packer_loses_nothing() -> None:
    packer, entries = Packer(), [b"x" * (number * 500) for number in range(100)]
    parts = [part for entry in entries if (part := packer.add(entry)) is not None]
    rest = packer.rest()
    assert rest is not None
    raw = b"".join([*parts, rest])
    assert raw == b"".join(entry + b"\n" for entry in entries)
    assert (packer.bytes, packer.lines, packer.rest()) == (len(raw), 100, None)
    assert len(parts) > 2


# -- the rest --------------------------------------------------------------------------------------------------------


def form(*fields: tuple[str, bytes]) -> bytes:
    parts = [
        b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value)
        for name, value in fields
    ]
    return b"".join(parts) + b"--b--\r\n"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_form_gives_the_file_as_it_was(step: int) -> None:
    content = b"a\r\n--c no boundary\r\n--\r\n\x00\xff"
    raw = form(('file"; filename="my file.jsonl', content), ("purpose", b"batch"))
    one, found = FileForm("multipart/form-data; boundary=b"), []
    for start in range(0, len(raw), step):
        found += one.feed(raw[start : start + step])
    assert b"".join(found) == content
    assert (one.finish(), one.fields) == ("my file.jsonl", {"purpose": "batch"})


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (form(("purpose", b"batch")), "file: this field is required"),
        (form(('file"; filename="a', b"x")), "purpose: this field is required"),
        (form(("purpose", b"vision")), "purpose: only batch"),
        (form(("purpose", b"x" * 5000)), "purpose: longer"),
        (form(('file"; filename="a', b"x"), ('file"; filename="b', b"x")), "one file at a time"),
        (form(('file"; filename="', b"x")), "needs a filename"),
        (form(("colour", b"red")), "colour: unknown field"),
        (form(("expires_after[anchor]", b"created_at")), "--keep-days"),
        (form(('file"; filename="a', b"x"), ("purpose", b"batch"))[:-6], "not complete"),
        (b"no form", "no form"),
    ],
)
def test_what_is_wrong_with_a_form_is_named(raw: bytes, told: str) -> None:
    one = FileForm("multipart/form-data; boundary=b")

    def read() -> None:
        one.feed(raw)
        one.finish()

    with pytest.raises(InvalidRequestError, match=told):
        read()


@pytest.mark.parametrize(
    "kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300]
)
def test_only_forms_are_taken(kind: str) -> None:
    with pytest.raises(InvalidRequestError):
        FileForm(kind)


def test_pages() -> None:
    records = [BatchRecord(id=str(number), tenant="t", endpoint="e", input_file_id="f") for number in range(5)]

    def page(after: str, limit: int) -> tuple[list[str], bool]:
        found, more = Page(after=after, limit=limit, newest_first=True).of(records, lambda record: record.id)
        return [record.id for record in found], more

    assert page("", 2) == (["4", "3"], True)
    assert page("3", 3) == (["2", "1", "0"], False)
    with pytest.raises(NotKeptError):
        page("9", 3)


def test_lines_take_nothing_of_what_a_tenant_s_clients_may_ask_for() -> None:
    tenant = Tenant(name="acme", limits=Limits(requests_per_minute=5, tokens_per_minute=6, max_concurrent=7))
    lines = of_batches(tenant)
    assert lines.name == "acme:batch"
    assert lines.limits == Limits(requests_per_minute=5, tokens_per_minute=6)
    assert lines.salt("") == tenant.salt("")


async def test_a_worker_that_crashes_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Crashing:
        runs = 0

        async def run(self) -> None:
            self.runs += 1
            if self.runs < 3:
                raise RuntimeError("a mistake")

        async def stop(self) -> None: ...

    monkeypatch.setattr(running, "RESTART_DELAY_S", 0.0)
    worker = Crashing()
    await asyncio.wait_for(running.keep_running(worker), 60)
    assert worker.runs == 3
