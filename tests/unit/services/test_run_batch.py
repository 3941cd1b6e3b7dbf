"""The files of `baton run-batch`: what is a request, and what a kill leaves of the answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.settings import ConfigError
from services.offline.batch import Answers, checked


def line(custom_id: str, **fields: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}} | fields) + "\n"


def test_a_line_that_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = Answers(out)
    assert first.known == set()
    first.add(b'{"custom_id": "a"}')
    with pytest.raises(ConfigError, match="another process writes it"):
        Answers(out)
    first.close()
    out.write_bytes(out.read_bytes() + b'{"custom_id": "b"')
    second = Answers(out)
    assert second.known == {"a"}
    second.add(b'{"custom_id": "b"}')
    second.close()
    assert out.read_text() == '{"custom_id": "a"}\n{"custom_id": "b"}\n'


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("my diary\n")
    with pytest.raises(ConfigError, match="line 1: no answer of a batch"):
        Answers(out)
    assert out.read_text() == "my diary\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (line("a") + "\n" + line("a"), "line 3: custom_id 'a' is there twice"),
        (line("a") + "{", "line 2: no request of a batch"),
        (line("a", method="GET"), "line 1: a custom_id, and POST"),
        (line(""), "line 1: a custom_id, and POST"),
    ],
)
def test_wrong_requests_are_told_before_a_model_is_loaded(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=told):
        checked(tmp_path / "in.jsonl")
    (tmp_path / "in.jsonl").write_text(line("a") + "\n\n" + line("b"))
    assert checked(tmp_path / "in.jsonl") == 2
