"""`baton batch`: what is typed, what is shown, and what is asked for, against a gateway of this test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.batch import __main__ as batch_command
from cli.batch.__main__ import Batches, endpoint_of
from cli.batch.settings import BatchSettings
from cli.batch.view import ended, is_good, progress, table
from common.settings import ConfigError
from services.runtime.loading import load_settings

LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}


def batch(status: str = "in_progress", completed: int = 0, failed: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"total": 10, "completed": completed, "failed": failed}
    made = {"id": "batch_1", "status": status, "request_counts": counts, "created_at": 0, "endpoint": "/v1/completions"}
    return made | {"errors": None, "output_file_id": None, "error_file_id": None} | more


def test_two_words_come_first() -> None:
    def typed(*words: str) -> tuple[str, str]:
        settings = load_settings(BatchSettings, command="batch", arguments=words, environment={})
        return settings.action, settings.name

    assert typed("watch", "batch_1", "--url", "x") == ("watch", "batch_1")
    assert typed("list", "--json") == ("list", "")
    assert typed("--json") == ("list", "")
    with pytest.raises(
        ConfigError, match="ACTION: one of submit, run, list, watch, cancel, get, errors is needed, not 'take'"
    ):
        typed("take")
    with pytest.raises(ConfigError, match=r"--action: an argument since 0\.2: baton batch ACTION"):
        typed("--action", "list")


def test_a_file_s_endpoint_is_that_of_its_first_line(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(LINE) + "\n")
    assert endpoint_of(file) == "/v1/completions"
    for wrong in ("", "[]", '{"url": "/v1/embeddings"}', "{"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="each line is"):
            endpoint_of(file)
    with pytest.raises(ConfigError, match="No such file"):
        endpoint_of(tmp_path / "none")


def test_what_is_to_be_submitted_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="which file"), httpx.Client() as client:
        Batches(client, BatchSettings(action="submit")).do()


def test_progress_knows_its_pace_and_what_is_left() -> None:
    line = progress(batch(completed=4, failed=1), 2.0, 1)
    assert line == f"in_progress  {'█' * 12}{'░' * 12} 5/10, 1 failed, 2.0 lines/s, about 2 s more"
    assert "lines/s" not in progress(batch(), 2.0, 0)
    assert "0/0" in progress(batch() | {"request_counts": {"total": 0, "completed": 0, "failed": 0}}, 0.0, 0)


def test_an_end_says_what_was_wrong_and_what_to_type() -> None:
    said = ended(batch("failed", errors={"data": [{"line": 3, "message": "no\x1b[2J JSON", "code": "x"}]}))
    assert "line 3: no\\x1b[2J JSON" in said
    said = ended(batch("completed", 9, 1, output_file_id="f", error_file_id="e"))
    assert "9 of 10 lines, 1 failed" in said
    assert "baton batch get batch_1 --output answers.jsonl" in said
    assert "baton batch errors batch_1" in said
    assert [is_good(one) for one in (batch("completed", 10), batch("completed", 9, 1), batch("expired"))] == [
        True,
        False,
        False,
    ]
    assert "baton batch submit" in table([])
    assert table([batch()]).splitlines()[1].split()[:5] == ["batch_1", "in_progress", "0", "0", "10"]


def done(settings: BatchSettings, answers: list[httpx.Response]) -> tuple[int, list[httpx.Request]]:
    """The exit code, and what was asked for."""
    asked: list[httpx.Request] = []
    left: Iterator[httpx.Response] = iter(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        request.read()
        asked.append(request)
        return next(left)

    with httpx.Client(transport=httpx.MockTransport(handle), base_url="http://baton") as client:
        return Batches(client, settings).do(), asked


def told(value: Any) -> httpx.Response:
    return httpx.Response(200, json=value)


def test_watching_ends_with_the_batch_and_its_exit_code_says_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_command, "LOOK_EVERY_S", 0.0)
    answers = [told({"data": [batch()]}), *(told(batch(completed=n)) for n in (0, 5)), told(batch("completed", 9, 1))]
    code, asked = done(BatchSettings(action="watch"), answers)
    assert code == 1
    assert [request.url.path for request in asked] == ["/v1/batches", *["/v1/batches/batch_1"] * 3]
    assert "9 of 10 lines, 1 failed" in capsys.readouterr().out


def test_submitting_uploads_and_makes_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(LINE) + "\n")
    code, asked = done(BatchSettings(action="submit", name=str(file)), [told({"id": "file_1"}), told(batch())])
    assert code == 0
    assert file.read_bytes() in asked[0].content
    assert json.loads(asked[1].content) == {
        "input_file_id": "file_1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    assert capsys.readouterr().out.startswith("batch_1\n")


def test_answers_are_saved_as_a_whole(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    settings = BatchSettings(action="get", name="batch_1", output=str(out))
    done(settings, [told(batch("completed", 10, output_file_id="f")), httpx.Response(200, content=b"one\n")])
    assert out.read_bytes() == b"one\n"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("settings", "answers", "said"),
    [
        (BatchSettings(action="get", name="batch_1"), [told(batch())], "is in_progress and has no answer"),
        (BatchSettings(action="errors", name="b"), [told(batch())], "has no line that failed"),
        (BatchSettings(action="watch", name="../x"), [], "not the id of a batch"),
        (BatchSettings(action="cancel"), [told({"data": []})], "no batch yet"),
        (
            BatchSettings(action="cancel", name="b"),
            [told(batch()), httpx.Response(409, json={"error": {"message": "it is over"}})],
            "it is over",
        ),
    ],
)
def test_what_can_t_be_done_is_said(settings: BatchSettings, answers: list[httpx.Response], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        done(settings, answers)
