"""The files of `baton run-batch`: what is a request, and what a kill leaves of the answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from common.settings import ConfigError
from services.offline.batch import Answers, checked
from services.offline.bounded import bounded
from services.offline.offline import offline_settings


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


@pytest.mark.parametrize(
    "text", ["my diary\n", "my diary", '{"a": 1}', '[{"custom_id": "a"}]', '{\n "custom_id": "a"\n}']
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    for _ in range(2):  # the first refusal keeps no lock
        with pytest.raises(ConfigError, match="line 1: no answer of a batch"):
            Answers(out)
    assert out.read_text() == text


@pytest.mark.parametrize("cut", ["{", '{"cus', '{"custom_id": "a"}'])
def test_a_line_without_its_end_is_removed(tmp_path: Path, cut: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"custom_id": "z"}\n' + cut)
    answers = Answers(out)
    assert answers.known == {"z"}
    answers.close()
    assert out.read_text() == '{"custom_id": "z"}\n'


async def test_places_bound_the_tasks_and_an_error_comes_as_it_is() -> None:
    running, most, gates = 0, 0, [asyncio.Event() for _ in range(5)]

    async def job(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        gates[number - 1].set()  # only a later one lets it end
        if number < 4:
            await gates[number].wait()
        running -= 1
        if number == 4:
            raise OSError("the disk is full")

    async def all_jobs() -> None:
        async with bounded(2) as start:
            for number in range(5):
                await start(job(number))

    with pytest.raises(OSError, match="the disk is full"):
        await all_jobs()
    assert most == 2


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


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_what_one_process_does_not_do_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        offline_settings(["--model", "demo", flag, "2"], lambda line: None)
