"""What parses files of batches, against bytes that somebody made up: an error that says so, or nothing lost."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from gateway.batches.lines import LineChecker, LineCutter, WrongLineError, answered, lines_of, parse_line
from gateway.batches.upload import FileForm

GOOD = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}'
NAMES = st.sampled_from(["custom_id", "method", "url", "body", "model", "prompt", ""]) | st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["POST", "tiny"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
LINES = (
    st.binary(max_size=200)
    | st.dictionaries(NAMES, VALUES, max_size=6).map(lambda value: json.dumps(value).encode())
    | st.builds(lambda cut, more: GOOD[:cut] + more, st.integers(0, len(GOOD)), st.binary(max_size=20))
)


def is_taken(raw: bytes) -> bool:
    """Whether a line is taken; then its custom id comes back as it was."""
    try:
        line = parse_line(raw, endpoint="/v1/completions", models=["tiny"])
    except WrongLineError:
        return False
    entry = json.loads(answered("batch_1", 0, line.custom_id, status=200, body={}))
    assert entry["custom_id"] == json.loads(raw)["custom_id"]
    return True


def test_a_line_is_taken_or_refused(tried: Counter[str]) -> None:
    assert is_taken(GOOD)

    @example(raw=b'{"custom_id":"\\ud800","method":"POST","url":"/v1/completions","body":{"model":"tiny"}}')
    @example(raw=b'{"body":' * 10_000)
    @given(raw=LINES)
    def take(raw: bytes) -> None:
        tried["a line of a batch"] += 1
        is_taken(raw)

    take()


def test_a_file_is_cut_and_nothing_is_lost(tried: Counter[str]) -> None:
    kept = Counter[str]()

    @given(raw=st.lists(LINES, max_size=12).map(b"\n".join), step=st.integers(1, 300))
    def take(raw: bytes, step: int) -> None:
        tried["a file of a batch"] += 1
        cutter, parts = LineCutter(file_bytes=2_000, file_lines=20, line_bytes=250), list[bytes]()
        try:
            for start in range(0, len(raw), step):
                parts += cutter.feed(raw[start : start + step])
            parts += cutter.finish()
        except InvalidRequestError:
            return
        kept["files"] += 1
        assert b"".join(parts) == raw
        checker = LineChecker(endpoint="/v1/completions", models=["tiny"])
        for part in parts:
            checker.check(part)
        assert checker.total == sum(len(lines_of(part)) for part in parts)

    take()
    assert kept["files"]


def test_a_form_is_taken_or_refused(tried: Counter[str]) -> None:
    known = [
        b"--b\r\n",
        b"--b--\r\n",
        b"\r\n",
        b"\r\n\r\n",
        b'content-disposition: form-data; name="file"; filename="a"',
    ]
    known += [b'content-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n']

    @given(pieces=st.lists(st.binary(max_size=30) | st.sampled_from(known), max_size=12))
    def take(pieces: list[bytes]) -> None:
        tried["a form with a file"] += 1
        form = FileForm("multipart/form-data; boundary=b")
        try:
            found = b"".join(data for piece in pieces for data in form.feed(piece))
            form.finish()
        except InvalidRequestError:
            return
        assert found in b"".join(pieces)

    take()
