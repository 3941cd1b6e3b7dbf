"""Answers without servers: the examples of docs/offline.md as they stand there, and a file of requests through kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, BatonError, SamplingParams
from tests.pooling_models import build_pooling_model
from tests.unit.house.measures import ROOT

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PATIENCE_S = 60


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=512, max_sequences=4) as llm:
        yield llm


def test_answers_are_in_the_order_of_their_prompts_and_the_same_alone(llm: LLM) -> None:
    prompts = [f"{number} plus {number} is" for number in range(9)]
    together = llm.generate(prompts, GREEDY)
    assert [one.prompt for one in together] == prompts
    assert llm.generate(prompts[5], GREEDY)[0].outputs[0].text == together[5].outputs[0].text
    lengths = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 40, 3)]
    found = llm.generate(prompts[:3], lengths)
    assert [len(one.outputs[0].token_ids) for one in found] == [1, 40, 3]
    assert {one.outputs[0].finish_reason for one in found} == {"length"}


def test_parameters_are_those_of_the_api(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(question, {"temperature": 0, "max_tokens": 32})
    assert "Paris" in answer.outputs[0].text
    (cut,) = llm.chat(question, {"temperature": 0, "max_tokens": 32, "stop": ["Paris"]})
    assert (cut.outputs[0].finish_reason, cut.outputs[0].text) == ("stop", answer.outputs[0].text.partition("Paris")[0])
    (several,) = llm.generate("Hello", SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=8, logprobs=2))
    assert len(several.outputs) == 3
    assert all(one.logprobs["token_logprobs"] for one in several.outputs)
    again = llm.generate("Hello", SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=8))
    assert [one.text for one in again[0].outputs] == [one.text for one in several.outputs]
    (bound,) = llm.generate("Say", SamplingParams(structured_outputs={"regex": "(yes|no) [0-9]{3}"}, max_tokens=32))
    assert re.fullmatch("(yes|no) [0-9]{3}", bound.outputs[0].text)


@pytest.mark.long
def test_a_model_of_embeddings_makes_vectors_and_no_text(tmp_path: Path) -> None:
    with LLM(build_pooling_model(tmp_path / "mini")) as llm:
        prompts = ["hello world", "the cat sat", "a"] * 5
        found = llm.embed(prompts)
        assert [one.prompt for one in found] == prompts
        assert sum(value**2 for value in found[0].outputs.embedding) == pytest.approx(1.0, abs=1e-5)
        assert found[0].outputs.embedding == pytest.approx(found[3].outputs.embedding, abs=1e-6)
        same, other = llm.score("hello world", ["hello world", "the cat sat"])
        assert same.outputs.score == pytest.approx(1.0, abs=1e-5)
        assert other.outputs.score < 0.999
        with pytest.raises(BatonError, match="makes no text"):
            llm.generate("hello")
        with pytest.raises(BatonError, match="dimensions"):
            llm.embed("hello", dimensions=99)


def test_what_is_refused_is_named_and_the_next_is_answered(llm: LLM) -> None:
    with pytest.raises(BatonError, match="for a model of vectors or scores, and 'demo' generates text"):
        llm.embed("hello")
    with pytest.raises(BatonError, match="prompt 1: temperature"):
        llm.generate(["a", "b"], [GREEDY, {"temperature": -1}])
    with pytest.raises(BatonError, match="512"):
        llm.generate([[5] * 600], GREEDY)
    with pytest.raises(BatonError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.generate("Hello", GREEDY)[0].outputs[0].text


@pytest.mark.long
def test_a_model_that_is_not_there_is_told_at_the_start() -> None:
    with pytest.raises(BatonError, match=r"--model /nowhere: no config\.json there"):
        LLM("/nowhere")


@pytest.mark.long
def test_the_examples_of_the_page_run_as_they_are(tmp_path: Path) -> None:
    page = (ROOT / "docs/offline.md").read_text(encoding="utf-8")
    said = ""
    for example in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", example], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said += done.stdout
    assert "Paris" in said
    assert re.search(r'\{"age": *\d+\} stop', said)


def request(number: int, **fields: Any) -> str:
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": f"Count to {number}."}],
        "max_tokens": 48,
        "temperature": 0,
    }
    line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body | fields}
    return json.dumps(line) + "\n"


def run_batch(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cli", "run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "demo", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_file_is_answered_once_whole_through_kills(tmp_path: Path) -> None:
    total = 120
    (tmp_path / "in.jsonl").write_text("".join(request(number, ignore_eos=True) for number in range(total)))
    out = tmp_path / "out.jsonl"
    for wanted in (10, 50):
        running = run_batch(tmp_path, "--max-sequences", "4")
        give_up_at = time.monotonic() + PATIENCE_S
        while not out.exists() or out.read_bytes().count(b"\n") < wanted:
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        os.kill(running.pid, signal.SIGKILL)
        running.communicate()
        with out.open("ab") as file:
            file.write(b'{"id": "batch_req_offl')  # a line that a kill cut off
    last = run_batch(tmp_path)
    assert f"{total} of {total} requests answered, " in last.communicate(timeout=120)[1]
    assert last.returncode == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(f"r{number}" for number in range(total))
    assert {line["response"]["status_code"] for line in lines} == {200}
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in lines} == {48}


@pytest.mark.long
def test_a_request_that_is_refused_has_its_status_and_the_others_their_answers(tmp_path: Path) -> None:
    wrong = request(2, temperature=-1) + request(3).replace("/v1/chat/completions", "/v1/nothing")
    (tmp_path / "in.jsonl").write_text(request(1) + "\n" + wrong)
    running = run_batch(tmp_path)
    said = running.communicate(timeout=120)[1]
    assert running.returncode == 1
    assert "3 of 3 requests answered, 2 with an error" in said
    lines = {line["custom_id"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert {name: line["response"]["status_code"] for name, line in lines.items()} == {"r1": 200, "r2": 400, "r3": 400}
    assert "temperature" in lines["r2"]["response"]["body"]["error"]["message"]
